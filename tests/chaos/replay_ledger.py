"""What must be true of a buffer, from what its callers know.

`Model` goes along with the random calls of tests/integration/test_replay_machine.py, `Ledgers` is
read after the kills of test_replay_kills.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf
from pathlib import Path
from typing import Any, Self

from hypothesis import reject
from hypothesis import strategies as st
from pydantic import ValidationError

from leeway.replay import scripts
from leeway.replay.config import ReplayConfig
from leeway.replay.store import Lease, ReplayStats, Slot
from leeway.replay.stored import StoredGroup

CLOCK = "leeway:test:clock"
"""The key from which the scripts read the server's time here, in ms."""
SPLIT = "return {math.floor(ms / 1000), ms % 1000 * 1000}"
SLOT_S, LEASE_S = 2.0, 3.0
SELECTORS = ("fifo", "lifo", "uniform", "freshest", "prioritised")


@st.composite
def configs(draw: st.DrawFn) -> ReplayConfig:
    """Valid settings under which a step's groups can always exist."""
    policy = draw(st.sampled_from(["pace", "drop", "exact"]))
    is_exact, is_drop = policy == "exact", policy == "drop"
    step, staleness = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    window = (staleness + 1) * step
    max_draws = 1 if is_exact else draw(st.integers(1, 3))
    limiter = draw(st.sampled_from(["none", "min-size", "queue", "sample-to-insert"]))
    may_adapt = policy == "pace" and limiter == "none" and max_draws == 1
    least = window if is_exact else step
    ratio = 1.0
    if limiter == "sample-to-insert" and not is_exact:
        ratio = draw(st.sampled_from([0.5, 1.0, 1.5] if is_drop else [1.0, 1.5]))
        max_draws = max(max_draws, ceil(ratio))
    buffer = max(1.0, ratio * step, (step + ratio) / 2, window if is_exact else 0)
    has_byte_limit = limiter in ("none", "queue") and not is_exact and max_draws == 1
    # Under drop a step's groups must fit: what is evicted for one more group is never a step.
    max_bytes = [None, 9000, 9000 if is_drop else 3000] if has_byte_limit else [None]
    try:
        return ReplayConfig.model_validate(
            {
                "groups_per_step": step,
                "max_staleness": staleness,
                "staleness_policy": policy,
                "draw_by": "fifo" if is_exact else draw(st.sampled_from(SELECTORS)),
                "lookahead": draw(st.sampled_from(["full", "adaptive"] if may_adapt else ["full"])),
                "evict_by": draw(st.sampled_from(SELECTORS)),
                "seed": draw(st.integers(0, 3)),
                "limiter": limiter,
                "min_size": draw(st.integers(1, step)) if limiter != "none" else 1,
                "samples_per_insert": ratio,
                "error_buffer": buffer + draw(st.integers(0, 3)),
                "queue_size": (window if is_exact else step) + draw(st.integers(0, 3)),
                "max_groups": least + draw(st.integers(0, 5)),
                "max_bytes": draw(st.sampled_from(max_bytes)),
                "max_draws": max_draws,
                "max_returns": draw(st.integers(0, 2)),
                "slot_timeout_s": SLOT_S,
                "lease_timeout_s": LEASE_S,
            }
        )
    except ValidationError:  # both sides could wait for ever
        reject()


@dataclass
class Played:
    """A slot that is held."""

    slot: Slot
    expires_s: float
    ceiling: float = inf


@dataclass
class Stored:
    """A group in the buffer."""

    version: int
    newest: int
    size: int
    draws: int = 0
    returns: int = 0
    tokens: int = 0
    """Of each of its two trajectories, which have two turns."""


@dataclass
class Trained:
    """A lease that is held."""

    lease: Lease
    expires_s: float

    @property
    def ids(self) -> list[str]:
        return [group.group_id for group in self.lease.groups]


@dataclass
class Model:
    """What is true of a buffer, as its callers know it."""

    config: ReplayConfig
    now_s: float = 0.0
    learner: int = 0
    slots: dict[str, Played] = field(default_factory=dict[str, Played])
    groups: dict[str, Stored] = field(default_factory=dict[str, Stored])
    leases: dict[str, Trained] = field(default_factory=dict[str, Trained])
    past_slots: list[Slot] = field(default_factory=list[Slot])
    past_leases: list[Lease] = field(default_factory=list[Lease])
    added: set[str] = field(default_factory=set[str])
    acknowledged: set[str] = field(default_factory=set[str])
    num_trained_of: Counter[str] = field(default_factory=Counter[str])
    dropped: Counter[str] = field(default_factory=Counter[str])
    dropped_lengths: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    """Trajectories by reason and tokens: at most so many, powers of two."""
    num: Counter[str] = field(default_factory=Counter[str])
    is_on_schedule: bool = True
    """No version was restored, and steps ended in the order of their draws."""

    @property
    def next_version(self) -> int:
        return self.learner + len(self.leases)

    def free(self) -> list[str]:
        """Groups under no lease."""
        leased = {group_id for held in self.leases.values() for group_id in held.ids}
        return [group_id for group_id in self.groups if group_id not in leased]

    def let_time_pass(self, seconds: float) -> None:
        self.now_s += seconds
        for slot_id in [i for i, held in self.slots.items() if held.expires_s <= self.now_s]:
            self.end_slot(slot_id)
            self.num["slots_expired"] += 1
        for lease_id in [i for i, held in self.leases.items() if held.expires_s <= self.now_s]:
            self.return_lease(lease_id)
            self.num["leases_expired"] += 1

    def end_slot(self, slot_id: str) -> Played:
        held = self.slots.pop(slot_id)
        self.past_slots.append(held.slot)
        return held

    def end_lease(self, lease_id: str, position: int) -> list[str]:
        """`position` is where among the leases it stands when steps end in their order."""
        self.is_on_schedule &= list(self.leases)[position] == lease_id
        held = self.leases.pop(lease_id)
        self.past_leases.append(held.lease)
        return held.ids

    def return_lease(self, lease_id: str) -> None:
        for group_id in self.end_lease(lease_id, -1):
            self.groups[group_id].returns += 1
            if self.groups[group_id].returns > self.config.max_returns:
                self.forget([group_id], "returned")

    def forget(self, ids: list[str], reason: str) -> None:
        """What was trained before is not counted."""
        for group in [self.groups.pop(group_id) for group_id in ids]:
            if group.draws == 0:
                self.count_dropped(reason, group.tokens)

    def count_dropped(self, reason: str, tokens: int) -> None:
        self.dropped[reason] += 1
        power = next(2**n for n in range(32) if tokens <= 2**n)
        self.dropped_lengths[reason, power] += 2

    def drop_overdue(self) -> None:
        before = self.dropped["overdue"]
        oldest = self.next_version - self.config.max_staleness
        self.forget([i for i in self.free() if self.groups[i].version < oldest], "overdue")
        if self.config.staleness_policy != "drop" and self.is_on_schedule:
            assert self.dropped["overdue"] == before, "nothing is wasted under pace and exact"

    def check_window(self, version: int) -> None:
        """See store.py: the groups due by d fit into the steps until d."""
        c = self.config
        assert len(self.slots) + len(self.groups) <= c.max_groups
        if c.staleness_policy != "drop":
            untrained = [self.groups[i].version for i in self.free() if self.groups[i].draws == 0]
            outstanding = untrained + [held.slot.version for held in self.slots.values()]
            for last in {version, *(a for a in outstanding if a > version)}:
                num_steps = last + c.max_staleness - self.next_version + 1
                num_due = sum(a <= last for a in outstanding)
                assert num_due <= num_steps * c.groups_per_step

    def acknowledge(self, lease_id: str, version: int) -> None:
        ids = self.end_lease(lease_id, 0)
        self.acknowledged.add(lease_id)
        self.learner = max(self.learner, version)
        self.num["trained"] += len(ids)
        for group_id in ids:
            group = self.groups[group_id]
            group.draws += 1
            self.num_trained_of[group_id] += 1
            is_young = group.version + self.config.max_staleness >= self.next_version
            if group.draws == self.config.max_draws or not is_young:
                del self.groups[group_id]

    def restore(self, version: int) -> int:
        for lease_id in reversed(list(self.leases)):
            self.return_lease(lease_id)
        self.learner, self.is_on_schedule = version, False
        lost = [i for i, group in self.groups.items() if group.newest > version]
        self.forget(lost, "lost-version")
        lost_slots = [i for i, held in self.slots.items() if held.slot.version > version]
        for slot_id in lost_slots:
            self.end_slot(slot_id)
            self.dropped["lost-version"] += 1
        for held in self.slots.values():
            held.ceiling = min(held.ceiling, version)
        return len(lost) + len(lost_slots)


@dataclass
class Hold:
    """A lease as its consumer had it, on a clock that all processes share."""

    asked_ns: int
    """The lease was given later, so it expires later than a lease's time from here."""
    got_ns: int
    ids: list[str]
    end_ns: int | None = None
    """When it was about to be handed back; None: its consumer was killed."""

    def surely_ended_ns(self, lease_timeout_s: float) -> int:
        """Until then the lease was live."""
        expires_ns = self.asked_ns + int(1e9 * lease_timeout_s)
        return expires_ns if self.end_ns is None else min(expires_ns, self.end_ns)


@dataclass
class Ledgers:
    """What the killed processes wrote down. A process that was killed between two lines leaves an
    operation of which nobody knows whether it happened: `maybe`."""

    added: set[str] = field(default_factory=set[str])
    maybe_added: set[str] = field(default_factory=set[str])
    newest_of: dict[str, int] = field(default_factory=dict[str, int])
    """Newest version among the tokens of each group that was added."""
    granted_ns: dict[str, int] = field(default_factory=dict[str, int])
    """When the slot of a group was asked for, on a clock that all processes share."""
    restored: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Each time the buffer went back: to which version, and when on the same clock."""
    num_trained_of: Counter[str] = field(default_factory=Counter[str])
    maybe_trained: Counter[str] = field(default_factory=Counter[str])
    lags: list[int] = field(default_factory=list[int])
    """Staleness of every group that was handed out."""
    num_leases: int = 0
    open_draws: set[str] = field(default_factory=set[str])
    """Draws that were begun and never came back, by when they were begun."""
    holds: dict[str, Hold] = field(default_factory=dict[str, "Hold"])
    """Every lease that came to its consumer."""
    errors: list[str] = field(default_factory=list[str])

    @classmethod
    def read(cls, folder: Path) -> Self:
        ledgers = cls()
        for path in folder.iterdir():
            for line in path.read_text().splitlines():
                ledgers.take(*line.split())
        return ledgers

    def take(self, event: str, name: str, *rest: str) -> None:
        if event in ("draw", "undrawn", "holds", "lets-go", "drawn"):
            self._take_of_draw(event, name, *rest)
        elif event == "add":
            self.maybe_added.add(name)
        elif event in ("added", "refused"):
            self.maybe_added.remove(name)
            self.added |= {name} if event == "added" else set()
            self.newest_of |= {name: int(rest[0])} if rest else {}
        elif event == "granted":
            self.granted_ns[name] = int(rest[0])
        elif event == "restored":
            self.restored.append((int(name), int(rest[0])))
        elif event == "acknowledge":
            self.maybe_trained.update(rest)
        elif event in ("acknowledged", "expired"):
            self.maybe_trained -= Counter(rest)
            self.num_trained_of.update(rest if event == "acknowledged" else ())
        elif event == "error":
            self.errors.append(" ".join((name, *rest)))

    def _take_of_draw(self, event: str, name: str, *rest: str) -> None:
        if event == "draw":
            self.open_draws.add(name)
        elif event == "undrawn":
            self.open_draws.remove(name)
        elif event == "holds":
            asked_ns, got_ns, *ids = rest
            self.open_draws.remove(asked_ns)
            self.holds[name] = Hold(int(asked_ns), int(got_ns), ids)
        elif event == "lets-go":
            self.holds[name].end_ns = int(rest[0])
        else:
            self.num_leases += 1
            self.lags += map(int, rest)

    def went_back_behind(self, group_id: str) -> bool:
        """Whether the buffer has gone back behind this group since its slot was granted: it drops
        what holds a token of a version that is lost, stored or yet to come."""
        newest, granted_ns = self.newest_of.get(group_id, 0), self.granted_ns.get(group_id, 0)
        return any(newest > version and granted_ns <= at_ns for version, at_ns in self.restored)

    def check(
        self,
        config: ReplayConfig,
        stats: ReplayStats,
        stored: dict[str, StoredGroup],
        dropped: dict[str, str],
    ) -> None:
        """The buffer after everyone is gone, against the ledgers. Nothing is held any more.
        `dropped` are the groups that the buffer says it has dropped, with the reason of each."""
        assert not self.errors
        self.check_holds(config.lease_timeout_s)
        trained, maybe = self.num_trained_of, self.maybe_trained
        assert max(trained.values()) <= config.max_draws, "acknowledged once for each of its draws"
        assert max(self.lags) <= config.max_staleness
        for group_id, record in stored.items():
            assert trained[group_id] <= record.draws <= trained[group_id] + maybe[group_id]

        # Each by its id: a group that is lost must not hide behind another that was dropped.
        missing = self.added - set(trained) - set(maybe) - set(stored) - set(dropped)
        assert not missing, "added, and neither trained nor stored nor dropped"
        assert not set(dropped) & set(trained), "dropped as untrained, and trained"
        assert not set(dropped) & set(stored), "dropped, and stored"
        by_buffer = {reason: n for reason, n in stats.dropped.items() if reason != "test"}
        assert Counter(dropped.values()) == by_buffer
        num_untrained = sum(record.draws == 0 for record in stored.values())
        num_gone = stats.num_added - num_untrained - len(dropped)
        assert len(trained) <= num_gone <= len(set(trained) | set(maybe))
        if config.max_draws == 1:
            assert stats.num_added == stats.num_trained + len(stored) + len(dropped)

        assert len(self.added) <= stats.num_added <= len(self.added | self.maybe_added)
        assert trained.total() <= stats.num_trained <= trained.total() + maybe.total()
        assert stats.num_drawn >= self.num_leases * config.groups_per_step
        num_slots_ended = stats.num_added + stats.num_slots_expired + stats.dropped.get("test", 0)
        assert stats.num_admitted == num_slots_ended
        assert stats.num_bytes == sum(record.size for record in stored.values())
        assert (stats.num_slots, stats.num_leased, stats.slots, stats.leases) == (0, 0, (), ())

    def check_holds(self, lease_timeout_s: float) -> None:
        """No group was under two live leases."""
        spans: dict[str, list[tuple[int, int]]] = {}
        for hold in self.holds.values():
            for group_id in hold.ids:
                span = hold.got_ns, hold.surely_ended_ns(lease_timeout_s)
                spans.setdefault(group_id, []).append(span)
        for group_id, held in spans.items():
            held.sort()
            for (_, end_ns), (start_ns, _) in pairwise(held):
                assert end_ns <= start_ns, f"{group_id} was under two leases"


def set_clock(admin: Any, seconds: float) -> None:
    """From 2026 on; whole milliseconds."""
    admin.set(CLOCK, int(1.77e12 + seconds * 1000))


@contextmanager
def scripts_on_our_clock() -> Iterator[None]:
    """Stores that are made inside send scripts that read the time from the key CLOCK."""
    plain = scripts.lua_text
    ours = f"(function() local ms = tonumber(call('GET', '{CLOCK}')) {SPLIT} end)()"

    def on_our_clock(name: str) -> str:
        text = plain(name)
        if name == "base":
            before, found, after = text.partition("call('TIME')")
            assert found and "TIME" not in after
            text = f"{before}{ours}{after}"
        return text

    scripts.script_source.cache_clear()
    scripts.lua_text = on_our_clock
    try:
        yield
    finally:
        scripts.lua_text = plain
        scripts.script_source.cache_clear()
