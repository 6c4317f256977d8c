"""What a bound on staleness costs and how stale data gets, by an adaptive and by a full lookahead.

The buffer is the real one, in memory; rollouts, engines and learner are a few lines around it, on a
clock that jumps from event to event, so a thousand steps take seconds. A group is played in a
time drawn from a lognormal distribution, `in_flight` at once, on engines that hold the learner's
newest version. A step takes the same time always. What it takes to publish is left out, and engines
do not become slower with more in flight: this shows what admission does, and nothing else.

With figures of a run of yours (seconds of a step, of a group, groups in flight) it says which
`max_staleness` that run needs, before a GPU is asked for.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean
from typing import Final, Literal

from leeway.replay.config import ReplayConfig
from leeway.replay.errors import ConfigurationError
from leeway.replay.memory_buffer import Buffer
from leeway.replay.stored import Entry
from leeway.replay.waiting import Refusal, Shortage
from leeway.services.bench.result import BenchResult

NEVER_S: Final = 1e12
"""Deadline of slots and leases: nothing dies here."""
SLICE_S: Final = 5.0
"""A draw that waits is tried again so often."""
MAX_SPREAD: Final = 5.0
"""Beyond it the mean is made by groups that no run ever sees."""
LEFT_OUT: Final = 3
"""The first steps, one in so many, are not counted: the window fills, and a lookahead adapts."""


@dataclass(frozen=True)
class Load:
    """A run, as far as admission is concerned."""

    name: str
    groups_per_step: int = 16
    in_flight: int = 64
    """Groups that rollout workers play at once."""
    step_s: float = 10.0
    """Of the learner, from a draw to its acknowledgement."""
    play_s: float = 10.0
    """Mean seconds to play a group."""
    spread: float = 0.6
    """Standard deviation of the logarithm of these seconds; 0: all alike. 0.6: one of twenty takes
    2.2 times the mean; 1.0: 3.1 times."""
    rest_every_s: float = 0.0
    """Engines rest so often, for an evaluation say; 0: never."""
    rest_s: float = 0.0
    """How long."""

    def __post_init__(self) -> None:
        """Raises ConfigurationError for numbers that no run has."""
        sizes, times = (self.groups_per_step, self.in_flight), (self.step_s, self.play_s)
        if min(sizes) < 1 or not all(0 < seconds < math.inf for seconds in times):
            raise ConfigurationError(
                "groups per step, groups in flight, seconds of a step and of a group must be "
                f"positive, not {self.groups_per_step}, {self.in_flight}, {self.step_s:g} and "
                f"{self.play_s:g}"
            )
        if not 0 <= self.spread <= MAX_SPREAD:
            raise ConfigurationError(
                f"the spread must be between 0 and {MAX_SPREAD:g}, not {self.spread:g}"
            )


LOADS: Final = (
    Load("groups take half a step", play_s=5.0),
    Load("two steps", play_s=20.0),
    Load("two steps, some five times that", play_s=20.0, spread=1.0, in_flight=128),
    Load("two steps, engines rest now and then", play_s=20.0, rest_every_s=300.0, rest_s=15.0),
    Load("rollouts are slower", play_s=60.0),
)
BOUNDS: Final = (4, 16)


@dataclass(frozen=True)
class Outcome:
    """Of the counted steps."""

    idle: float
    """Share of the time that the learner waited."""
    staleness: float
    """Mean age of a group at its step, in versions since its admission."""
    oldest: int
    """Largest."""
    steps_per_s: float


def run(*, quick: bool, load: Load | None = None, bounds: tuple[int, ...] = ()) -> BenchResult:
    """`load` and `bounds` take the place of LOADS and BOUNDS. Raises ConfigurationError for a bound
    below 0."""
    bounds = bounds or BOUNDS
    if min(bounds) < 0:
        raise ConfigurationError(f"max_staleness must be 0 or more, not {min(bounds)}")
    num_steps, seeds = (200, (0,)) if quick else (600, (0, 1, 2))
    loads = LOADS if load is None else (load,)
    rows: list[tuple[str, ...]] = []
    keys: dict[str, float | int | str] = {}
    for i, of_run in enumerate(loads):
        for bound in bounds:
            full, adaptive = (
                _mean([play(of_run, bound, kind, num_steps, seed) for seed in seeds])
                for kind in ("full", "adaptive")
            )
            rows.append(_row(of_run, bound, full, adaptive))
            keys |= _keys(f"{i}/{bound}", full, adaptive)
    return BenchResult(
        name="lookahead",
        columns=(
            *("load", "max_staleness", "learner waits, full", "adaptive"),
            *("staleness, full", "adaptive", "steps, adaptive over full"),
        ),
        rows=tuple(rows),
        keys=keys,
    )


def play(
    load: Load,
    max_staleness: int,
    lookahead: Literal["full", "adaptive"],
    num_steps: int,
    seed: int,
) -> Outcome:
    """`num_steps` steps of one run."""
    return _World(load, max_staleness, lookahead, seed).play(num_steps)


class _World:
    """Rollouts, engines and learner around a buffer, at one moment."""

    def __init__(self, load: Load, max_staleness: int, lookahead: str, seed: int) -> None:
        self.load = load
        self.now_s = 0.0
        self.buffer = Buffer(
            ReplayConfig.model_validate(
                {
                    "groups_per_step": load.groups_per_step,
                    "max_staleness": max_staleness,
                    "lookahead": lookahead,
                    "max_groups": (max_staleness + 3) * load.groups_per_step,
                    "slot_timeout_s": NEVER_S,
                    "lease_timeout_s": NEVER_S,
                }
            ),
            lambda: self.now_s,
        )
        self.version = 0
        self.version_of: dict[str, int] = {}
        """Of each slot, at its admission."""
        self.playing: list[tuple[float, str]] = []
        """When each ends, nearest first."""
        self._rng = random.Random(seed)
        self._mu = math.log(load.play_s) - load.spread**2 / 2

    def play(self, num_steps: int) -> Outcome:
        began_s, num_left_out = 0.0, num_steps // LEFT_OUT
        waited_s, ages = 0.0, list[int]()
        self.admit()
        for step in range(num_steps):
            if step == num_left_out:
                began_s, waited_s, ages = self.now_s, 0.0, []
            asked_s = self.now_s
            while isinstance(drawn := self.buffer.draw(), Shortage):
                self.wait_for_more()
            waited_s += self.now_s - asked_s
            lease_id, groups = drawn
            ages += [groups.version - self.version_of.pop(i) for i in groups.ids]
            self.admit()
            done_s = self.now_s + self.load.step_s
            while self.playing and self.playing[0][0] <= done_s:
                self.end_next()
            self.now_s = done_s
            self.version += 1
            self.buffer.acknowledge(lease_id, self.version)
            self.admit()
        took_s = self.now_s - began_s
        return Outcome(
            waited_s / took_s, mean(ages), max(ages), (num_steps - num_left_out) / took_s
        )

    def wait_for_more(self) -> None:
        """As a draw is woken: by a group that makes a step full, or when its slice is over."""
        tried_s = self.now_s
        self.admit()  # what was lacked may have been let in
        self.end_next()
        while (
            self.buffer.ready_counts().total() < self.load.groups_per_step
            and self.now_s < tried_s + SLICE_S
        ):
            self.end_next()

    def admit(self) -> None:
        """As many groups as workers and buffer take."""
        while (num_free := self.load.in_flight - len(self.playing)) > 0:
            granted = self.buffer.admit(num_free, self.version)
            if isinstance(granted, Refusal):
                return
            for slot, ends_s in zip(granted, self._ends(), strict=False):
                self.version_of[slot.slot_id] = slot.version
                heapq.heappush(self.playing, (ends_s, slot.slot_id))

    def end_next(self) -> None:
        """The group that ends first goes into the buffer."""
        ends_s, slot_id = heapq.heappop(self.playing)
        self.now_s = max(self.now_s, ends_s)
        version = self.version_of[slot_id]
        self.buffer.add(slot_id, Entry(b"group", version, self.version, 1.0, [(1, 1)]))
        self.admit()

    def _ends(self) -> Iterator[float]:
        every_s, rest_s = self.load.rest_every_s, self.load.rest_s
        while True:
            ends_s = self.now_s + self._rng.lognormvariate(self._mu, self.load.spread)
            if every_s:
                ends_s += rest_s * (ends_s // every_s - self.now_s // every_s)
            yield ends_s


def _mean(outcomes: list[Outcome]) -> Outcome:
    return Outcome(
        mean(o.idle for o in outcomes),
        mean(o.staleness for o in outcomes),
        max(o.oldest for o in outcomes),
        mean(o.steps_per_s for o in outcomes),
    )


def _row(load: Load, bound: int, full: Outcome, adaptive: Outcome) -> tuple[str, ...]:
    return (
        load.name,
        str(bound),
        f"{full.idle:.1%}",
        f"{adaptive.idle:.1%}",
        f"{full.staleness:.2f}",
        f"{adaptive.staleness:.2f}, {adaptive.oldest} at most",
        f"{adaptive.steps_per_s / full.steps_per_s:.3f}",
    )


def _keys(name: str, full: Outcome, adaptive: Outcome) -> dict[str, float | int | str]:
    return {
        f"idle_full/{name}": full.idle,
        f"idle_adaptive/{name}": adaptive.idle,
        f"staleness_full/{name}": full.staleness,
        f"staleness_adaptive/{name}": adaptive.staleness,
        f"steps_ratio/{name}": adaptive.steps_per_s / full.steps_per_s,
    }


def of_options(base: Load, **values: float | None) -> Load | None:
    """`base` with the figures that were given; None without any."""
    given = {name: value for name, value in values.items() if value is not None}
    return replace(base, **given) if given else None
