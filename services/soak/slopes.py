"""Whether a figure grows: Theil-Sen slope, its interval, and the test of Mann and Kendall.

The median of all slopes between two points is not moved by single peaks, such as a checkpoint's.
Samples that follow each other closely are alike, which would make any test too sure, so a series is
cut into blocks of equal length first, and the medians of the blocks are the points.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

NUM_BLOCKS: Final = 30
MIN_BLOCKS: Final = 8
"""Below, no verdict: eight points rise throughout by chance once in 40,320 times, four in 24."""
Z_95: Final = 1.645
"""One-sided 95 % bound of a normal distribution."""
P_GROWS: Final = 0.01

Verdict = Literal["flat", "grows", "undecided"]


class Slope(NamedTuple):
    """Growth of a series, in its unit per hour."""

    per_hour: float
    """Median of the slopes between every two blocks."""
    upper_per_hour: float
    """One-sided 95 % bound: the true slope is below with that confidence."""
    p: float
    """Chance of a rise as steady as this one in a series without any."""
    middle: float
    """Median of the values."""
    rise_per_hour: float
    """From the median of the first fifth to that of the last: a jump, which the median of slopes
    overlooks as it does a peak, stays in it."""


def block_medians(
    seconds: Sequence[float], values: Sequence[float], num_blocks: int = NUM_BLOCKS
) -> tuple[list[float], list[float]]:
    """Median times and values of so many runs of equal length: [1, 5, 2, 8] in two -> [3, 5]."""
    size = len(values) / num_blocks
    if size < 1:
        return list(seconds), list(values)
    edges = [round(n * size) for n in range(num_blocks + 1)]
    pairs = list(itertools.pairwise(edges))
    times = [statistics.median(seconds[a:b]) for a, b in pairs]
    return times, [statistics.median(values[a:b]) for a, b in pairs]


def slope_of(seconds: Sequence[float], values: Sequence[float]) -> Slope | None:
    """None with fewer than MIN_BLOCKS points."""
    times, points = block_medians(seconds, values)
    num = len(points)
    if num < MIN_BLOCKS:
        return None
    pairs = [(i, j) for i in range(num) for j in range(i + 1, num) if times[j] > times[i]]
    slopes = sorted((points[j] - points[i]) / (times[j] - times[i]) * 3600 for i, j in pairs)
    deviation = _deviation_of_score(points)
    # Sen's interval: the score's own spread says which of the ordered slopes bounds the median.
    rank = min(len(slopes) - 1, math.ceil((len(slopes) + Z_95 * deviation) / 2))
    score = sum(_sign(points[j] - points[i]) for i, j in pairs)
    return Slope(
        per_hour=statistics.median(slopes),
        upper_per_hour=slopes[rank],
        p=_tail(score, deviation),
        middle=statistics.median(values),
        rise_per_hour=_rise(times, points),
    )


def verdict_of(slope: Slope, limit_per_hour: float) -> Verdict:
    """Flat: below the limit with 95 % confidence, and no jump. Grows: above it, and steadily."""
    if max(slope.upper_per_hour, slope.rise_per_hour) <= limit_per_hour:
        return "flat"
    if slope.per_hour > limit_per_hour and slope.p < P_GROWS:
        return "grows"
    return "undecided"


def _rise(times: Sequence[float], points: Sequence[float]) -> float:
    """[1, 1, 1, 1, 3] over four hours -> 0.5."""
    fifth = max(1, len(points) // 5)
    (start, end), (low, high) = (
        (statistics.median(of[:fifth]), statistics.median(of[-fifth:])) for of in (times, points)
    )
    return (high - low) / (end - start) * 3600


def _sign(difference: float) -> int:
    return (difference > 0) - (difference < 0)


def _deviation_of_score(points: Sequence[float]) -> float:
    """Standard deviation of the number of rises less that of falls; equal points shrink it."""
    num = len(points)
    counts = [points.count(value) for value in set(points)]
    ties = sum(t * (t - 1) * (2 * t + 5) for t in counts)
    return math.sqrt((num * (num - 1) * (2 * num + 5) - ties) / 18)


def _tail(score: int, deviation: float) -> float:
    """Chance of at least this score, by the normal approximation with continuity correction."""
    if deviation == 0:
        return 1.0
    return 0.5 * math.erfc((score - 1) / deviation / math.sqrt(2))
