"""The processes of `leeway train`: started, watched, started again, and ended, in one order.

    Redis -> API -> serve -> learner      they start, each able to find the one before
    learner -> serve -> API -> Redis      they end: who produces last hands over first

One that ends before its time is started again, since each goes on where it was: Redis from its
append-only file, the learner from its last checkpoint, the serve process at the phase of the run.
That is not done for a fault that would come again (exit codes 2 and 3: bad input, a number that is
not finite, a broken bound; and any error before the run has worked at all), nor more than
`supervision.max_restarts` times within `supervision.restart_window_s`: then the run ends with the
sentence of the one that died. While the disk is full nobody is started: each would only end again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from leeway.replay.errors import LeewayError
from leeway.services import supervision
from leeway.services.processes.members import Member
from leeway.services.supervision import ChildDied
from leeway.services.supervision_config import SupervisionConfig

log = logging.getLogger(__name__)

NOT_AGAIN: Final = (2, 3)
"""Exit codes of faults that would come again; see LeewayError.exit_code."""
MAX_DELAY_S: Final = 30.0
OBSTACLE_S: Final = 180.0
"""How long somebody may take to make room on a full disk."""
OBSTACLE_LOOK_S: Final = 0.5
ROOM_BYTES: Final = 2**20
"""Less than this is a full disk: Redis ends at the first write that fails."""
SAY_S: Final = 2.0
"""How long the last events may take when everything is ending."""

Tell = Callable[[str], Awaitable[None]]
"""Takes a sentence for the events of the run."""


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
        self._saying: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()
        """One at a time: what has just been started must not pass for an orphan."""
        self.is_over: Callable[[str], bool] = lambda name: False
        """Whether the process of this name has done its work, and may end."""
        self.is_settled: Callable[[], bool] = lambda: True
        """Whether the run has worked once. Before, an error of a process is that of its setup, and
        a person waits for the sentence; only who was killed is started again."""
        self.obstacle: Callable[[], str | None] = lambda: None
        """Why nobody could work who is started now, such as a full disk; None if all could."""

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
            await self._finish_saying()

    def has_finished(self, name: str) -> bool:
        """Whether it has done its work and ended."""
        return name in self._finished

    async def stop(self, *names: str) -> dict[str, int | None]:
        """End these, one after the other; who was never started is passed over. Returns their exit
        codes, negative for a signal, None for one that never ran."""
        codes: dict[str, int | None] = {}
        for name in names:
            if name in self._members:
                codes[name] = await self._members[name].stop()
        return codes

    async def end_orphans(self) -> None:
        """End what dead members have left behind: this process is its parent now."""
        await asyncio.to_thread(supervision.end_found, self._orphans)

    def _orphans(self) -> list[supervision.Process]:
        own = set(self.pids.values())
        found = [
            child
            for child in supervision.children(os.getpid())
            if child.pid not in own and not supervision.is_spared(child)
        ]
        return found + [below for child in found for below in supervision.descendants(child.pid)]

    async def _keep(self, member: Member) -> None:
        """Start it again whenever it ends, as often as may be."""
        restarts = Restarts(self._config)
        died = await member.ended()
        while died.code != 0 or not self.is_over(member.name):
            died = await self._past_obstacle(died)
            would_recur = died.code in NOT_AGAIN or (died.is_failure and not self.is_settled())
            number = None if would_recur else restarts.take(time.monotonic())
            if number is None:
                return self._give_up(member, died)
            log.warning("%s", died)
            await asyncio.sleep(delay_s(number))
            try:
                await self._start_again(member)
            except (OSError, LeewayError) as error:
                died = ChildDied(f"the {member.name} process could not be started again: {error}")
                continue
            self._say(
                f"{died}; started again ({number} of {self._config.max_restarts} times in "
                f"{self._config.restart_window_s:g} s)"
            )
            died = await member.ended()
        self._finished.add(member.name)

    async def _start_again(self, member: Member) -> None:
        async with self._starting:
            await self.end_orphans()
            await member.start()

    async def _past_obstacle(self, died: ChildDied) -> ChildDied:
        """Wait until nothing is in the way of a restart. Raises ChildDied after OBSTACLE_S."""
        deadline, obstacle = time.monotonic() + OBSTACLE_S, self.obstacle()
        if obstacle is None:
            return died
        log.warning("%s; %s, so nobody is started", died, obstacle)
        while (found := self.obstacle()) is not None:
            if time.monotonic() > deadline:
                raise ChildDied(f"{died}; {found} for {OBSTACLE_S:g} s", died.code)
            await asyncio.sleep(OBSTACLE_LOOK_S)
        return ChildDied(f"{died}, when {obstacle}")

    def _give_up(self, member: Member, died: ChildDied) -> None:
        if member.is_needed:
            raise died
        self._say(f"{died}; the run goes on without it")

    def _say(self, sentence: str) -> None:
        """Beside all else: Redis, which is told, may be what has just died."""
        saying = asyncio.create_task(self._try_to_tell(sentence))
        self._saying.add(saying)
        saying.add_done_callback(self._saying.discard)

    async def _try_to_tell(self, sentence: str) -> None:
        with contextlib.suppress(LeewayError):
            await self._tell(sentence)

    async def _finish_saying(self) -> None:
        if self._saying:
            _, late = await asyncio.wait(self._saying, timeout=SAY_S)
            for saying in late:
                saying.cancel()
            await asyncio.gather(*late, return_exceptions=True)


def delay_s(number: int) -> float:
    """Before the n-th restart within the window: 0, 1, 2, 4, 8, ... 30 s."""
    return 0.0 if number == 1 else min(MAX_DELAY_S, 2.0 ** (number - 2))


def full_disk(folder: Path) -> str | None:
    """What there is to say of the disk of `folder` when nothing more fits; else None."""
    place = os.statvfs(folder)
    free = place.f_bavail * place.f_frsize
    return None if free >= ROOM_BYTES else f"no space was left on the disk of {folder}"
