"""The state of the buffer in memory and its transitions; none of them waits.

The same rules as the Lua scripts, over schedule.py, limiter.py and selection.py. Groups are kept
encoded, so that bytes are counted and copies are made as with Redis. memory_store.py adds the
waiting.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from leeway.replay.config import ReplayConfig
from leeway.replay.limiter import limiter_of
from leeway.replay.lookahead import MORE_EVERY_S, Lookahead
from leeway.replay.memory_counts import Dropped
from leeway.replay.schedule import admissible, drawable, is_engine_behind
from leeway.replay.schema import PolicyVersion
from leeway.replay.selection import ARRIVALS, draw_score, evict_score, rescaled
from leeway.replay.store import Held, RefusalReason, ReplayStats, Slot, Waiting
from leeway.replay.stored import Drawn, Entry, StoredGroup
from leeway.replay.waiting import NO_ENGINE, Refusal, Shortage

REMEMBERED = 10_000
"""How many added groups and acknowledged leases are recognised when they come again."""


class _Slot(msgspec.Struct):
    version: int
    since_s: float
    expires_at_s: float
    ceiling: float = math.inf
    """Newest version that its group may hold."""


class _Lease(msgspec.Struct):
    version: int
    since_s: float
    expires_at_s: float
    ids: list[str]


class _Stored(msgspec.Struct):
    record: StoredGroup
    payload: bytes
    draw_score: float = 0.0
    evict_score: float = 0.0
    lease_id: str | None = None

    @property
    def place(self) -> int:
        return self.record.version * ARRIVALS + self.record.arrival


class BufferState(msgspec.Struct, frozen=True):
    """A buffer without leases, to go on from later. Groups in play and what was counted of dropped
    ones are no part of it."""

    learner_version: int
    ramp_version: int
    counts: dict[str, int]
    groups: dict[str, _Stored]
    """By id, in the order in which they came."""
    drawn_until: float
    evicted_until: float
    largest: int
    """Bytes of the largest group there ever was; a slot counts as large."""
    lookahead: Lookahead


class Buffer:
    """Slots, groups and leases on one clock, which gives seconds."""

    def __init__(self, config: ReplayConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.limiter = limiter_of(config)
        self.learner_version = 0
        self.ramp_version = 0
        self.is_paused = False
        self.slots: dict[str, _Slot] = {}
        self.groups: dict[str, _Stored] = {}
        self.leases: dict[str, _Lease] = {}
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {"room": 0.0, "data": 0.0, "play": 0.0, "train": 0.0}
        self.dropped = Dropped()
        self.waits: dict[str, tuple[Waiting, float]] = {}
        """Who waits, and since when by the clock."""
        self._lookahead = Lookahead()
        self._outstanding = -1
        """Groups played and ready when the last step ended; -1 before, and behind the draw that
        looked at it."""
        self._added_at_s = 0.0
        """When the lookahead last let more in, for what a draw lacked."""
        self._was_blocked = False
        """Whether a try of the next step waits for groups that are due."""
        self._first_left: int | None = None
        """What the first try of the next step found ready, less that step; None before it."""
        self._largest = 0
        self._drawn_until = 0.0
        self._evicted_until = 0.0
        self._added: dict[str, None] = {}
        self._acknowledged: dict[str, None] = {}
        self._clock = clock

    @property
    def next_version(self) -> int:
        """The version the next draw is for: leases in hand are the steps before it."""
        return self.learner_version + len(self.leases)

    @property
    def num_bytes(self) -> int:
        """Of buffered and leased groups."""
        return sum(group.record.size for group in self.groups.values())

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

    # ---- admission

    def admit(self, n: int, engine_version: int | None) -> list[Slot] | Refusal:
        """Grant up to `n` slots, or say which bound holds them back."""
        self.reclaim()
        c = self.config
        version = NO_ENGINE if engine_version is None else engine_version
        if c.staleness_policy == "drop":
            self._drop_overdue()
        outstanding = self.playing() + self.ready_counts()
        num_groups = len(self.slots) + len(self.groups)
        evictable = self._evictable()
        rooms: dict[RefusalReason, float] = {
            "capacity": c.max_groups - num_groups + len(evictable),
            "bytes": self._room_for_bytes(evictable),
            "window": admissible(
                outstanding,
                version,
                self.next_version,
                c.max_staleness,
                c.groups_per_step,
                c.staleness_policy,
            ),
            "lookahead": self._room_ahead(outstanding.total()),
            "limiter": self.limiter.room(
                num_groups, self.counts["inserts"] + len(self.slots), self.counts["samples"]
            ),
        }
        reason = self._refusal_reason(version, rooms)
        n = int(min(n, *rooms.values()))
        if reason is None and evictable:
            n = int(max(1, min(n, c.max_groups - num_groups, self._room_for_bytes())))
            self._make_room(n)
        if reason is not None:
            return self._refusal(reason, engine_version, num_groups, outstanding)
        slots = [Slot(uuid.uuid4().hex, PolicyVersion(version)) for _ in range(n)]
        now = self._clock()
        expires_at_s = now + c.slot_timeout_s
        self.slots |= {slot.slot_id: _Slot(version, now, expires_at_s) for slot in slots}
        self.counts["admitted"] += n
        return slots

    def _refusal_reason(
        self, version: int, rooms: Mapping[RefusalReason, float]
    ) -> RefusalReason | None:
        if self.is_paused:
            return "paused"
        bounds = (self.config.max_staleness, self.config.staleness_policy)
        if is_engine_behind(version, self.learner_version, *bounds):
            return "engine-behind"
        return next((reason for reason, room in rooms.items() if room <= 0), None)

    def _room_ahead(self, num_outstanding: int) -> float:
        """Groups that an adaptive lookahead lets be admitted."""
        if not self.config.is_adaptive:
            return math.inf
        return self.config.reach - self.num_held_back - num_outstanding

    @property
    def num_held_back(self) -> int:
        """Groups of the window that an adaptive lookahead does not admit."""
        c = self.config
        if not c.is_adaptive:
            return 0
        return c.reach - self._lookahead.most_outstanding(c.groups_per_step, c.reach)

    def _evictable(self) -> list[str]:
        """Groups that can make room: those trained before, who owe nothing; under drop all."""
        is_dropping = self.config.staleness_policy == "drop"
        return [i for i in self._free() if is_dropping or self.groups[i].record.draws]

    def _room_for_bytes(self, without: Sequence[str] = ()) -> float:
        """Groups; one being played counts as large as the largest so far."""
        if self.config.max_bytes is None:
            return math.inf
        freed = sum(self.groups[i].record.size for i in without)
        left = int(self.config.max_bytes) - self.num_bytes + freed
        if self._largest:
            return left // self._largest - len(self.slots)
        return math.inf if left > 0 else 0

    def _make_room(self, n: int) -> None:
        """Evict until `n` more groups fit, as far as that is possible."""
        most = self.config.max_groups - n
        while (free := self._evictable()) and (
            len(self.slots) + len(self.groups) > most or self._room_for_bytes() < n
        ):
            score = {i: self.groups[i].evict_score for i in free}
            first = min(free, key=lambda i: (score[i], i))
            if self.config.evict_by != "fifo":
                self._evicted_until = max(self._evicted_until, score[first])
            self._drop_group(first, "evicted")

    def _refusal(
        self,
        reason: RefusalReason,
        engine_version: int | None,
        num_groups: int,
        outstanding: Mapping[int, int],
    ) -> Refusal:
        return Refusal(
            reason=reason,
            version=engine_version,
            learner_version=self.learner_version,
            next_version=self.next_version,
            num_groups=num_groups,
            num_slots=len(self.slots),
            num_bytes=self.num_bytes,
            num_held_back=self.num_held_back,
            largest=self._largest,
            inserts=self.counts["inserts"],
            samples=self.counts["samples"],
            outstanding=dict(outstanding),
            expires_in_s=self.expires_in_s(),
        )

    # ---- groups

    def add(self, slot_id: str, entry: Entry) -> Literal["added", "dropped", "expired"]:
        """Fill a slot. `dropped`: it holds tokens of a version lost in a crash."""
        self.reclaim()
        slot = self.slots.pop(slot_id, None)
        if slot is None:
            return "added" if slot_id in self._added else "expired"
        _remember(self._added, slot_id)
        self.seconds["play"] += self._clock() - slot.since_s
        if entry.newest > slot.ceiling:
            self.dropped.count("lost-version", entry.trajectories)
            return "dropped"
        self.counts.update(added=1, inserts=1, sequence=1)
        is_dropping = self.config.staleness_policy == "drop"
        record = StoredGroup(
            version=entry.oldest if is_dropping else slot.version,
            newest=entry.newest,
            arrival=self.counts["sequence"],
            draws=0,
            returns=0,
            size=len(entry.payload),
            priority=entry.priority,
            trajectories=entry.trajectories,
        )
        self._largest = max(self._largest, record.size)
        self.groups[slot_id] = _Stored(record, entry.payload)
        self._put(slot_id)
        return "added"

    def drop(self, slot_id: str, reason: str) -> None:
        """Give a slot back, counted by reason."""
        self.reclaim()
        slot = self.slots.pop(slot_id, None)
        if slot is not None:
            self.seconds["play"] += self._clock() - slot.since_s
            self.dropped.count(reason)

    def update_priorities(self, priorities: Mapping[str, float]) -> int:
        """How many of the groups are stored."""
        self.reclaim()
        stored = [group_id for group_id in priorities if group_id in self.groups]
        for group_id in stored:
            self._prioritise(group_id, priorities[group_id])
        return len(stored)

    def _prioritise(self, group_id: str, priority: float) -> None:
        stored, c = self.groups[group_id], self.config
        if c.draw_by == "prioritised":
            change = (stored.record.priority, priority, self._drawn_until)
            stored.draw_score = rescaled(stored.draw_score, *change)
        self._change(group_id, priority=priority)
        if c.evict_by == "prioritised":
            record = stored.record
            of_group = (record.version, record.arrival, priority)
            stored.evict_score = evict_score(c.evict_by, *of_group, 0.0, c.seed, 0)

    def _put(self, group_id: str) -> None:
        """Rank a group that is free to be drawn."""
        stored, c = self.groups[group_id], self.config
        record = stored.record
        turn = record.draws + record.returns
        of_group = (record.version, record.arrival, record.priority)
        stored.lease_id = None
        stored.draw_score = draw_score(c.draw_by, *of_group, self._drawn_until, c.seed, turn)
        stored.evict_score = evict_score(c.evict_by, *of_group, self._evicted_until, c.seed, turn)

    def _change(self, group_id: str, **fields: float) -> None:
        stored = self.groups[group_id]
        stored.record = msgspec.structs.replace(stored.record, **fields)

    def _drop_group(self, group_id: str, reason: str) -> None:
        record = self.groups.pop(group_id).record
        if record.draws:  # it was trained, so nothing is lost
            return
        self.dropped.count(reason, record.trajectories)
        is_policy = reason == "evicted" or (
            reason == "overdue" and self.config.staleness_policy == "drop"
        )
        if not is_policy:
            self.counts["inserts"] -= 1
        # What takes its place is younger: under exact the ramp begins anew.
        if reason != "lost-version":
            self.ramp_version = self.next_version

    def _drop_overdue(self) -> None:
        """Groups that no step may train any more."""
        oldest = self.next_version - self.config.max_staleness
        for group_id in [i for i in self._free() if self.groups[i].record.version < oldest]:
            self._drop_group(group_id, "overdue")

    # ---- draws

    def draw(self) -> tuple[str, Drawn] | Shortage:
        """Lease one step's groups, or say what is missing."""
        self.reclaim()
        c = self.config
        self._drop_overdue()
        if c.staleness_policy == "exact":
            self._drop_mixed()
        version, step = self.next_version, c.groups_per_step
        num_again = sum(self.groups[i].record.draws > 0 for i in self._free())
        bounds = (version, c.max_staleness, step, c.staleness_policy, num_again)
        self._first_left = self._look(len(self._free()) - step)
        plan = drawable(self.ready_counts(), self.playing(), *bounds)
        inserts, samples = self.counts["inserts"], self.counts["samples"]
        if not plan.is_ready or not self.limiter.may_sample(
            step, len(self.groups), inserts, samples
        ):
            self._was_blocked |= bool(plan.blocking)
            return self._shortage(version, plan.missing, plan.blocking, plan.is_ready)
        ids = self._chosen(plan.num_forced)
        lease_id, now = uuid.uuid4().hex, self._clock()
        self.leases[lease_id] = _Lease(version, now, now + c.lease_timeout_s, ids)
        for group_id in ids:
            self.groups[group_id].lease_id = lease_id
        self.counts.update(drawn=step, samples=step)
        # Once for each step that ended: a draw that is handed back tells nothing new.
        if c.is_adaptive and self._first_left >= 0 and self._outstanding >= 0:
            found = (self._first_left, self._outstanding, self._was_blocked)
            self._lookahead = self._lookahead.after_draw(*found, step, c.reach)
        self._first_left, self._was_blocked, self._outstanding = None, False, -1
        payloads: list[bytes | memoryview] = [self.groups[group_id].payload for group_id in ids]
        return lease_id, Drawn(version, self.ramp_version, ids, payloads)

    def _look(self, left: int) -> int:
        """What the first try of this step left; `left` now. What is lacked may be admitted at once,
        and a little more for each while that a step's draw goes on waiting."""
        c, first_left, now_s = self.config, self._first_left, self._clock()
        is_late = self._outstanding >= 0 and now_s >= self._added_at_s + MORE_EVERY_S
        if c.is_adaptive and left < 0 and (first_left is None or is_late):
            num_missing = -left if first_left is None else 0
            self._lookahead = self._lookahead.short_of(num_missing, c.groups_per_step, c.reach)
            self._added_at_s = now_s
        return left if first_left is None else first_left

    def _drop_mixed(self) -> None:
        """Groups of several versions, buffered under another policy, as far as they come now."""
        step = self.config.groups_per_step
        while True:
            first = sorted(self._free(), key=lambda i: self.groups[i].place)[:step]
            records = {i: self.groups[i].record for i in first}
            mixed = [i for i, record in records.items() if record.newest != record.version]
            for group_id in mixed:
                self._drop_group(group_id, "mixed-versions")
            if not mixed:
                return

    def _chosen(self, num_forced: int) -> list[str]:
        """Those that can wait no longer, then whatever the selector puts first."""
        free = self._free()
        untrained = [i for i in free if self.groups[i].record.draws == 0]
        forced = sorted(untrained, key=lambda i: self.groups[i].place)[:num_forced]
        ranked = sorted(free, key=lambda i: (self.groups[i].draw_score, i))
        rest = [i for i in ranked if i not in forced]
        picked = rest[: self.config.groups_per_step - len(forced)]
        if self.config.draw_by in ("uniform", "prioritised"):
            scores = (self.groups[i].draw_score for i in picked)
            self._drawn_until = max([self._drawn_until, *scores])
        return forced + picked

    def _shortage(
        self, version: int, missing: int, blocking: dict[int, int], is_ready: bool
    ) -> Shortage:
        until = max(blocking) if blocking else None
        awaited = [i for i, slot in self.slots.items() if until is None or slot.version <= until]
        return Shortage(
            version=version,
            missing=missing,
            blocking_until=until,
            playing=dict(self.playing()),
            awaited=awaited[:4],
            is_limited=is_ready,
            num_stored=len(self.groups),
            largest=self._largest,
            inserts=self.counts["inserts"],
            samples=self.counts["samples"],
            expires_in_s=self.expires_in_s(),
        )

    def acknowledge(self, lease_id: str, version: int) -> Literal["ok", "expired"]:
        """Move the learner's version; keep what may be trained once more, forget the rest."""
        self.reclaim()
        if lease_id in self._acknowledged:
            return "ok"
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return "expired"
        _remember(self._acknowledged, lease_id)
        self._outstanding = self.ready_counts().total() + len(self.slots)
        self.learner_version = max(self.learner_version, version)
        self.counts["trained"] += len(lease.ids)
        self.seconds["train"] += self._clock() - lease.since_s
        for group_id in lease.ids:
            record = self.groups[group_id].record
            is_young = record.version + self.config.max_staleness >= self.next_version
            if record.draws + 1 < self.config.max_draws and is_young:
                self._change(group_id, draws=record.draws + 1)
                self._put(group_id)
            else:
                del self.groups[group_id]
        return "ok"

    def return_lease(self, lease_id: str, counts: bool = True) -> None:
        """Put the lease's groups back; those that came back too often are dropped. `counts`:
        whether this counts."""
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return
        self.counts["samples"] -= len(lease.ids)
        self.seconds["train"] += self._clock() - lease.since_s
        for group_id in lease.ids:
            self._change(group_id, returns=self.groups[group_id].record.returns + counts)
            record = self.groups[group_id].record
            if record.draws and record.draws >= self.config.max_draws:
                del self.groups[group_id]
            elif self.groups[group_id].record.returns > self.config.max_returns:
                self._drop_group(group_id, "returned")
            else:
                self._put(group_id)

    def drop_unreadable(self, lease_id: str, ids: Iterable[str]) -> None:
        """Put the lease's groups back uncounted, and drop those of `ids`, which no draw could
        decode."""
        self.return_lease(lease_id, counts=False)
        for group_id in [i for i in ids if i in self.groups]:
            self._drop_group(group_id, "unreadable")

    def restore_version(self, version: int) -> int:
        """Return every lease and drop what versions after `version` sampled; begin the ramp."""
        self.reclaim()
        for lease_id in list(self.leases):
            self.return_lease(lease_id)
        self.learner_version = self.ramp_version = version
        self._first_left, self._was_blocked, self._outstanding = None, False, -1
        lost_groups = [i for i, g in self.groups.items() if g.record.newest > version]
        for group_id in lost_groups:
            self._drop_group(group_id, "lost-version")
        lost_slots = [i for i, slot in self.slots.items() if slot.version > version]
        for slot_id in lost_slots:
            del self.slots[slot_id]
            self.dropped.count("lost-version")
        for slot in self.slots.values():
            slot.ceiling = min(slot.ceiling, version)
        return len(lost_groups) + len(lost_slots)

    def state(self) -> BufferState:
        """Everything that is held."""
        assert not self.leases, "groups under a lease are neither trained nor there to be drawn"
        return BufferState(
            learner_version=self.learner_version,
            ramp_version=self.ramp_version,
            counts=dict(self.counts),
            groups=dict(self.groups),
            drawn_until=self._drawn_until,
            evicted_until=self._evicted_until,
            largest=self._largest,
            lookahead=self._lookahead,
        )

    def go_on(self, state: BufferState) -> None:
        """Hold what another buffer held; this one must be new."""
        assert not self.counts, "the buffer is in use"
        self.learner_version, self.ramp_version = state.learner_version, state.ramp_version
        self.counts.update(state.counts)
        self.groups = dict(state.groups)
        self._drawn_until, self._evicted_until = state.drawn_until, state.evicted_until
        self._largest = state.largest
        self._lookahead = state.lookahead

    # ---- views

    def playing(self) -> Counter[int]:
        """Slots by version."""
        return Counter(slot.version for slot in self.slots.values())

    def ready_counts(self) -> Counter[int]:
        """Buffered groups that were never trained, by version."""
        return _untrained(self.groups[i] for i in self._free())

    def order(self) -> list[str]:
        """Ids of buffered and leased groups, earliest arrival first."""
        return sorted(self.groups, key=lambda i: self.groups[i].record.arrival)

    def stats(self) -> ReplayStats:
        """A snapshot."""
        self.reclaim()
        now = self._clock()
        return ReplayStats(
            learner_version=PolicyVersion(self.learner_version),
            num_slots=len(self.slots),
            num_ready=len(self._free()),
            num_leased=sum(len(lease.ids) for lease in self.leases.values()),
            num_held_back=self.num_held_back,
            num_bytes=self.num_bytes,
            admission_paused=self.is_paused,
            num_admitted=self.counts["admitted"],
            num_added=self.counts["added"],
            num_drawn=self.counts["drawn"],
            num_trained=self.counts["trained"],
            num_slots_expired=self.counts["slots_expired"],
            num_leases_expired=self.counts["leases_expired"],
            dropped=dict(self.dropped.groups),
            dropped_turns=self.dropped.by_turns(),
            dropped_tokens=self.dropped.by_tokens(),
            outstanding=dict(sorted((self.playing() + _untrained(self.groups.values())).items())),
            wait_room_s=self.seconds["room"],
            play_s=self.seconds["play"],
            wait_data_s=self.seconds["data"],
            train_s=self.seconds["train"],
            waits=tuple(
                Waiting(wait.side, wait.reason, now - since) for wait, since in self.waits.values()
            ),
            slots=tuple(
                Held(i, s.version, now - s.since_s, s.expires_at_s - now)
                for i, s in sorted(self.slots.items(), key=lambda item: item[1].expires_at_s)[:64]
            ),
            leases=tuple(
                Held(i, x.version, now - x.since_s, x.expires_at_s - now, len(x.ids))
                for i, x in self.leases.items()
            ),
        )

    def note_wait(self, waiter: str, wait: Waiting) -> None:
        """A caller waits, for the reason it was told last."""
        _, since = self.waits.get(waiter, (wait, self._clock()))
        self.waits[waiter] = (wait, since)

    def _free(self) -> list[str]:
        """Groups under no lease."""
        return [i for i, group in self.groups.items() if group.lease_id is None]


def _untrained(groups: Iterable[_Stored]) -> Counter[int]:
    return Counter(group.record.version for group in groups if group.record.draws == 0)


def _remember(recent: dict[str, None], name: str) -> None:
    """Keep the last REMEMBERED names."""
    recent[name] = None
    if len(recent) > REMEMBERED:
        del recent[next(iter(recent))]
