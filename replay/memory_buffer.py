"""The state of the buffer in memory and its transitions; none of them waits.

The same rules as the Lua scripts, over schedule.py. Groups are kept encoded, so that bytes are
counted and copies are made as with Redis. memory_store.py adds the waiting.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from typing import Literal

import msgspec

from leeway.replay.bounds import newest_version
from leeway.replay.codec import decode, encode
from leeway.replay.config import ReplayConfig
from leeway.replay.schedule import admissible, drawable, is_engine_behind
from leeway.replay.schema import Group, PolicyVersion
from leeway.replay.store import Lease, RefusalReason, ReplayStats, Slot
from leeway.replay.waiting import NO_ENGINE, Refusal, Shortage

REMEMBERED = 10_000
"""How many added groups and acknowledged leases are recognised when they come again."""


class _Held(msgspec.Struct):
    """A slot: version at admission, expiry on the clock, and the newest version it may hold."""

    version: int
    expires_at_s: float
    ceiling: float = float("inf")


class _Stored(msgspec.Struct):
    """A buffered or leased group."""

    version: int
    newest: int
    arrival: int
    data: bytes
    num_draws: int = 0
    lease_id: str | None = None


class _Drawn(msgspec.Struct):
    version: int
    expires_at_s: float
    ids: list[str]


class Buffer:
    """Slots, groups and leases on one clock."""

    def __init__(self, config: ReplayConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.learner_version = 0
        self.ramp_version = 0
        self.is_paused = False
        self.slots: dict[str, _Held] = {}
        self.groups: dict[str, _Stored] = {}
        self.leases: dict[str, _Drawn] = {}
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._added: dict[str, None] = {}
        self._acknowledged: dict[str, None] = {}
        self._clock = clock

    @property
    def next_version(self) -> int:
        """The version the next draw is for: leases in hand are the steps before it."""
        return self.learner_version + len(self.leases)

    def reclaim(self) -> None:
        """Take back expired slots and leases; every transition starts with it."""
        now = self._clock()
        for slot_id in [i for i, slot in self.slots.items() if slot.expires_at_s <= now]:
            del self.slots[slot_id]
            self.counts["slots_expired"] += 1
        for lease_id in [i for i, lease in self.leases.items() if lease.expires_at_s <= now]:
            self.return_lease(lease_id)
            self.counts["leases_expired"] += 1

    def expires_in_s(self) -> float | None:
        """Seconds to the nearest expiry."""
        held = [*self.slots.values(), *self.leases.values()]
        return min(h.expires_at_s for h in held) - self._clock() if held else None

    def admit(self, n: int, engine_version: int | None) -> list[Slot] | Refusal:
        """Grant up to `n` slots, or say which bound holds them back."""
        version = NO_ENGINE if engine_version is None else engine_version
        self.reclaim()
        num_groups = len(self.slots) + len(self.groups)
        outstanding = self.playing() + self.ready_counts()
        c = self.config
        bounds = (c.max_staleness, c.groups_per_step, c.staleness_policy)
        window = admissible(outstanding, version, self.next_version, *bounds)
        reason = self._refusal_reason(version, num_groups, window)
        if reason is not None:
            return Refusal(
                reason=reason,
                version=engine_version,
                learner_version=self.learner_version,
                next_version=self.next_version,
                num_groups=num_groups,
                outstanding=dict(outstanding),
                expires_in_s=self.expires_in_s(),
            )
        num_granted = min(n, window, self.config.max_groups - num_groups)
        slots = [Slot(uuid.uuid4().hex, PolicyVersion(version)) for _ in range(num_granted)]
        expires_at_s = self._clock() + self.config.slot_timeout_s
        self.slots |= {slot.slot_id: _Held(version, expires_at_s) for slot in slots}
        self.counts["admitted"] += num_granted
        return slots

    def _refusal_reason(self, version: int, num_groups: int, window: int) -> RefusalReason | None:
        if self.is_paused:
            return "paused"
        bounds = (self.config.max_staleness, self.config.staleness_policy)
        if is_engine_behind(version, self.learner_version, *bounds):
            return "engine-behind"
        if num_groups >= self.config.max_groups:
            return "capacity"
        return "window" if window == 0 else None

    def add(self, group: Group) -> Literal["added", "dropped", "expired"]:
        """Fill the group's slot. `dropped`: it holds tokens of a version lost in a crash."""
        self.reclaim()
        if group.group_id in self._added:
            return "added"
        slot = self.slots.pop(group.group_id, None)
        if slot is None:
            return "expired"
        _remember(self._added, group.group_id)
        newest = newest_version(group)
        if newest > slot.ceiling:
            self.dropped["lost-version"] += 1
            return "dropped"
        self.counts["added"] += 1
        self.groups[group.group_id] = _Stored(
            slot.version, newest, self.counts["added"], encode(group)
        )
        return "added"

    def drop(self, slot_id: str, reason: str) -> None:
        """Give a slot back, counted by reason."""
        self.reclaim()
        if self.slots.pop(slot_id, None) is not None:
            self.dropped[reason] += 1

    def draw(self) -> Lease | Shortage:
        """Lease one step's groups, or say what is missing."""
        self.reclaim()
        version = self.next_version
        candidates = self._fitting_candidates(version)
        c = self.config
        bounds = (c.max_staleness, c.groups_per_step, c.staleness_policy)
        plan = drawable(self.ready_counts(), self.playing(), version, *bounds)
        if not plan.is_ready:
            return self._shortage(version, plan.missing, plan.blocking)
        lease_id = uuid.uuid4().hex
        expires_at_s = self._clock() + self.config.lease_timeout_s
        self.leases[lease_id] = _Drawn(version, expires_at_s, candidates)
        for group_id in candidates:
            self.groups[group_id].lease_id = lease_id
            self.groups[group_id].num_draws += 1
        self.counts["drawn"] += len(candidates)
        groups = tuple(decode(self.groups[group_id].data) for group_id in candidates)
        return Lease(lease_id, PolicyVersion(version), groups, PolicyVersion(self.ramp_version))

    def _fitting_candidates(self, version: int) -> list[str]:
        """The ready groups of earliest deadline; those that may not be trained are dropped.

        What takes the place of a dropped group is younger: under exact the ramp begins anew.
        """
        while True:
            ready = [i for i in self.order() if self.groups[i].lease_id is None]
            candidates = ready[: self.config.groups_per_step]
            reasons = {i: self._unfit_reason(self.groups[i], version) for i in candidates}
            unfit = {group_id: reason for group_id, reason in reasons.items() if reason}
            for group_id, reason in unfit.items():
                del self.groups[group_id]
                self.dropped[reason] += 1
                self.ramp_version = version
            if not unfit:
                return candidates

    def _unfit_reason(self, group: _Stored, version: int) -> str | None:
        if group.num_draws >= self.config.max_draws:
            return "max-draws"
        if group.version + self.config.max_staleness < version:
            return "overdue"
        is_exact = self.config.staleness_policy == "exact"
        return "mixed-versions" if is_exact and group.newest != group.version else None

    def _shortage(self, version: int, missing: int, blocking: dict[int, int]) -> Shortage:
        until = max(blocking) if blocking else None
        awaited = [i for i, slot in self.slots.items() if until is None or slot.version <= until]
        return Shortage(
            version=version,
            missing=missing,
            blocking_until=until,
            playing=dict(self.playing()),
            awaited=awaited[:4],
            expires_in_s=self.expires_in_s(),
        )

    def acknowledge(self, lease_id: str, version: int) -> Literal["ok", "expired"]:
        """Forget the lease's groups and move the learner's version."""
        self.reclaim()
        if lease_id in self._acknowledged:
            return "ok"
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return "expired"
        for group_id in lease.ids:
            del self.groups[group_id]
        _remember(self._acknowledged, lease_id)
        self.learner_version = max(self.learner_version, version)
        self.counts["trained"] += len(lease.ids)
        return "ok"

    def return_lease(self, lease_id: str) -> None:
        """Put the lease's groups back."""
        lease = self.leases.pop(lease_id, None)
        for group_id in lease.ids if lease else ():
            self.groups[group_id].lease_id = None

    def restore_version(self, version: int) -> int:
        """Return every lease and drop what versions after `version` sampled; begin the ramp."""
        self.reclaim()
        for lease_id in list(self.leases):
            self.return_lease(lease_id)
        self.learner_version = self.ramp_version = version
        lost_groups = [i for i, group in self.groups.items() if group.newest > version]
        lost_slots = [i for i, slot in self.slots.items() if slot.version > version]
        for group_id in lost_groups:
            del self.groups[group_id]
        for slot_id in lost_slots:
            del self.slots[slot_id]
        for slot in self.slots.values():
            slot.ceiling = version
        num_lost = len(lost_groups) + len(lost_slots)
        if num_lost:
            self.dropped["lost-version"] += num_lost
        return num_lost

    def playing(self) -> Counter[int]:
        """Slots by version."""
        return Counter(slot.version for slot in self.slots.values())

    def ready_counts(self) -> Counter[int]:
        """Buffered groups by version."""
        return Counter(g.version for g in self.groups.values() if g.lease_id is None)

    def order(self) -> list[str]:
        """Ids of buffered and leased groups, earliest deadline first."""
        return sorted(self.groups, key=lambda i: (self.groups[i].version, self.groups[i].arrival))

    def stats(self, wait_room_s: float, wait_data_s: float) -> ReplayStats:
        """A snapshot; the waits are counted by the caller."""
        self.reclaim()
        num_leased = sum(len(lease.ids) for lease in self.leases.values())
        stored = Counter(group.version for group in self.groups.values())
        return ReplayStats(
            learner_version=PolicyVersion(self.learner_version),
            num_slots=len(self.slots),
            num_ready=len(self.groups) - num_leased,
            num_leased=num_leased,
            num_bytes=sum(len(group.data) for group in self.groups.values()),
            admission_paused=self.is_paused,
            num_admitted=self.counts["admitted"],
            num_added=self.counts["added"],
            num_drawn=self.counts["drawn"],
            num_trained=self.counts["trained"],
            num_slots_expired=self.counts["slots_expired"],
            num_leases_expired=self.counts["leases_expired"],
            dropped=dict(self.dropped),
            outstanding=dict(sorted((self.playing() + stored).items())),
            wait_room_s=wait_room_s,
            wait_data_s=wait_data_s,
        )


def _remember(recent: dict[str, None], name: str) -> None:
    """Keep the last REMEMBERED names."""
    recent[name] = None
    if len(recent) > REMEMBERED:
        del recent[next(iter(recent))]
