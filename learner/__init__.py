"""The learning side: objective, trainer, checkpoints, and the publishing of weights."""
