"""The replay buffer against what Redis itself can do, on one embedded server, in one run.

    SET, GET, DEL   the whole life of a group in the buffer, which is admit, add, draw and
                    acknowledge, against a SET, a GET and a DEL of the same bytes in pipelines of
                    the same size: a producer SETs as many groups at once as ours has in flight, a
                    consumer GETs and DELs one step of them. Both stay encoded, and neither side
                    may run ahead of its consumers by more than `max_groups`. What the baseline's
                    processes have to tell each other goes through shared memory.
    with codec      the same baseline; ours encodes, checks and decodes
    stream          one XADD for each trajectory, a pickled dict of Python lists, and XREADs of one
                    entry each, by a synchronous client: from lists to lists, nothing deleted. Ours
                    goes from numpy arrays to numpy arrays with the codec and is four producers
                    with 16 groups in flight each and one consumer; theirs is a process each, too,
                    which has no use for tasks. Once more with a pickle for each group.

All producers are tasks of one process and all consumers of another. A turn lasts from the start of
both to the end of the last consumer; sides take turns, and a figure is the median over them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import truediv
from statistics import median
from typing import Final

import numpy as np

from leeway.replay.codec import encode
from leeway.replay.errors import StoreError
from leeway.replay.server import EmbeddedRedis
from leeway.services.bench.replay_baselines import (
    empty,
    read_plain,
    read_stream,
    write_plain,
    write_stream,
)
from leeway.services.bench.replay_crew import (
    GROUPS_PER_STEP,
    NUM_TRAJECTORIES,
    Crew,
    Done,
    Job,
    Load,
)
from leeway.services.bench.replay_jobs import (
    OperationTimes,
    consume,
    fill,
    produce,
    time_codec,
    time_draws,
    time_operations,
)
from leeway.services.bench.result import BenchResult

KIB: Final = 2**10
SIZES: Final = (64 * KIB, 256 * KIB, 1024 * KIB)
MAX_GROUPS: Final = 512
"""Most that exist at once in a turn: 64 in flight, a step for each of 8 consumers, and more."""
MIN_MEMORY_BYTES: Final = 8 * 2**30
"""Free: for the append-only file of the full buffer, twice while it is rewritten, and the rest."""
PLAIN: Final = "SET, GET, DEL"
CODEC: Final = "SET, GET, DEL; ours with codec"
STREAM: Final = "stream, a trajectory an entry"
STREAM_STEPS: Final = 12
"""Steps of a turn beside a stream, at least: in the first one nobody reads, as the step must be
there before it is drawn."""
STREAM_PRODUCERS: Final = 4
"""Of ours beside a stream, in one process: with a single one, nobody encodes while it waits."""
WHOLE: Final = "stream, a group an entry"
TINY_BYTES: Final = 1 * KIB

Keys = dict[str, float | int | str]


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    cases: tuple[tuple[int, int, int], ...]
    """Bytes of a group as stored, producers, consumers."""
    stream_sizes: tuple[int, ...]
    turns: int
    turn_bytes: int
    """Bytes that go through the buffer in a turn, about: at least a step for each consumer."""
    stream_bytes: int
    """The same where the other side is a stream, which is slower."""
    num_buffered: int
    """Groups in the buffer that is drawn from."""
    num_draws: int
    levels: tuple[int, ...]
    """Groups of about 1 KiB in the buffers whose operations are timed; the first is the least."""
    num_rounds: int


FULL: Final = Plan(
    cases=tuple((size, p, c) for size in SIZES for p in (1, 8, 64) for c in (1, 8)),
    stream_sizes=SIZES,
    turns=3,
    turn_bytes=128 * 2**20,
    stream_bytes=96 * 2**20,
    num_buffered=10_000,
    num_draws=400,
    levels=(100, 10_000, 100_000),
    num_rounds=100,
)
QUICK: Final = replace(
    FULL,
    cases=(
        *((64 * KIB, 1, 1), (64 * KIB, 8, 8), (64 * KIB, 64, 8)),
        *((256 * KIB, 8, 1), (1024 * KIB, 8, 8)),
    ),
    stream_sizes=(64 * KIB,),
    turn_bytes=48 * 2**20,
    stream_bytes=16 * 2**20,
    num_draws=200,
    levels=(100, 10_000),
    num_rounds=50,
)


def run(*, quick: bool) -> BenchResult:
    """All parts, one after the other."""
    return measure(QUICK if quick else FULL)


def measure(plan: Plan) -> BenchResult:
    """What `plan` says, on a server that holds nothing before and is gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="leeway-bench-", dir=_in_memory()) as directory,
        EmbeddedRedis.start(directory, "bench") as server,
        Crew() as crew,
    ):
        bench = _Bench(plan, server.admin_url, crew)
        races = [*bench.against_plain(), *bench.against_streams()]
        others = {**bench.draws(), **bench.costs(), **bench.codec()}
    return BenchResult(
        name="replay",
        columns=(
            *("against", "KiB", "producers", "consumers"),
            *("groups/s", "MiB/s", "theirs groups/s", "ratio"),
        ),
        rows=tuple(race.cells() for race in races),
        keys={**_ratios(races), **others, "num_groups": bench.num_groups},
    )


def _in_memory() -> str | None:
    """Where Redis keeps its append-only file: in memory if there is room, since a disk that is slow
    for a moment would slow one side and not the other."""
    shared_memory = "/dev/shm"
    try:
        is_roomy = shutil.disk_usage(shared_memory).free >= MIN_MEMORY_BYTES
    except OSError:
        return None
    return shared_memory if is_roomy and os.access(shared_memory, os.W_OK) else None


# --- two sides race ---


@dataclass(frozen=True)
class Race:
    """One case: how fast groups go through each side."""

    against: str
    load: Load
    stored_bytes: int
    """Of one group."""
    ours_s: float
    theirs_s: float
    """Seconds of a turn."""

    @property
    def ratio(self) -> float:
        """2.0: ours is twice as fast."""
        return self.theirs_s / self.ours_s

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        rate = self.load.num_groups / self.ours_s
        return (
            self.against,
            f"{self.stored_bytes / KIB:.0f}",
            str(self.load.num_producers),
            str(self.load.num_consumers),
            f"{rate:,.0f}",
            f"{rate * self.stored_bytes / 2**20:,.0f}",
            f"{self.load.num_groups / self.theirs_s:,.0f}",
            f"{self.ratio:.2f}",
        )


@dataclass(frozen=True)
class _Side:
    produce: Job[Done]
    consume: Job[Done]
    size: int
    """What the consumers must report: bytes or tokens of all groups."""


def _ratios(races: list[Race]) -> Keys:
    names = {
        PLAIN: "ratio_to_redis",
        CODEC: "ratio_with_codec",
        STREAM: "ratio_to_stream",
        WHOLE: "ratio_to_group_stream",
    }
    worst: Keys = {}
    for against, name in names.items():
        ratios = [race.ratio for race in races if race.against == against]
        worst[name] = min(ratios)
        if against == PLAIN:
            worst["median_ratio_to_redis"] = median(ratios)
    return worst


class _Bench:
    """The parts that need the server and the two processes."""

    def __init__(self, plan: Plan, url: str, crew: Crew) -> None:
        self._plan = plan
        self._url = url
        self._crew = crew
        self._num_runs = 0
        self.num_groups = 0
        """Groups that all sides of all races moved, turn by turn."""

    def against_plain(self) -> Iterator[Race]:
        """Bare and with codec, in the same turns as one baseline."""
        for stored_bytes, num_producers, num_consumers in self._plan.cases:
            load, size = self._load(
                stored_bytes, num_producers, num_consumers, self._plan.turn_bytes
            )
            bare, codec, plain = self._seconds(
                load, _ours(load, is_bare=True), _ours(load, is_bare=False), _plain(load)
            )
            yield Race(PLAIN, load, size, bare, plain)
            yield Race(CODEC, load, size, codec, plain)

    def against_streams(self) -> Iterator[Race]:
        """By trajectory and by group, in the same turns as ours."""
        for stored_bytes in self._plan.stream_sizes:
            least = STREAM_STEPS * GROUPS_PER_STEP * stored_bytes
            load, size = self._load(
                stored_bytes, STREAM_PRODUCERS, 1, max(self._plan.stream_bytes, least)
            )
            ours, stream, whole = self._seconds(
                load,
                _ours(load, is_bare=False),
                _stream(load, is_whole=False),
                _stream(load, is_whole=True),
            )
            yield Race(STREAM, load, size, ours, stream)
            yield Race(WHOLE, load, size, ours, whole)

    def draws(self) -> Keys:
        """Milliseconds of a draw while many groups are buffered."""
        empty(self._url, rewrites=True)
        load, _ = self._load(SIZES[0], 1, 1)
        self._fill(load, self._plan.num_buffered)
        load = replace(load, max_groups=2 * self._plan.num_buffered)
        times = self._crew.alone(partial(time_draws, load, self._plan.num_draws))
        return {
            "draw_p99_ms": 1e3 * float(np.percentile(times.decoded, 99)),
            "draw_median_ms": 1e3 * median(times.decoded),
            "draw_bare_p99_ms": 1e3 * float(np.percentile(times.bare, 99)),
            "draw_bare_median_ms": 1e3 * median(times.bare),
        }

    def costs(self) -> Keys:
        """Microseconds of each operation at each level, and how much they grow."""
        empty(self._url, rewrites=True)
        levels = self._plan.levels
        loads = [replace(self._load(TINY_BYTES, 1, 1)[0], max_groups=2 * n) for n in levels]
        for level, load in zip(levels, loads, strict=True):
            self._fill(load, level)
        times = self._crew.alone(partial(time_operations, loads, self._plan.num_rounds))
        costs = [[1e6 * median(seconds) for seconds in level] for level in times]
        keys: Keys = {"cost_growth": max(map(truediv, costs[-1], costs[0]))}
        for level, row in zip(levels, costs, strict=True):
            for operation, microseconds in zip(OperationTimes._fields, row, strict=True):
                keys[f"{operation}_us/{level}"] = round(microseconds, 1)
        return keys

    def codec(self) -> Keys:
        """GB of token arrays in a second of one core, of the size that is slowest."""
        loads = [self._load(stored_bytes, 1, 1)[0] for stored_bytes in SIZES]
        speeds = self._crew.alone(partial(time_codec, loads))
        return {
            "encode_gb_s": min(speed.encode_gb_s for speed in speeds),
            "decode_gb_s": min(speed.decode_gb_s for speed in speeds),
        }

    def _load(
        self, stored_bytes: int, num_producers: int, num_consumers: int, turn_bytes: int = 0
    ) -> tuple[Load, int]:
        """A turn of groups of about `stored_bytes`, and how many bytes each has."""
        self._num_runs += 1
        num_at_once = GROUPS_PER_STEP * num_consumers
        load = Load(
            url=self._url,
            run=f"bench-{self._num_runs}",
            num_groups=max(1, round(turn_bytes / stored_bytes / num_at_once)) * num_at_once,
            num_producers=num_producers,
            num_consumers=num_consumers,
            max_groups=MAX_GROUPS,
        ).of_size(stored_bytes)
        return load, len(encode(load.group()))

    def _seconds(self, load: Load, *sides: _Side) -> list[float]:
        """Median seconds of a turn of each side, after one of each that is not counted."""
        seconds: list[list[float]] = [[] for _ in sides]
        for turn in range(self._plan.turns + 1):
            for took_s, side in zip(seconds, sides, strict=True):
                turn_s = self._turn(load, side)
                if turn:
                    took_s.append(turn_s)
        return [median(took_s) for took_s in seconds]

    def _turn(self, load: Load, side: _Side) -> float:
        empty(self._url, rewrites=False)
        wrote, read = self._crew.both(side.produce, side.consume)
        if not wrote.num_groups == read.num_groups == load.num_groups or read.size != side.size:
            raise StoreError(f"{load} wrote {wrote} and read {read}; all of it must arrive")
        self.num_groups += load.num_groups
        return read.ended_s - min(wrote.started_s, read.started_s)

    def _fill(self, load: Load, num_groups: int) -> None:
        half = replace(load, num_groups=num_groups // 2, max_groups=2 * num_groups)
        self._crew.both(partial(fill, half), partial(fill, half))


def _ours(load: Load, *, is_bare: bool) -> _Side:
    group = load.group()
    size = len(encode(group)) if is_bare else NUM_TRAJECTORIES * load.num_tokens
    return _Side(
        partial(produce, load, is_bare), partial(consume, load, is_bare), load.num_groups * size
    )


def _plain(load: Load) -> _Side:
    size = load.num_groups * len(encode(load.group()))
    return _Side(partial(write_plain, load), partial(read_plain, load), size)


def _stream(load: Load, *, is_whole: bool) -> _Side:
    return _Side(
        partial(write_stream, load, is_whole),
        partial(read_stream, load, is_whole),
        load.num_groups * NUM_TRAJECTORIES * load.num_tokens,
    )
