"""How a learner begins, anew or where another ended: the buffer goes to its version, then engines
are waited for.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final

from leeway.learner import loop
from leeway.learner.errors import LearnerStopped
from leeway.replay.board import RunBoard
from leeway.replay.errors import WaitTimeout
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Replay
from leeway.services.layout import RunDirectory
from leeway.services.resumption import cut_steps

START_S: Final = 3600.0
"""How long engines may take to load, and the evaluation before training to be played. The parent
ends the run sooner when the serve process fails."""
SECTION: Final = "beginning"
"""Of the run board, {was_paused}, while a learner keeps admission closed: one that is killed
meanwhile must not pass for an operator who has paused the run."""


class Beginning:
    """Of one learner process, which trains on from `version`."""

    def __init__(
        self, run: RunDirectory, board: RunBoard, replay: Replay, version: PolicyVersion
    ) -> None:
        self._run = run
        self._board = board
        self._replay = replay
        self._version = version

    async def restore(self) -> bool:
        """Bring the buffer to this learner's version, admission closed. Whether an operator had
        paused the run before."""
        is_paused = (await self._replay.stats()).admission_paused
        begun = (await self._board.get_all()).get(SECTION, {})
        was_paused = is_paused and bool(begun.get("was_paused", True))
        await self._board.put(SECTION, {"was_paused": was_paused})
        await self._replay.pause_admission(True)
        dropped = await self._replay.restore_version(self._version)
        lost = cut_steps(self._run.metrics, self._version)
        if dropped or lost:
            await self._board.append_event(
                "learner",
                f"resumed at version {self._version}; {lost} steps are trained again; {dropped} "
                "groups of lost versions were dropped",
            )
        return was_paused

    async def open(self, *, is_paused: bool) -> None:
        """Admission as it is to be from now on."""
        await self._replay.pause_admission(is_paused)
        await self._board.put(SECTION, {})


async def until_training(
    board: RunBoard,
    stop_requested: Callable[[], Awaitable[bool]],
    catch_up: Callable[[], Awaitable[None]],
    timeout_s: float = START_S,
) -> None:
    """Wait until the engines are up and the phase is `training`.

    A resumed buffer may hold all the groups that are left to train: a learner that began at once
    would be through, its weights published to nobody, before the first engine has loaded. Engines
    that started elsewhere than from this learner's checkpoint are not up before they have its
    version: `catch_up` sends it. Raises LearnerStopped when asked to stop, WaitTimeout after
    `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if await stop_requested():
            raise LearnerStopped("stopped before training began")
        left_s = deadline - time.monotonic()
        try:
            await board.wait_phase("training", min(loop.DRAW_SLICE_S, max(0.0, left_s)))
            return
        except WaitTimeout as error:
            if left_s <= loop.DRAW_SLICE_S:
                raise WaitTimeout(
                    f"the learner waited {timeout_s:g} s for the serve process to load engines and "
                    f"to evaluate ({error})"
                ) from None
        await catch_up()
