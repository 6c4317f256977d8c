"""Two sweeps beside each other: `leeway sweep compare A B`.

Cells are matched by series and by realised staleness: for a cell of A the nearest of B, as far as
the two lie within a tenth, or half a version, of each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import Any

import msgspec

from leeway.services.experiments.sweep_report import Findings
from leeway.services.experiments.sweep_rows import Cell, student_t
from leeway.services.experiments.sweep_verdict import Verdict


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One series at one staleness in both sweeps."""

    series: str
    staleness_a: float
    """Realised."""
    staleness_b: float
    score_a: float
    score_b: float
    difference: float
    """B less A."""
    half_width: float | None
    """Of the 95 % interval of the difference (Welch); None below two seeds on either side."""
    is_clear: bool
    """The interval leaves 0 out."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    a: str
    b: str
    settings: dict[str, tuple[Any, Any]]
    """What was asked for differently, by key."""
    pairs: list[Pair]
    kept: dict[str, tuple[float | None, float | None]]
    """Largest staleness that keeps the on-policy score, by series, in A and in B."""
    only_a: list[str]
    """Series without a counterpart."""
    only_b: list[str]


def compare(a: Findings, b: Findings) -> Comparison:
    """Every pair that the two have in common."""
    series_a, series_b = _series(a), _series(b)
    pairs = [
        pair
        for cell in a.cells
        if (other := _nearest(cell, b.cells)) is not None
        and (pair := _pair(cell, other)) is not None
    ]
    keys = [key for key in a.plan if key != "name" and a.plan[key] != b.plan.get(key)]
    return Comparison(
        a=a.name,
        b=b.name,
        settings={key: (a.plan[key], b.plan.get(key)) for key in keys},
        pairs=pairs,
        kept={
            name: (_kept(a.verdicts, name), _kept(b.verdicts, name))
            for name in series_a
            if name in series_b
        },
        only_a=[name for name in series_a if name not in series_b],
        only_b=[name for name in series_b if name not in series_a],
    )


def _series(found: Findings) -> list[str]:
    return [verdict.series for verdict in found.verdicts]


def _kept(verdicts: Sequence[Verdict], name: str) -> float | None:
    return next((v.kept_staleness for v in verdicts if v.series == name), None)


def _nearest(cell: Cell, others: Sequence[Cell]) -> Cell | None:
    if cell.staleness is None:
        return None
    lag = cell.staleness
    found = [
        (abs(other.staleness - lag), other)
        for other in others
        if other.series == cell.series and other.staleness is not None
    ]
    if not found:
        return None
    distance, nearest = min(found, key=lambda pair: pair[0])
    return nearest if distance <= max(0.5, 0.1 * lag) else None


def _pair(a: Cell, b: Cell) -> Pair | None:
    if not a.scores or not b.scores or a.staleness is None or b.staleness is None:
        return None
    difference = fmean(b.scores) - fmean(a.scores)
    half = half_width(a.scores, b.scores)
    return Pair(
        series=a.series,
        staleness_a=a.staleness,
        staleness_b=b.staleness,
        score_a=fmean(a.scores),
        score_b=fmean(b.scores),
        difference=difference,
        half_width=half,
        is_clear=half is not None and abs(difference) > half,
    )


def half_width(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Of the difference of two means, with Welch's degrees of freedom rounded down.

    Two seeds each with variances 0.0002 and 0.0002: error 0.01414, freedom 2 -> 4.303 * 0.01414.
    """
    if len(a) < 2 or len(b) < 2:
        return None
    of_a, of_b = variance(a) / len(a), variance(b) / len(b)
    error = math.sqrt(of_a + of_b)
    if error == 0:
        return 0.0
    freedom = (of_a + of_b) ** 2 / (of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1))
    whole = max(1, int(freedom + 1e-9))
    return student_t(whole) * error
