"""The exceptions of learner.

LeewayError
├── NonFiniteError     a loss, log-prob or gradient that is not a number; no weight was changed
├── CheckpointError    a checkpoint that cannot be written or read
└── LearnerStopped     the learner was asked to stop, and did so between two steps
"""

from leeway.replay.errors import LeewayError


class NonFiniteError(LeewayError):
    """A loss, log-prob or gradient is not finite. Raised before any weight changes."""


class CheckpointError(LeewayError):
    """A checkpoint could not be written or read."""


class LearnerStopped(LeewayError):
    """The learner was asked to stop, and did so between two steps."""
