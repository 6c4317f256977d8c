"""The buffer in memory under random sequences of calls keeps its invariants."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from leeway.replay.config import ReplayConfig
from leeway.replay.memory_buffer import Buffer
from leeway.replay.store import Lease, Slot
from leeway.replay.synthetic import build_group

STEP, STALENESS, MAX_GROUPS, MAX_DRAWS = 2, 2, 9, 3


class BufferMachine(RuleBasedStateMachine):
    """Workers at versions up to the learner's, a learner that may draw ahead, and a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        config = ReplayConfig(
            groups_per_step=STEP,
            max_staleness=STALENESS,
            max_groups=MAX_GROUPS,
            max_draws=MAX_DRAWS,
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
        self.buffer.add(build_group(slot, num_trajectories=1, num_tokens=8))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.buffer.drop(data.draw(st.sampled_from(self.slots)).slot_id, "test")

    @rule()
    def draw(self) -> None:
        drawn = self.buffer.draw()
        if isinstance(drawn, Lease):
            assert len(drawn.groups) == STEP
            for group in drawn.groups:
                assert drawn.version - group.oldest_version <= STALENESS
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

    @rule(back=st.integers(0, 2))
    def restore(self, back: int) -> None:
        self.buffer.restore_version(max(0, self.buffer.learner_version - back))
        self.leases.clear()

    @invariant()
    def every_admitted_group_is_somewhere(self) -> None:
        stats = self.buffer.stats(0, 0)
        held = stats.num_slots + stats.num_ready + stats.num_leased
        gone = stats.num_trained + stats.num_slots_expired + sum(stats.dropped.values())
        assert stats.num_admitted == held + gone
        assert sum(stats.outstanding.values()) == held <= MAX_GROUPS

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        assert all(n == 1 for n in self.trained.values())

    @invariant()
    def bytes_are_those_of_the_groups_held(self) -> None:
        stats = self.buffer.stats(0, 0)
        assert (stats.num_bytes == 0) == (stats.num_ready + stats.num_leased == 0)


BufferMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
test_buffer_invariants = BufferMachine.TestCase


def test_paced_play_never_drops_and_never_trains_too_old():
    """Engines lag by up to the bound, slots end in random order: the schedule alone keeps it."""
    import random

    rng = random.Random(7)
    buffer = Buffer(ReplayConfig(groups_per_step=STEP, max_staleness=STALENESS), lambda: 0.0)
    playing: list[Slot] = []
    while buffer.learner_version < 200:
        granted = buffer.admit(3, max(0, buffer.learner_version - rng.randint(0, STALENESS)))
        playing += granted if isinstance(granted, list) else []
        rng.shuffle(playing)
        for _ in range(rng.randint(0, len(playing))):
            buffer.add(build_group(playing.pop(), num_trajectories=1, num_tokens=8))
        drawn = buffer.draw()
        if isinstance(drawn, Lease):
            assert all(drawn.version - g.oldest_version <= STALENESS for g in drawn.groups)
            buffer.acknowledge(drawn.lease_id, drawn.version + 1)
    assert not buffer.dropped
