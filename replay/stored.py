"""Groups as a store holds them: encoded, with what the store must know of each."""

from __future__ import annotations

import logging

import msgspec

from leeway.replay.bounds import priority_of
from leeway.replay.codec import decode, encode
from leeway.replay.errors import CodecError
from leeway.replay.schema import Columns, Group, PolicyVersion, columns_of
from leeway.replay.store import Lease

log = logging.getLogger(__name__)


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


class Unreadable(msgspec.Struct, frozen=True):
    """Drawn groups that cannot be decoded."""

    faults: dict[str, str]
    """Group id -> what is wrong with its bytes."""

    def log(self) -> None:
        """An error for each, as it is dropped."""
        for group_id, fault in self.faults.items():
            log.error("group %s is dropped as unreadable: %s", group_id, fault)


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


def lease_of(lease_id: str, drawn: Drawn) -> Lease:
    """The lease with its groups decoded, where the caller has written them. Raises CodecError."""
    lease = read_lease(lease_id, drawn)
    if isinstance(lease, Unreadable):
        raise CodecError(str(lease.faults))
    return lease


def read_lease(
    lease_id: str, drawn: Drawn, waited_s: dict[str, float] | None = None
) -> Lease | Unreadable:
    """The lease with its groups decoded, or which of them cannot be; `waited_s` as in Lease."""
    groups: list[Group] = []
    faults: dict[str, str] = {}
    for group_id, payload in zip(drawn.ids, drawn.payloads, strict=True):
        try:
            groups.append(decode(payload))
        except CodecError as error:
            faults[group_id] = str(error)
    if faults:
        return Unreadable(faults)
    return Lease(
        lease_id,
        PolicyVersion(drawn.version),
        tuple(groups),
        PolicyVersion(drawn.ramp_version),
        waited_s or {},
    )
