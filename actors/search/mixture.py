"""In which order several sources are drawn from: by weight, evenly spread, no random numbers."""

from __future__ import annotations

from collections.abc import Sequence


class Mixture:
    """A fixed endless order of sources.

    A source with share p (its weight by all weights) gives its k-th question at time (k + 1/2) / p,
    and all go in the order of their times, the earlier source first where two are equal. So each
    has given its share of any beginning of the order, to within one question for two sources.

        weights 2 and 1: times 0.75, 2.25, 3.75, ... and 1.5, 4.5, ... -> sources 0 1 0 0 1 0 ...
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Weights above 0, one for each source."""
        self._shares = [weight / sum(weights) for weight in weights]

    def at(self, place: int) -> tuple[int, int]:
        """Which source gives the question at `place`, from 0, and the how-manieth of its questions
        that is, from 0. Takes the same short time at every place.
        """
        if len(self._shares) == 1:
            return 0, place
        # Up to a time of place - n, at most place - n / 2 questions of n sources have been given.
        counts = [self._num_before(place - len(self._shares), p) for p in self._shares]
        for _ in range(place - sum(counts)):
            counts[self._next(counts)] += 1
        source = self._next(counts)
        return source, counts[source]

    def _next(self, counts: list[int]) -> int:
        times = [(k + 0.5) / p for k, p in zip(counts, self._shares, strict=True)]
        return times.index(min(times))

    def _num_before(self, time: float, share: float) -> int:
        """Questions of one source with a time below `time`."""
        num = max(0, int(time * share))
        while (num + 0.5) / share < time:
            num += 1
        while num > 0 and (num - 0.5) / share >= time:
            num -= 1
        return num
