"""The exceptions of replay.

LeewayError                  every error this project raises on purpose
├── ConfigurationError       bad input; the message names the key and what would be right
├── DataError                a record, question or corpus line that cannot be used
│   └── CodecError           bytes that are not a group of this schema version
├── WaitTimeout              a deadline passed; the message says who was waited for
│   └── NoAnswer             Redis was waited for: it was silent when the deadline came
├── StoreError               the buffer refused an operation
│   ├── StoreUnavailable     no answer from Redis for as long as a call is tried
│   ├── SlotExpired          the slot's lease ended before the group was added
│   ├── LeaseExpired         the draw's lease ended before it was acknowledged
│   └── StalenessViolation   a group outside the staleness bound reached a consumer
└── TransferError            weights could not be published or received
    └── ChecksumMismatch     the received bytes are not the sent ones; the engine keeps its weights
"""

from collections.abc import Mapping


class LeewayError(Exception):
    """Base of every error raised on purpose."""

    exit_code: int = 1
    """Of a command that ends with it: 2 bad input; 3 a fault that would come again, so that nobody
    starts the process again; 1 any other."""


class ConfigurationError(LeewayError):
    """Bad input. The message is one sentence that names the key and says what would be right."""

    exit_code = 2


class DataError(LeewayError):
    """A record, question or corpus line that cannot be used."""

    exit_code = 2


class CodecError(DataError):
    """Bytes that are not a group of this schema version."""


class WaitTimeout(LeewayError):
    """A deadline passed. The message names whom was waited for."""

    def __init__(
        self,
        message: str,
        missing: tuple[str, ...] = (),
        waited_s: Mapping[str, float] | None = None,
    ) -> None:
        """`missing` are the ids of those that were waited for, where they have one; `waited_s` are
        the seconds of a draw by what was short."""
        super().__init__(message)
        self.missing = missing
        self.waited_s = waited_s or {}


class NoAnswer(WaitTimeout):
    """Redis was silent when the deadline came. Whether there is room, or a step, nobody knows."""


class StoreError(LeewayError):
    """The replay buffer refused an operation."""


class StoreUnavailable(StoreError):
    """Redis gave no answer for as long as a call is tried."""


class SlotExpired(StoreError):
    """The slot's lease ended before its group was added; the group must be produced again."""


class LeaseExpired(StoreError):
    """The draw's lease ended before it was acknowledged; its groups went back to the buffer."""


class StalenessViolation(StoreError):
    """A group outside the staleness bound reached a consumer. Stops the run."""

    exit_code = 3


class TransferError(LeewayError):
    """Weights could not be published or received."""


class ChecksumMismatch(TransferError):
    """The received bytes are not the sent ones; the engine keeps the weights it has."""
