"""The two processes of `leeway bench replay`: one for all producers, one for all consumers.

A turn is two jobs that start at a barrier, and each answers with its clock, which all processes of
a machine share. A job has a deadline; a process that fails or dies ends the bench with its error.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any, Final, NamedTuple, Self, TypeVar

from leeway.replay.codec import encode
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import StoreError, WaitTimeout
from leeway.replay.schema import Group, PolicyVersion
from leeway.replay.store import Slot
from leeway.replay.synthetic import build_group

T = TypeVar("T")

NUM_TRAJECTORIES: Final = 8
GROUPS_PER_STEP: Final = 16
NUM_IN_FLIGHT: Final = 64
"""Groups that all producers together play at once, at least."""
CALL_TIMEOUT_S: Final = 30.0
JOB_TIMEOUT_S: Final = 120.0
MAX_TURN_GROUPS: Final = 1 << 17
ENGINE: Final = PolicyVersion(0)
"""Every group is admitted at it; the window is too wide to hold anybody back."""


@dataclass(frozen=True)
class Load:
    """One turn: `num_groups` groups go from the producers to the consumers."""

    url: str
    run: str
    num_groups: int
    """A multiple of the 16 of a step."""
    num_tokens: int = 8
    """Of each of the group's 8 trajectories."""
    num_producers: int = 1
    num_consumers: int = 1
    max_groups: int = 1024
    """Most groups that may exist at once."""

    @property
    def num_at_once(self) -> int:
        """Groups each producer has in flight."""
        return max(1, NUM_IN_FLIGHT // self.num_producers)

    @property
    def config(self) -> ReplayConfig:
        """Of the buffer."""
        return ReplayConfig(
            groups_per_step=GROUPS_PER_STEP,
            max_groups=self.max_groups,
            max_staleness=100_000,
            lookahead="full",
        )

    def group(self) -> Group:
        """What all groups of the turn hold."""
        return build_group(Slot("0" * 32, ENGINE), None, NUM_TRAJECTORIES, self.num_tokens)

    def of_size(self, stored_bytes: int) -> Load:
        """The same with groups that take about `stored_bytes` when encoded."""
        small, large = (
            len(encode(replace(self, num_tokens=num_tokens).group())) for num_tokens in (1000, 2000)
        )
        num_tokens = 1000 + round(1000 * (stored_bytes - small) / (large - small))
        return replace(self, num_tokens=max(8, num_tokens))


class Done(NamedTuple):
    """What one process did in a turn."""

    started_s: float
    ended_s: float
    """Both of time.monotonic."""
    cpu_s: float
    """Of this process, between the two."""
    num_groups: int
    size: int
    """Bytes where groups stay encoded, otherwise tokens."""


class Shared:
    """What both processes see. Each number has one writer."""

    def __init__(self, context: Any) -> None:
        self._barrier = context.Barrier(2)
        self.num_written: Any = context.RawValue("q", 0)
        """Groups a baseline's producers have written."""
        self.num_read: Any = context.RawValue("q", 0)
        """Groups a baseline's consumers have deleted."""
        self.journal: Any = context.RawArray("i", MAX_TURN_GROUPS)
        """Numbers of the written groups, in the order in which their writes ended."""

    def clear(self) -> None:
        """Before a turn."""
        self.num_written.value = self.num_read.value = 0

    def start(self) -> Stopwatch:
        """Wait for the other process; everything is connected by now."""
        self._barrier.wait(CALL_TIMEOUT_S)
        return Stopwatch()


class Stopwatch:
    """Runs from its making on."""

    def __init__(self) -> None:
        self._started = time.monotonic(), time.process_time()

    def done(self, num_groups: int, size: int) -> Done:
        """Stop."""
        started_s, cpu_s = self._started
        return Done(started_s, time.monotonic(), time.process_time() - cpu_s, num_groups, size)


Job = Callable[[Shared], T]
"""Module-level functions and partials of them, since they travel to a process."""


class _Failure(NamedTuple):
    text: str


class Crew:
    """Two processes, started once. Use it in a `with`: whatever happens, they end with it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._shared = Shared(context)
        self._processes: list[SpawnProcess] = []
        self._pipes: dict[Any, str] = {}
        for name in ("producers", "consumers"):
            pipe, far_end = context.Pipe()
            process = context.Process(
                target=_work, args=(far_end, self._shared), name=name, daemon=True
            )
            process.start()
            far_end.close()  # held by the process alone, so that its death ends a read
            self._processes.append(process)
            self._pipes[pipe] = name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def both(self, produce: Job[T], consume: Job[T]) -> tuple[T, T]:
        """One job in each process, at the same time. The first failure of either is raised."""
        self._shared.clear()
        first, second = self._run(dict(zip(self._pipes, (produce, consume), strict=True)))
        return first, second

    def alone(self, job: Job[T]) -> T:
        """One job, in the first process."""
        return self._run({next(iter(self._pipes)): job})[0]

    def _run(self, jobs: dict[Any, Job[T]]) -> list[T]:
        deadline_s = time.monotonic() + JOB_TIMEOUT_S
        for pipe, job in jobs.items():
            with suppress(BrokenPipeError):  # the read below says that it died
                pipe.send(job)
        answers: dict[Any, T] = {}
        while len(answers) < len(jobs):
            missing = [pipe for pipe in jobs if pipe not in answers]
            ready = wait(missing, max(0.0, deadline_s - time.monotonic()))
            if not ready:
                names = " and ".join(self._pipes[pipe] for pipe in missing)
                raise WaitTimeout(f"the bench's {names} did not end in {JOB_TIMEOUT_S:g} s")
            for pipe in missing:
                if pipe in ready:
                    answers[pipe] = self._answer(pipe)
        return [answers[pipe] for pipe in jobs]

    def _answer(self, pipe: Any) -> Any:
        try:
            answer = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise StoreError(f"the process of the bench's {self._pipes[pipe]} died") from None
        if isinstance(answer, _Failure):
            raise StoreError(f"the bench's {self._pipes[pipe]} failed:\n{answer.text}")
        return answer


def _work(pipe: Any, shared: Shared) -> None:
    """The body of a process: one answer a job, until the pipe closes."""
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            answer = job(shared)
        except Exception:
            answer = _Failure(traceback.format_exc())
        pipe.send(answer)
