"""What actors and learner agree on: schema, replay buffer, staleness, policy board, transfer."""
