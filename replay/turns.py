"""Tries of many waiting callers, one at a time, and none in vain.

A wake-up wakes all who wait, and the first to try may take what there is. The others would ask
Redis once each to hear the same refusal; they take the first one's instead, as long as nothing was
signalled since.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import msgspec

from leeway.replay.waiting import Refusal, Shortage
from leeway.replay.wakeups import Wakeups, number_of

Granted = TypeVar("Granted")
Refused = TypeVar("Refused", Refusal, Shortage)


class Turns(Generic[Granted, Refused]):
    """Callers of one process that try the same thing and wait for the same signal."""

    def __init__(self, wakeups: Wakeups, refused: type[Refused]) -> None:
        self._wakeups = wakeups
        self._refused = refused
        self._lock = asyncio.Lock()
        self._last: Refused | None = None
        self._until_s = 0.0

    async def do(
        self,
        attempt: Callable[[], Awaitable[Granted | Refused]],
        *,
        was_woken: bool,
        would_be: Callable[[Refused], bool] = lambda _: True,
    ) -> Granted | Refused:
        """Try, unless another was refused, nothing was signalled or has expired since, and the
        caller `would_be` refused for the same. Those who were woken try one after another."""
        if not was_woken:
            return self._known(would_be) or await self._try(attempt)
        async with self._lock:
            return self._known(would_be) or await self._try(attempt)

    def _known(self, would_be: Callable[[Refused], bool]) -> Refused | None:
        last = self._last
        is_known = (
            last is not None
            and time.monotonic() < self._until_s
            and self._wakeups.is_last(last.signal)
            and would_be(last)
        )
        return last if is_known else None

    async def _try(self, attempt: Callable[[], Awaitable[Granted | Refused]]) -> Granted | Refused:
        heard = self._wakeups.heard
        outcome = await attempt()
        if isinstance(outcome, self._refused):
            # Others write the stream too, of whom the script knows nothing. What was heard before
            # the try is no news after it.
            if number_of(heard) > number_of(outcome.signal):
                outcome = msgspec.structs.replace(outcome, signal=heard)
            self._last = outcome
            left_s = float("inf") if outcome.expires_in_s is None else outcome.expires_in_s
            self._until_s = time.monotonic() + left_s
        return outcome
