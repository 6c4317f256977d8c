"""A histogram that outlives its process: small enough for a section of the run board.

Workers and learner observe, the board keeps, and the API exposes it to Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, Self

import msgspec


class Histogram(msgspec.Struct, kw_only=True):
    """Counts of values by upper bound.

    Bounds (1, 5), values 1, 2, 7: counts [1, 1, 1], sum 10; the last count is of what is larger.
    """

    bounds: tuple[float, ...]
    """Upper bounds, inclusive, ascending; one more bucket takes the rest."""
    counts: list[int] = []
    """One more than bounds; a value is in exactly one."""
    sum: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    @classmethod
    def restored(cls, bounds: tuple[float, ...], saved: Mapping[str, Any] | None) -> Self:
        """The saved one, to be counted on; an empty one where there is none, or its bounds are
        those of another release."""
        if not saved or tuple(saved["bounds"]) != bounds:
            return cls(bounds=bounds)
        return cls(bounds=bounds, counts=list(saved["counts"]), sum=float(saved["sum"]))

    @property
    def num(self) -> int:
        """Values observed."""
        return sum(self.counts)

    def observe(self, value: float, num: int = 1) -> None:
        """Count `value`, `num` times."""
        self.counts[bisect_left(self.bounds, value)] += num
        self.sum += value * num

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values at most so large) as Prometheus wants them, +Inf last.

        Bounds (1, 5), values 1, 2, 7: [("1.0", 1), ("5.0", 2), ("+Inf", 3)].
        """
        total, buckets = 0, list[tuple[str, float]]()
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append((str(float(bound)) if bound != float("inf") else "+Inf", total))
        return buckets
