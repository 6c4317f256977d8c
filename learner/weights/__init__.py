"""Publishing: from the learner's parameters to every engine."""
