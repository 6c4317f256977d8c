"""How late the event loop of a process wakes: a loop that something blocks answers nobody, and says
nothing of it. Each process puts its own on the run board as section `loop:NAME`."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from typing import Final

from leeway.replay.errors import LeewayError
from leeway.replay.run_board import RunBoard

log = logging.getLogger(__name__)

LOOK_S: Final = 0.1
PUT_S: Final = 5.0
KEPT_S: Final = 60.0
"""The longest lag of so long is told."""


class LoopLag:
    """Of the event loop it is awaited in."""

    def __init__(self) -> None:
        self._lags: deque[tuple[float, float]] = deque()

    async def measure(self, seconds: float) -> None:
        """Look for so long."""
        end = time.monotonic() + seconds
        while (asked := time.monotonic()) < end:
            await asyncio.sleep(LOOK_S)
            self.note(time.monotonic(), time.monotonic() - asked - LOOK_S)

    def note(self, now: float, lag_s: float) -> None:
        """It woke at `now`, `lag_s` late."""
        while self._lags and now - self._lags[0][0] > KEPT_S:
            self._lags.popleft()
        self._lags.append((now, max(0.0, lag_s)))

    @property
    def longest_s(self) -> float:
        """Of the last minute; 0 before the first look."""
        return max((lag_s for _, lag_s in self._lags), default=0.0)


async def report_lag(board: RunBoard, name: str) -> None:
    """Tell the run board how late this loop wakes, as process `name`, until cancelled.

    Redis may be away meanwhile: what could not be told is told the next time.
    """
    lag = LoopLag()
    while True:
        await lag.measure(PUT_S)
        try:
            await board.put(f"loop:{name}", {"lag_s": lag.longest_s, "pid": os.getpid()})
        except LeewayError as error:
            log.warning("the lag of the event loop could not be told: %s", error)
