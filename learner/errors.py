"""The exceptions of learner.

LeewayError
├── NonFiniteError     a log-prob, advantage, loss or gradient that is not a number
├── CheckpointError    a checkpoint that cannot be written or read
└── LearnerStopped     the learner was asked to stop, and did so between two steps
"""

from leeway.replay.errors import LeewayError


class NonFiniteError(LeewayError):
    """A log-prob, value, advantage, loss or gradient is not finite.

    Raised before the optimizer step that it would have spoilt.
    """

    exit_code = 3


class CheckpointError(LeewayError):
    """A checkpoint could not be written or read."""


class LearnerStopped(LeewayError):
    """The learner was asked to stop, and did so between two steps."""
