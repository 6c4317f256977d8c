"""Recorded groups played again on a clock of their own: which group is trained when, and how old.

The buffer is the real one, in memory, with its real staleness policy; only time is made up. A group
takes as long as its longest trajectory took, and a fixed number is played at once. The learner
takes `step_s` for a step. So the same groups can be put through `pace`, `drop` and `exact`, and
what differs is the policy alone.

    step_s = groups_per_step x mean duration of a group / groups played at once

which is what makes rollouts and learner equally fast. Versions of the recording are not read: who
sampled a token is in its log-prob, and the version it gets here is the learner's when its group
began to be played again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from leeway.replay.config import ReplayConfig, StalenessPolicy
from leeway.replay.memory_buffer import Buffer
from leeway.replay.schema import Group, GroupId, PolicyVersion, Trajectory
from leeway.replay.store import Lease, Slot
from leeway.replay.stored import entry_of, lease_of
from leeway.replay.waiting import Refusal, Shortage

FOREVER_S = 1e12
"""Slots and leases do not expire here: the clock only moves when something happens."""


@dataclass
class Trained:
    """One step of a schedule."""

    lease: Lease
    """Its groups carry the versions of this schedule."""
    numbers: list[int]
    """Places of its groups in the recording."""


@dataclass
class Schedule:
    """The same recording under one staleness policy."""

    policy: StalenessPolicy
    steps: list[Trained] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """Places of groups that were played, and that the buffer dropped untrained."""
    num_left: int = 0
    """Groups left at the end, fewer than a step or not played: neither trained nor dropped."""
    clock_s: float = 0.0
    """When the last step ended, on the made-up clock."""

    @property
    def trained(self) -> list[int]:
        """Places of the trained groups."""
        return [number for step in self.steps for number in step.numbers]


def duration_s(group: Group) -> float:
    """Of its longest trajectory."""
    return max(trajectory.duration_s for trajectory in group.trajectories)


def balanced_step_s(groups: Sequence[Group], groups_per_step: int, num_at_once: int) -> float:
    """4 groups a step, 8 at once, 2 s each -> 1 s."""
    mean = sum(map(duration_s, groups)) / len(groups)
    return max(1e-6, groups_per_step * mean / num_at_once)


class _Simulation:
    """One run of the clock. Events: a group ends, a step ends."""

    def __init__(
        self,
        groups: Sequence[Group],
        config: ReplayConfig,
        num_at_once: int,
        step_s: float,
        max_steps: int,
    ) -> None:
        endless = {"slot_timeout_s": FOREVER_S, "lease_timeout_s": FOREVER_S, "url": None}
        held = max(config.max_groups, config.window)
        config = config.model_copy(update=endless | {"max_groups": held})
        self.now_s = 0.0
        self._buffer = Buffer(config, lambda: self.now_s)
        self._groups = groups
        self._num_at_once = num_at_once
        self._step_s = step_s
        self._max_steps = max_steps
        self._next = 0
        self._playing: list[tuple[float, int, Slot]] = []
        """Heap by the time they end."""
        self._learning: tuple[float, Lease] | None = None
        self._number_of: dict[str, int] = {}
        self.schedule = Schedule(config.staleness_policy)

    def run(self) -> Schedule:
        """Until no event is left."""
        while True:
            self._begin()
            if not self._advance():
                break
        self._count_dropped()
        self.schedule.clock_s = self.now_s
        return self.schedule

    def _begin(self) -> None:
        """Whatever can begin now: a step first, which makes room, then groups."""
        if self._learning is None and len(self.schedule.steps) < self._max_steps:
            drawn = self._buffer.draw()
            if not isinstance(drawn, Shortage):
                lease = lease_of(*drawn)
                numbers = [self._number_of[group.group_id] for group in lease.groups]
                self.schedule.steps.append(Trained(lease, numbers))
                self._learning = (self.now_s + self._step_s, lease)
        room = self._num_at_once - len(self._playing)
        left = len(self._groups) - self._next
        if min(room, left) > 0 and len(self.schedule.steps) < self._max_steps:
            self._admit(min(room, left))

    def _admit(self, wanted: int) -> None:
        slots = self._buffer.admit(wanted, self._buffer.learner_version)
        for slot in [] if isinstance(slots, Refusal) else slots:
            number, self._next = self._next, self._next + 1
            self._number_of[slot.slot_id] = number
            ends_s = self.now_s + duration_s(self._groups[number])
            heapq.heappush(self._playing, (ends_s, number, slot))

    def _advance(self) -> bool:
        """To the next event; False without one."""
        learned_s = self._learning[0] if self._learning else float("inf")
        played_s = self._playing[0][0] if self._playing else float("inf")
        if min(learned_s, played_s) == float("inf"):
            return False
        self.now_s = min(learned_s, played_s)
        if played_s <= learned_s:
            _, number, slot = heapq.heappop(self._playing)
            self._buffer.add(slot.slot_id, entry_of(dated(self._groups[number], slot)))
        elif self._learning:
            lease = self._learning[1]
            self._buffer.acknowledge(lease.lease_id, PolicyVersion(lease.version + 1))
            self._learning = None
        return True

    def _count_dropped(self) -> None:
        trained = set(self.schedule.trained)
        held = {
            self._number_of[group_id] for group_id in (*self._buffer.groups, *self._buffer.slots)
        }
        gone = set(self._number_of.values()) - trained - held
        self.schedule.dropped = sorted(gone)
        self.schedule.num_left = len(self._groups) - len(trained) - len(gone)


def schedule(
    groups: Sequence[Group],
    config: ReplayConfig,
    policy: StalenessPolicy,
    *,
    num_at_once: int,
    step_s: float,
    max_steps: int,
) -> Schedule:
    """Play the recording under `policy`, in its order, each group once."""
    changed = {
        "staleness_policy": policy,
        "lookahead": config.lookahead if policy == "pace" else None,
        "max_groups": max(config.max_groups, config.window),
    }
    config = ReplayConfig.model_validate(config.model_dump() | changed)
    return _Simulation(groups, config, num_at_once, step_s, max_steps).run()


def dated(group: Group, slot: Slot) -> Group:
    """The group as if it had been sampled by the version of its slot."""

    def of(trajectory: Trajectory) -> Trajectory:
        versions_T = np.full(trajectory.num_trained_tokens, slot.version, np.int32)
        return msgspec.structs.replace(trajectory, versions=versions_T)

    return msgspec.structs.replace(
        group,
        group_id=GroupId(slot.slot_id),
        trajectories=tuple(of(trajectory) for trajectory in group.trajectories),
    )


# ---- what a policy kept


class Bias(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy did with the trajectories of one kind."""

    by: str
    """turns or tokens."""
    value: int
    """Number of turns; or at most so many tokens, a power of two."""
    num: int
    """Trajectories that were played and are over: trained or dropped."""
    kept: float
    """Share of them that was trained."""
    reward: float
    """Mean over them, trained or not."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on the recording."""

    policy: str
    num_steps: int
    num_trained: int
    """Groups."""
    num_dropped: int
    num_left: int
    """Groups left over when no further step could be filled, or after the last step."""
    staleness_mean: float | None
    """Of what was trained, in versions of the schedule."""
    staleness_max: int | None
    reward_trained: float | None
    """Mean over trained trajectories."""
    reward_dropped: float | None
    turns_trained: float | None
    """Mean turns of a trained trajectory."""
    tokens_trained: float | None
    """Mean tokens of a trained trajectory, prompt and observations included."""
    bias: list[Bias]


def outcome(groups: Sequence[Group], found: Schedule) -> Outcome:
    """What the schedule trained, and of which kind it was."""
    trained = set(found.trained)
    over = sorted(trained | set(found.dropped))
    ages = [
        int(step.lease.version - group.oldest_version)
        for step in found.steps
        for group in step.lease.groups
        for _ in group.trajectories
    ]
    kept = [t for n in sorted(trained) for t in groups[n].trajectories]
    lost = [t for n in found.dropped for t in groups[n].trajectories]
    pairs = [(t, n in trained) for n in over for t in groups[n].trajectories]
    return Outcome(
        policy=found.policy,
        num_steps=len(found.steps),
        num_trained=len(found.trained),
        num_dropped=len(found.dropped),
        num_left=found.num_left,
        staleness_mean=_mean(ages),
        staleness_max=max(ages, default=None),
        reward_trained=_mean([t.reward for t in kept]),
        reward_dropped=_mean([t.reward for t in lost]),
        turns_trained=_mean([len(t.turns) for t in kept]),
        tokens_trained=_mean([len(t.token_ids) for t in kept]),
        bias=[*_biases("turns", pairs), *_biases("tokens", pairs)],
    )


def _biases(by: str, pairs: Sequence[tuple[Trajectory, bool]]) -> Iterator[Bias]:
    nums: Counter[int] = Counter()
    kept: Counter[int] = Counter()
    rewards: Counter[int] = Counter()
    for trajectory, is_trained in pairs:
        value = len(trajectory.turns) if by == "turns" else _power(len(trajectory.token_ids))
        nums[value] += 1
        kept[value] += is_trained
        rewards[value] += trajectory.reward  # pyright: ignore[reportArgumentType]
    for value in sorted(nums):
        num = nums[value]
        yield Bias(by=by, value=value, num=num, kept=kept[value] / num, reward=rewards[value] / num)


def _power(tokens: int) -> int:
    """100 -> 128, 128 -> 128"""
    return 1 << max(0, tokens - 1).bit_length()


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
