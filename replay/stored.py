"""Groups as a store holds them: encoded, with what the store must know of each."""

from __future__ import annotations

import msgspec

from leeway.replay.bounds import priority_of
from leeway.replay.codec import decode, encode
from leeway.replay.schema import Columns, Group, PolicyVersion, columns_of
from leeway.replay.store import Lease


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A group on its way into the buffer."""

    payload: bytes
    oldest: int
    """Oldest and newest version among its tokens."""
    newest: int
    priority: float
    trajectories: list[tuple[int, int]]
    """Turns and tokens of each."""


class StoredGroup(msgspec.Struct, frozen=True, array_like=True):
    """What the buffer keeps of a group beside its payload."""

    version: int
    """At admission; under drop the oldest among its tokens."""
    newest: int
    arrival: int
    draws: int
    """Steps that have trained it."""
    returns: int
    """How often it came back untrained."""
    size: int
    """Bytes of its payload."""
    priority: float
    trajectories: list[tuple[int, int]]
    """Turns and tokens of each."""


class Leased(msgspec.Struct, frozen=True):
    """Groups under a lease, not read yet."""

    lease_id: str
    version: int
    ramp_version: int
    ids: list[str]


class Drawn(msgspec.Struct, frozen=True):
    """Groups under a lease."""

    version: int
    ramp_version: int
    ids: list[str]
    payloads: list[bytes | memoryview]


def entry_of(group: Group, columns: Columns | None = None) -> Entry:
    """The group as the buffer stores it; `columns` are its own, where the caller has them."""
    columns = columns or columns_of(group)
    return Entry(
        payload=encode(group, columns),
        oldest=columns.oldest,
        newest=columns.newest,
        priority=priority_of(group),
        trajectories=[(len(t.turns), len(t.token_ids)) for t in group.trajectories],
    )


def lease_of(lease_id: str, drawn: Drawn, waited_s: dict[str, float] | None = None) -> Lease:
    """The lease with its groups decoded; `waited_s` as in Lease."""
    return Lease(
        lease_id,
        PolicyVersion(drawn.version),
        tuple(decode(payload) for payload in drawn.payloads),
        PolicyVersion(drawn.ramp_version),
        waited_s or {},
    )
