"""The watchdog of a run: looks every few seconds, keeps what it sees on the run board, and ends a
run in which a stage is over its deadline, with an evidence bundle beside the logs.

In `leeway train` the parent process runs it; where the processes of a run are started one by one,
the serve process, or the course in a Serve application.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

import msgspec

from leeway.replay.board import RunBoard
from leeway.replay.errors import LeewayError
from leeway.replay.store import Replay
from leeway.services.config import RunConfig
from leeway.services.layout import RunDirectory
from leeway.services.watchdog import Look, Stages, verdict

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
SECTION: Final = "watchdog"
"""Of the run board: {stages: [{name, idle_s, deadline_s}], waits, verdict}."""
WATCHED: Final = "LEEWAY_WATCHED"
"""Set for the processes of `leeway train`, whose parent runs the watchdog."""
BUNDLE_S: Final = 180.0


def evidence_of(run: RunDirectory) -> Callable[[str], Awaitable[str]]:
    """Writes the bundle of `run`, given a verdict, and says where it lies."""

    async def collect(found: str) -> str:
        from leeway.services.doctor.bundle import write_bundle

        bundle = await asyncio.to_thread(write_bundle, run, found)
        return f"the evidence is in {bundle.path}"

    return collect


async def until_one_fails(*works: Coroutine[Any, Any, None]) -> None:
    """Do all at once. The first error is raised, the others having been cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_one_ends(
    ends: Sequence[asyncio.Task[Any]], watches: Sequence[asyncio.Task[Any]]
) -> None:
    """Return when one of `ends` is done; whatever fails before, of both, is raised. All are
    cancelled then."""
    tasks = [*ends, *watches]
    try:
        while True:
            waiting = [task for task in tasks if not task.done()]
            for task in tasks:
                if task.done():
                    task.result()
            if any(task.done() for task in ends):
                return
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Standstill(LeewayError):
    """A stage of the run made no progress within its deadline. The sentence says who waits for
    whom."""


class Watchdog:
    """Of one run. `bundle` collects the evidence, given the verdict, and says where it lies."""

    def __init__(
        self,
        board: RunBoard,
        replay: Replay,
        config: RunConfig,
        bundle: Callable[[str], Awaitable[str]],
    ) -> None:
        self._board = board
        self._replay = replay
        self._config = config
        self._bundle = bundle
        self._stages = Stages(config.supervision)

    async def keep(self) -> None:
        """Look until cancelled. Raises Standstill, the evidence collected."""
        while True:
            try:
                await self.look()
            except Standstill:
                raise
            except LeewayError as error:  # a Redis that stays away ends the run by itself
                log.warning("the watchdog could not look: %s", error)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Once. Raises Standstill."""
        stats, sections = await self._replay.stats(), await self._board.get_all()
        phase = await self._board.phase() or "starting"
        look = Look(time.monotonic(), time.time(), phase, sections, stats)
        stages = self._stages.see(look)
        waits = self._stages.waits(look, self._config.replay)
        overdue = next((stage for stage in stages if stage.is_overdue), None)
        found = verdict(overdue, waits) if overdue else None
        section: dict[str, Any] = {"waits": waits, "verdict": found}
        await self._board.put(SECTION, {**section, "stages": msgspec.to_builtins(stages)})
        if found is not None:
            await self._end(found)

    async def _end(self, found: str) -> None:
        await self._board.append_event("watchdog", found)
        try:
            place = await asyncio.wait_for(self._bundle(found), BUNDLE_S)
        except Exception as error:  # the run ends all the same, with its sentence
            log.exception("no evidence could be collected")
            place = f"no evidence could be collected ({error!r})"
        raise Standstill(f"{found}; {place}")
