"""The replay buffer as actors and learner see it: one protocol, two implementations.

`RedisReplay` (redis_store.py) is the product, `MemoryReplay` (memory_store.py) serves
single-process experiments and tests. Both pass tests/contract/test_replay_contract.py.

Staleness is kept by schedule, not by discarding. A group admitted while the oldest live engine
holds version `a` may be trained while the learner holds version `a + max_staleness` at the latest:
that is its deadline. With `B = groups_per_step` and the learner at `v`, the buffer keeps this true
for every d >= v:

    number of outstanding groups with deadline <= d   <=   (d - v + 1) * B

Outstanding means admitted and neither trained nor dropped: slots, buffered and leased groups.
`admit` refuses what would break it and, under an adaptive lookahead, what the learner has not
needed lately (lookahead.py); `draw` hands out the earliest deadlines first and waits for a
group still being played rather than leave it behind past its deadline. With a lease in hand, its
groups count as trained at `v` and the next draw is for `v + 1`; so a learner may draw ahead.

    learner at v=5, B=2, max_staleness=1, engines at 5: deadlines are 6
    admit 4 groups -> granted: d=6 allows (6-5+1)*2 = 4.   a fifth -> refused, reason "window"

Under `staleness_policy = "exact"` the window is the same, but groups are admitted only while the
oldest engine holds the learner's version and no lease is held, and drawn only when all
(max_staleness + 1) * B groups are ready. So no version is published while a group is played, and
every group is exactly max_staleness old, but for the ramp (Lease.ramp_version).

Under `staleness_policy = "drop"` there is no window: groups are admitted as long as there is room,
by evicting others if need be, and those that have grown too old for the next step are dropped and
counted.

Whatever the policy, `draw_by` chooses among the groups that are ready, the limiter holds inserts
and samples together, and a group is under one live lease at most.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, Protocol

import msgspec

from leeway.replay.schema import Group, GroupId, PolicyVersion

RefusalReason = Literal[
    "window", "lookahead", "capacity", "bytes", "limiter", "engine-behind", "paused"
]
"""Which bound held an admission back: the version window, what the learner has needed lately,
`max_groups`, `max_bytes`, the limiter, engines too old for the learner's version (under exact: at
any other), or admission stopped for shutdown."""

ShortageReason = Literal["missing", "blocked", "limiter"]
"""What held a draw back: too few groups, groups still being played that must be in this step, or
the limiter."""


VersionSource = Callable[[], Awaitable[PolicyVersion | None]]
"""Gives the oldest live engine version, None while no engine lives; PolicyBoard.oldest_version."""


class Slot(msgspec.Struct, frozen=True, gc=False):
    """Permission for one group to exist until it is trained or dropped."""

    slot_id: str
    """Also the group id of the group that fills it."""
    version: PolicyVersion
    """Oldest live engine version at admission."""
    shard: int = 0
    """Where its group goes."""


class Lease(msgspec.Struct, frozen=True, eq=False):
    """Groups handed to the learner until a deadline."""

    lease_id: str
    version: PolicyVersion
    """The learner version they were drawn for."""
    groups: tuple[Group, ...]
    ramp_version: PolicyVersion = PolicyVersion(0)
    """The learner version at which the buffer began, was restored, or last dropped ready groups:
    groups admitted up to it may be trained younger than max_staleness under exact."""
    waited_s: dict[str, float] = {}
    """Seconds its draw waited, by ShortageReason: what was short meanwhile."""


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """Who waits now."""

    side: Literal["rollout", "learner"]
    reason: RefusalReason | ShortageReason
    since_s: float
    """Of the one that waits longest, where there are several."""
    num: int = 1
    """Callers; those of one process may be one record."""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A slot or a lease that is held now."""

    id: str
    version: int
    """Engine version at admission, or learner version of the draw."""
    since_s: float
    expires_in_s: float
    num_groups: int = 1


class ReplayStats(msgspec.Struct, frozen=True, kw_only=True):
    """A consistent snapshot of the buffer, taken by one script."""

    learner_version: PolicyVersion
    num_slots: int
    """Groups being played."""
    num_ready: int
    """Groups buffered and free to be drawn, also those that were trained before."""
    num_leased: int
    """Groups at the learner."""
    num_held_back: int = 0
    """Groups of the version window that are not admitted, since the learner has done without them
    lately; 0 unless `lookahead` is adaptive."""
    num_bytes: int
    """Bytes of buffered and leased groups as stored."""
    admission_paused: bool
    num_admitted: int
    num_added: int
    num_drawn: int
    """Hand-outs; a group drawn twice counts twice."""
    num_trained: int
    """Groups acknowledged, once for every step that trained them."""
    num_slots_expired: int
    num_leases_expired: int
    dropped: dict[str, int]
    """Dropped groups by reason: the callers' own, and the buffer's "returned" (came back from the
    learner more than max_returns times), "unreadable" (its bytes are not a group: cut or changed
    after they were written), "lost-version", "overdue" (too old for any step to come:
    under drop as a matter of course, else after limits were lowered or a step was skipped),
    "evicted" (under drop, for room) and, under exact, "mixed-versions" (not all of the slot's
    version, buffered under another policy). A group that was trained before is not counted."""
    dropped_turns: dict[str, dict[int, int]] = {}
    """Trajectories of dropped groups by reason and number of turns."""
    dropped_tokens: dict[str, dict[int, int]] = {}
    """The same by length: at most so many tokens, powers of two."""
    outstanding: dict[int, int]
    """Untrained groups by version: slots, buffered and leased."""
    wait_room_s: float
    """Seconds rollout workers have waited for admission, summed over callers."""
    play_s: float = 0.0
    """Seconds slots were held until they were filled or dropped, summed over slots."""
    wait_data_s: float
    """Seconds the learner has waited for groups."""
    train_s: float = 0.0
    """Seconds leases were held until they were acknowledged or came back, summed over leases."""
    waits: tuple[Waiting, ...] = ()
    """Who waits now."""
    slots: tuple[Held, ...] = ()
    """The slots that expire next, 64 at most."""
    leases: tuple[Held, ...] = ()
    """Every lease."""


class Replay(Protocol):
    """Slots, groups and leases. Every call is one atomic step; blocking calls take a deadline."""

    async def admit(
        self, n: int, version: PolicyVersion | VersionSource, timeout_s: float
    ) -> list[Slot]:
        """Return between 1 and `n` slots, 1000 at most, waiting up to `timeout_s` for the first.

        `version` is the oldest version any live engine may still sample from. A caller that may
        wait gives a source, which is asked at every try: with a fixed version it would be refused
        on after the engines have moved. A caller that waits while admission is paused is told at
        once; one that comes during the pause waits for its end.
        Raises WaitTimeout naming the bound that held it back (a RefusalReason and its numbers), and
        DataError unless `n` is at least 1.
        """
        ...

    async def add(self, slot: Slot, group: Group) -> None:
        """Fill a slot. Idempotent by group id; after it returns the group survives any process.

        Raises DataError for a malformed group or one with tokens older than the slot's version
        (under exact: of any other version), SlotExpired when the slot is no longer held.
        """
        ...

    async def drop(self, slot: Slot, reason: str) -> None:
        """Give a slot back unfilled, counted by reason. Idempotent."""
        ...

    async def draw(self, timeout_s: float) -> Lease:
        """Lease `groups_per_step` groups: under pace those that can wait no longer, then by
        `draw_by`.

        Raises WaitTimeout naming what is missing: groups not yet ready, or the ones still being
        played that must be in this step to stay within the bound. Under exact a second draw waits
        until the first lease is acknowledged or returned and the window is full again. A group that
        cannot be read is dropped, and the others are drawn again.
        """
        ...

    async def acknowledge(self, lease: Lease, version: PolicyVersion) -> None:
        """The groups were trained and made `version`: move the learner's version, and forget those
        that were trained max_draws times or are too old for another step.

        Raises LeaseExpired when the lease is no longer held.
        """
        ...

    async def release(self, lease: Lease) -> None:
        """Hand the groups back untrained."""
        ...

    async def update_priorities(self, priorities: Mapping[str, float]) -> int:
        """Set priorities, at least 0, by group id; returns how many of the groups are stored.

        They count from the next draw on, with draw_by or evict_by "prioritised". Raises DataError
        for a number that is not finite or below 0.
        """
        ...

    async def restore_version(self, version: PolicyVersion) -> int:
        """The learner resumed at `version`: return every lease, move the learner's version there,
        and drop the groups that no longer fit (sampled by a version that was lost with the crash,
        reason "lost-version"). Returns how many were dropped.

        Under exact the ramp begins anew with the groups that are left. B=2, max_staleness=1, ready
        2 from version 2 and 2 from 3, restored at 2: those from 3 go, 2 more are admitted at 2, and
        the draws are 0, 1, 1, ... old.
        """
        ...

    async def pause_admission(self, paused: bool) -> None:
        """Stop or resume granting slots; waiting callers are told at once."""
        ...

    async def stats(self) -> ReplayStats:
        """A consistent snapshot."""
        ...

    async def group_ids(self) -> list[GroupId]:
        """Ids of buffered and leased groups, earliest arrival first."""
        ...

    async def close(self) -> None:
        """Close connections. The data stays."""
        ...
