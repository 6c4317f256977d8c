"""Means over questions, pass@k, and how far to trust them.

Letters: `Q` questions, `M` scores of a question, `B` resamples.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES: Final = 10_000
CONFIDENCE: Final = 0.95
_CHUNK: Final = 256
"""Resamples counted at once; of 15,000 questions they take 30 MB."""


class Estimate(msgspec.Struct, frozen=True):
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that at least one of k samples is right, when `num_right` of `num_samples` were.

    Without bias: 1 - C(n - c, k) / C(n, k). n 4, c 1, k 2 -> 1 - 3/6 = 0.5; the naive
    1 - (3/4)^2 = 0.4375 is too low.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} of {num_samples} samples")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def resampled_means(values_QM: NDArray[np.float64], seed: Sequence[int]) -> NDArray[np.float64]:
    """[B, M] means over Q questions drawn anew, with replacement, B times.

    A question keeps its scores together, so that means of one resample belong to the same draw.
    """
    num = len(values_QM)
    rng = np.random.default_rng(list(seed))
    means_BM = np.empty((NUM_RESAMPLES, values_QM.shape[1]))
    for start in range(0, NUM_RESAMPLES, _CHUNK):
        size = min(_CHUNK, NUM_RESAMPLES - start)
        drawn = rng.integers(0, num, (size, num))
        counts = np.stack([np.bincount(row, minlength=num) for row in drawn])
        means_BM[start : start + size] = counts @ values_QM / num
    return means_BM


def estimates(means_M: NDArray[np.float64], resampled_BM: NDArray[np.float64]) -> list[Estimate]:
    """Each mean between the percentiles of its resamples (2.5 and 97.5)."""
    tail = (1 - CONFIDENCE) / 2
    low_M, high_M = np.quantile(resampled_BM, (tail, 1 - tail), axis=0)
    return [
        Estimate(round(float(mean), 6), round(float(low), 6), round(float(high), 6))
        for mean, low, high in zip(means_M, low_M, high_M, strict=True)
    ]


class Scored(msgspec.Struct, frozen=True):
    """Scores of one benchmark, with what an average over several needs."""

    names: tuple[str, ...]
    """[M]"""
    means_M: NDArray[np.float64]
    resampled_BM: NDArray[np.float64]

    def estimates(self) -> dict[str, Estimate]:
        """By name."""
        found = estimates(self.means_M, self.resampled_BM)
        return dict(zip(self.names, found, strict=True))


def score(benchmark: str, rows: Sequence[Mapping[str, float]], seed: int) -> Scored:
    """Means and resamples over the rows of one benchmark, all of the same names.

    The name of the benchmark goes into the seed: else two of the same size would be resampled
    alike, and their average would seem less certain than it is.
    """
    names = tuple(rows[0])
    values_QM = np.array([[row[name] for name in names] for row in rows], np.float64)
    resampled_BM = resampled_means(values_QM, (seed, zlib.crc32(benchmark.encode())))
    return Scored(names, values_QM.mean(axis=0), resampled_BM)


def average(scored: Sequence[Scored]) -> dict[str, Estimate]:
    """The plain mean over benchmarks, whatever their sizes, of the scores that all of them have.

    Benchmarks are resampled apart, each within itself.
    """
    names = [name for name in scored[0].names if all(name in one.names for one in scored)]
    means_SM = [[one.means_M[one.names.index(name)] for name in names] for one in scored]
    resampled = [one.resampled_BM[:, [one.names.index(name) for name in names]] for one in scored]
    found = estimates(np.mean(means_SM, axis=0), np.mean(resampled, axis=0))
    return dict(zip(names, found, strict=True))
