"""The processes of `leeway train`: started, watched, started again, and ended, in one order.

    Redis -> API -> serve -> learner      they start, each able to find the one before
    learner -> serve -> API -> Redis      they end: who produces last hands over first

One that ends before its time is started again, since each goes on where it was: Redis from its
append-only file, the learner from its last checkpoint, the serve process at the phase of the run.
That is not done for a fault that would come again (exit codes 2 and 3: bad input, a number that is
not finite, a broken bound; and any error before the run has worked at all), nor more than
`supervision.max_restarts` times within `supervision.restart_window_s`: then the run ends with the
sentence of the one that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from leeway.replay.errors import LeewayError
from leeway.replay.server import EmbeddedRedis
from leeway.services import supervision
from leeway.services.supervision import Child, ChildDied
from leeway.services.supervision_config import SupervisionConfig

log = logging.getLogger(__name__)

NOT_AGAIN: Final = (2, 3)
"""Exit codes of faults that would come again; see LeewayError.exit_code."""
MAX_DELAY_S: Final = 30.0
REDIS_LOOK_S: Final = 0.2

Tell = Callable[[str], Awaitable[None]]
"""Takes a sentence for the events of the run."""


class Member(Protocol):
    """One process of the crew; it can be started any number of times."""

    name: str
    is_needed: bool
    """Whether the run cannot go on without it."""

    @property
    def pid(self) -> int | None: ...
    async def start(self) -> None: ...
    async def ended(self) -> ChildDied: ...
    async def stop(self) -> None: ...


class Command:
    """A process that `leeway NAME` starts."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        grace_s: float,
        is_needed: bool = True,
    ) -> None:
        """`grace_s`: how long it may take to end after SIGTERM."""
        self.name = name
        self.is_needed = is_needed
        self._grace_s = grace_s
        self.arguments = [*arguments]
        """Behind `python -m`, at the next start."""
        self._log = log
        self._environment = environment
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        """None before it was started."""
        return None if self._child is None else self._child.process.pid

    async def start(self) -> None:
        """Begin a new process; its output goes behind that of the one before."""
        self._child = await supervision.start(
            self.name, self.arguments, self._log, self._environment
        )

    async def ended(self) -> ChildDied:
        """Returns when it is over, as an error that says how."""
        assert self._child is not None
        return await self._child.ended()

    async def stop(self) -> None:
        """SIGTERM, after `grace_s` SIGKILL; what it started ends with it."""
        if self._child is not None:
            await self._child.stop(self._grace_s)


class RedisMember:
    """The embedded Redis, already running."""

    name = "redis"
    is_needed = True

    def __init__(self, server: EmbeddedRedis) -> None:
        self._server = server

    @property
    def pid(self) -> int:
        """Of the process that runs, or ran last."""
        return self._server.pid

    @property
    def is_running(self) -> bool:
        """The process is alive."""
        return self._server.is_running

    async def start(self) -> None:
        """Again, in this thread: the kernel ends the server with the thread that started it."""
        self._server.start_again()

    async def ended(self) -> ChildDied:
        """Returns when it is over."""
        while self._server.is_running:
            await asyncio.sleep(REDIS_LOOK_S)
        return ChildDied(
            f"the embedded Redis ended; its log is {self._server.directory / 'redis.log'}"
        )

    async def stop(self) -> None:
        """Flush the append-only file and end."""
        await asyncio.to_thread(self._server.stop)


class Restarts:
    """Those of one process, within a window of time."""

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self._at: deque[float] = deque()

    def take(self, now: float) -> int | None:
        """Count one more at `now`, in seconds: its number within the window; None is one too many.

        3 in 600 s: at 0, 10, 20 -> 1, 2, 3; at 30 -> None; at 601 -> 3, since the first is over.
        """
        while self._at and now - self._at[0] >= self._config.restart_window_s:
            self._at.popleft()
        if len(self._at) >= self._config.max_restarts:
            return None
        self._at.append(now)
        return len(self._at)


class Crew:
    """Every process of one run. Members are kept alive while `watch` runs."""

    def __init__(self, config: SupervisionConfig, tell: Tell) -> None:
        self._config = config
        self._tell = tell
        self._members: dict[str, Member] = {}
        self._finished: set[str] = set()
        self._starting = asyncio.Lock()
        """One at a time: what has just been started must not pass for an orphan."""
        self.is_over: Callable[[str], bool] = lambda name: False
        """Whether the process of this name has done its work, and may end."""
        self.is_settled: Callable[[], bool] = lambda: True
        """Whether the run has worked once. Before, an error of a process is that of its setup, and
        a person waits for the sentence; only who was killed is started again."""

    @property
    def pids(self) -> dict[str, int]:
        """By name, of those that were started."""
        return {
            name: pid for name, member in self._members.items() if (pid := member.pid) is not None
        }

    def add(self, member: Member) -> None:
        """One that runs already."""
        self._members[member.name] = member

    async def start(self, member: Member) -> None:
        """Start it, behind those before."""
        async with self._starting:
            await member.start()
        self._members[member.name] = member

    async def watch(self) -> None:
        """Start again who ends, until cancelled. Raises ChildDied when one is not started again."""
        keeping = [
            asyncio.create_task(self._keep(member), name=f"keep {name}")
            for name, member in self._members.items()
        ]
        try:
            await asyncio.gather(*keeping)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    def has_finished(self, name: str) -> bool:
        """Whether it has done its work and ended."""
        return name in self._finished

    async def stop(self, *names: str) -> None:
        """End these, one after the other; who was never started is passed over."""
        for name in names:
            if name in self._members:
                await self._members[name].stop()

    async def end_orphans(self) -> None:
        """End what dead members have left behind: this process is its parent now."""
        await asyncio.to_thread(supervision.end_found, self._orphans)

    def _orphans(self) -> list[supervision.Process]:
        own = set(self.pids.values())
        found = [child for child in supervision.children(os.getpid()) if child.pid not in own]
        return found + [below for child in found for below in supervision.descendants(child.pid)]

    async def _keep(self, member: Member) -> None:
        """Start it again whenever it ends, as often as may be."""
        restarts = Restarts(self._config)
        died = await member.ended()
        while not self.is_over(member.name):
            would_recur = died.code in NOT_AGAIN or (died.is_failure and not self.is_settled())
            number = None if would_recur else restarts.take(time.monotonic())
            if number is None:
                return await self._give_up(member, died)
            log.warning("%s", died)
            await asyncio.sleep(delay_s(number))
            try:
                await self._start_again(member)
            except (OSError, LeewayError) as error:
                died = ChildDied(f"the {member.name} process could not be started again: {error}")
                continue
            await self._say(
                f"{died}; started again ({number} of {self._config.max_restarts} times in "
                f"{self._config.restart_window_s:g} s)"
            )
            died = await member.ended()
        self._finished.add(member.name)

    async def _start_again(self, member: Member) -> None:
        async with self._starting:
            await self.end_orphans()
            await member.start()

    async def _give_up(self, member: Member, died: ChildDied) -> None:
        if member.is_needed:
            raise died
        await self._say(f"{died}; the run goes on without it")

    async def _say(self, sentence: str) -> None:
        # Redis may be what has just died.
        with contextlib.suppress(LeewayError):
            await self._tell(sentence)


def delay_s(number: int) -> float:
    """Before the n-th restart within the window: 0, 1, 2, 4, 8, ... 30 s."""
    return 0.0 if number == 1 else min(MAX_DELAY_S, 2.0 ** (number - 2))
