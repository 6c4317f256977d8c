"""The buffer in memory under random sequences of calls keeps its invariants."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from leeway.replay.bounds import check_staleness
from leeway.replay.config import ReplayConfig, StalenessPolicy
from leeway.replay.errors import WaitTimeout
from leeway.replay.memory_buffer import Buffer
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.store import Lease, Slot
from leeway.replay.stored import entry_of, lease_of
from leeway.replay.synthetic import build_group
from leeway.replay.waiting import Shortage

STEP, STALENESS, MAX_GROUPS = 2, 2, 9


def add(buffer: Buffer, slot: Slot, version: int | None = None) -> None:
    group = build_group(slot, version=version, num_trajectories=1, num_tokens=8)
    buffer.add(slot.slot_id, entry_of(group))


def draw(buffer: Buffer) -> Lease | Shortage:
    drawn = buffer.draw()
    return drawn if isinstance(drawn, Shortage) else lease_of(*drawn)


class BufferMachine(RuleBasedStateMachine):
    """Workers at versions up to the learner's, a learner that may draw ahead, and a clock."""

    policy: StalenessPolicy = "pace"

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        config = ReplayConfig(
            groups_per_step=STEP,
            max_staleness=STALENESS,
            staleness_policy=self.policy,
            max_groups=MAX_GROUPS,
            slot_timeout_s=10,
            lease_timeout_s=20,
        )
        self.buffer = Buffer(config, lambda: self.now_s)
        self.slots: list[Slot] = []
        self.leases: list[Lease] = []
        self.trained: Counter[str] = Counter()

    @rule(n=st.integers(1, 5), lag=st.integers(0, 3))
    def admit(self, n: int, lag: int) -> None:
        granted = self.buffer.admit(n, max(0, self.buffer.learner_version - lag))
        if isinstance(granted, list):
            assert 1 <= len(granted) <= n
            self.slots += granted

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots))
        add(self.buffer, slot)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.buffer.drop(data.draw(st.sampled_from(self.slots)).slot_id, "test")

    @rule()
    def draw(self) -> None:
        drawn = draw(self.buffer)
        if isinstance(drawn, Lease):
            assert len(drawn.groups) == STEP
            check_staleness(drawn, self.buffer.config)
            self.leases.append(drawn)

    @precondition(lambda self: self.leases)
    @rule(is_trained=st.booleans())
    def finish(self, is_trained: bool) -> None:
        lease = self.leases.pop(0)
        if not is_trained:
            return self.buffer.return_lease(lease.lease_id)
        if self.buffer.acknowledge(lease.lease_id, self.buffer.learner_version + 1) == "ok":
            self.trained.update(group.group_id for group in lease.groups)

    @rule(seconds=st.sampled_from([1.0, 6.0, 21.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(back=st.integers(-3, 2))
    def restore(self, back: int) -> None:
        self.buffer.restore_version(max(0, self.buffer.learner_version - back))
        self.leases.clear()

    @rule()
    def end_all_and_draw(self) -> None:
        """Whatever happened: once all that is held has ended, a full window can be drawn."""
        self.wait(21.0)
        for _ in range(STALENESS + 2):
            self.admit(MAX_GROUPS, 0)
            for slot in self.slots:
                add(self.buffer, slot)
            self.slots.clear()
            num_leases = len(self.leases)
            self.draw()
            if len(self.leases) > num_leases:
                return
        raise AssertionError("the draw waits for ever")

    @invariant()
    def every_admitted_group_is_somewhere(self) -> None:
        stats = self.buffer.stats()
        held = stats.num_slots + stats.num_ready + stats.num_leased
        gone = stats.num_trained + stats.num_slots_expired + sum(stats.dropped.values())
        assert stats.num_admitted == held + gone
        assert sum(stats.outstanding.values()) == held <= MAX_GROUPS

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        assert all(n == 1 for n in self.trained.values())

    @invariant()
    def bytes_are_those_of_the_groups_held(self) -> None:
        stats = self.buffer.stats()
        assert (stats.num_bytes == 0) == (stats.num_ready + stats.num_leased == 0)


BufferMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
test_buffer_invariants = BufferMachine.TestCase


class ExactBufferMachine(BufferMachine):
    """The same under exact staleness."""

    policy = "exact"

    @invariant()
    def nothing_is_played_while_the_learner_trains(self) -> None:
        assert not (self.buffer.slots and self.buffer.leases)


ExactBufferMachine.TestCase.settings = BufferMachine.TestCase.settings
test_exact_buffer_invariants = ExactBufferMachine.TestCase


def test_paced_play_never_drops_and_never_trains_too_old():
    """Engines lag by up to the bound, slots end in random order: the schedule alone keeps it."""
    rng = random.Random(7)
    buffer = Buffer(ReplayConfig(groups_per_step=STEP, max_staleness=STALENESS), lambda: 0.0)
    playing: list[Slot] = []
    while buffer.learner_version < 200:
        granted = buffer.admit(3, max(0, buffer.learner_version - rng.randint(0, STALENESS)))
        playing += granted if isinstance(granted, list) else []
        rng.shuffle(playing)
        for _ in range(rng.randint(0, len(playing))):
            add(buffer, playing.pop())
        drawn = draw(buffer)
        if isinstance(drawn, Lease):
            assert all(drawn.version - g.oldest_version <= STALENESS for g in drawn.groups)
            buffer.acknowledge(drawn.lease_id, drawn.version + 1)
    assert not buffer.dropped.groups


def test_exact_play_with_failures_trains_every_group_exactly_two_versions_old():
    """Engines lag by up to two, one group in five fails: dropped slots are refilled in time."""
    rng = random.Random(7)
    config = ReplayConfig(groups_per_step=STEP, max_staleness=2, staleness_policy="exact")
    buffer = Buffer(config, lambda: 0.0)
    lags: list[set[int]] = []
    while buffer.learner_version < 100:
        granted = buffer.admit(3, max(0, buffer.learner_version - rng.randint(0, 2)))
        for slot in granted if isinstance(granted, list) else []:
            if rng.random() < 0.2:
                buffer.drop(slot.slot_id, "failed")
            else:
                add(buffer, slot)
        drawn = draw(buffer)
        if isinstance(drawn, Lease):
            lags.append({drawn.version - group.oldest_version for group in drawn.groups})
            buffer.acknowledge(drawn.lease_id, drawn.version + 1)
    assert lags == [{0}, {1}, *[{2}] * 98]


def exact_run(buffer: Buffer, num_steps: int) -> list[list[int]]:
    """Admit and add at the learner's version, draw, train; the lags of each draw, all asserted."""
    lags: list[list[int]] = []
    for _ in range(5 * num_steps):
        granted = buffer.admit(99, buffer.learner_version)
        for slot in granted if isinstance(granted, list) else []:
            add(buffer, slot)
        drawn = draw(buffer)
        if isinstance(drawn, Lease):
            check_staleness(drawn, buffer.config)
            lags.append([drawn.version - group.oldest_version for group in drawn.groups])
            buffer.acknowledge(drawn.lease_id, drawn.version + 1)
        if len(lags) == num_steps:
            break
    return lags


def test_exact_with_limits_lowered_drops_what_no_step_can_take_and_finds_its_pace_again():
    wide = ReplayConfig(groups_per_step=4, max_staleness=2, staleness_policy="exact")
    buffer = Buffer(wide, lambda: 0.0)
    assert exact_run(buffer, 2) == [[0] * 4, [1] * 4]
    # Learner at 2: 4 groups from 0, 4 from 1. With 2 a step two of each miss their deadline, and
    # at 3 and at 4 two more are admitted in their place; the last of those is 1 old at 5.
    buffer.config = ReplayConfig(groups_per_step=2, max_staleness=2, staleness_policy="exact")
    buffer.restore_version(2)
    assert exact_run(buffer, 7) == [[2, 2], [2, 2], [1, 1], [1, 1], [2, 2], [2, 2], [2, 2]]
    assert buffer.dropped.groups == {"overdue": 4}


def test_exact_drops_a_mixed_group_that_was_buffered_under_pace():
    buffer = Buffer(ReplayConfig(groups_per_step=2, max_staleness=1), lambda: 0.0)
    granted = buffer.admit(2, 0)
    assert isinstance(granted, list)
    for version, slot in enumerate(granted):
        add(buffer, slot, version)
    buffer.config = ReplayConfig(groups_per_step=2, max_staleness=1, staleness_policy="exact")
    buffer.restore_version(1)
    assert exact_run(buffer, 3) == [[1, 0], [1, 1], [1, 1]]
    assert buffer.dropped.groups == {"mixed-versions": 1}


async def test_two_callers_that_wait_for_a_step_do_not_wake_each_other(monkeypatch):
    num_tries = 0
    draw_once = Buffer.draw

    def counted(buffer: Buffer) -> object:
        nonlocal num_tries
        num_tries += 1
        return draw_once(buffer)

    monkeypatch.setattr(Buffer, "draw", counted)
    replay = MemoryReplay(ReplayConfig(groups_per_step=2))
    waits = await asyncio.gather(replay.draw(0.2), replay.draw(0.2), return_exceptions=True)
    assert all(isinstance(wait, WaitTimeout) for wait in waits)
    assert num_tries <= 8
