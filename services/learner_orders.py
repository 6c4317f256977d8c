"""What rank 0 of the learner tells the others: each order is one broadcast, as msgpack."""

from __future__ import annotations

import msgspec


class Train(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 to the others: one step."""

    groups: list[bytes]
    """Encoded."""


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 to the others: hand over the weights."""


class Save(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 to the others: a checkpoint of the current version."""


class Idle(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 to the others: it waits for engines or data, and lives."""


class Change(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 to the others: settings from now on."""

    values: dict[str, float]


class End(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 to the others: that was all."""


Order = Train | Gather | Save | Idle | Change | End
