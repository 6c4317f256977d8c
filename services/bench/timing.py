"""Two ways to do the same work, timed in turns so that other load falls on both."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median


def interleaved(
    ours: Callable[[], object], baseline: Callable[[], object], repeats: int
) -> tuple[float, float]:
    """Median seconds of each over `repeats` turns, after one of each that is not counted."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for side, work in zip(seconds, (ours, baseline), strict=True):
            _synchronize()
            started = time.perf_counter()
            work()
            _synchronize()
            if turn:
                side.append(time.perf_counter() - started)
    return median(seconds[0]), median(seconds[1])


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
