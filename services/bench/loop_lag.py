"""How late an event loop wakes who has asked to be woken: how long it was busy with something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Final

LOOK_EVERY_S: Final = 0.002


async def loop_lags() -> AsyncIterator[float]:
    """Seconds of lag, one every two milliseconds, for as long as it is iterated."""
    while True:
        asked = time.perf_counter()
        await asyncio.sleep(LOOK_EVERY_S)
        yield max(0.0, time.perf_counter() - asked - LOOK_EVERY_S)


def percentile_ms(lags_s: Sequence[float], share: float) -> float:
    """[1, 2, ..., 100] ms: 0.99 -> 99, 1.0 -> 100. Without a lag 0."""
    if not lags_s:
        return 0.0
    place = max(0, round(share * len(lags_s)) - 1)
    return 1e3 * sorted(lags_s)[place]
