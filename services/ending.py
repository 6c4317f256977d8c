"""The end of a run, as the learner sees it: trained, evaluated, results written; or an error."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Final

from leeway.learner.errors import LearnerStopped
from leeway.replay.board import RunBoard
from leeway.replay.errors import WaitTimeout

DONE_S: Final = 3600.0
"""How long the evaluation after training may take, engines that must be started again included."""
ERROR_S: Final = 20
"""How long the process may take to end after an error, besides what its sinks may."""
LOOK_S: Final = 0.5
STAY_S: Final = 2.0


def end_within(seconds: int) -> None:
    """Let SIGALRM end this process after so many seconds, wherever it is then.

    Where memory is refused, a thread that was just started may die before it says that it runs,
    and Thread.start waits for that for ever. What an error leads to can start threads: closing the
    event loop does.
    """
    signal.alarm(seconds)


async def until_done(
    board: RunBoard, stop_requested: Callable[[], Awaitable[bool]], timeout_s: float = DONE_S
) -> None:
    """End the phase `training`, and wait until the serve process has evaluated and says `done`.

    A serve process that starts meanwhile says `training` once more, since it cannot know better;
    it is put right here. Raises LearnerStopped when asked to stop, WaitTimeout after `timeout_s`.
    """
    if await board.phase() != "done":
        await board.set_phase("evaluating-after")
    deadline = time.monotonic() + timeout_s
    while (phase := await board.phase()) != "done":
        if phase == "training":
            await board.set_phase("evaluating-after")
        if await stop_requested():
            raise LearnerStopped("stopped after training, before the last evaluation")
        if time.monotonic() > deadline:
            raise WaitTimeout(
                f"training is over, and the serve process has not evaluated within {timeout_s:g} s "
                f"(the run is in phase {phase!r}); start it, and the learner again"
            )
        await asyncio.sleep(LOOK_S)


async def until_stopped(stop_requested: Callable[[], Awaitable[bool]]) -> None:
    """Wait until asked to stop, for ever: a supervisor would start again what ends."""
    while not await stop_requested():
        await asyncio.sleep(STAY_S)
