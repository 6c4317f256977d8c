"""What staleness costs in steps: when a run first scores what its objective keeps.

Final scores of runs that all come to learn the task tell little: staleness shows in how long they
take. The measure is the same score as the verdict's, so a series that keeps it late is told apart
from one that keeps it at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from leeway.services.experiments.arm_result import ArmResult
from leeway.services.experiments.sweep_rows import Found, Row, realised, row_of
from leeway.services.experiments.sweep_verdict import Verdict


class Delay(Found):
    """The seeds of one series at one staleness."""

    series: str
    staleness: float
    """Realised, mean over seeds."""
    threshold: float
    """The held-out score that counts: the kept share of the series' on-policy score."""
    step: float | None
    """Of the first evaluation at that score or above, median over the runs that had one; None where
    none had."""
    num_reached: int
    num_runs: int
    last_step: int
    """The last evaluation of the run that was evaluated longest."""


def delays_of(
    results: Sequence[ArmResult], verdicts: Sequence[Verdict], retention: float
) -> list[Delay]:
    """In the order of the results. A series without an on-policy score, and an arm that failed, is
    left out."""
    thresholds = {v.series: retention * v.on_policy for v in verdicts if v.on_policy is not None}
    found: dict[tuple[str, int], list[tuple[Row, ArmResult]]] = {}
    for result in results:
        row = row_of(result)
        if row.series in thresholds and row.status != "failed" and realised(result) is not None:
            found.setdefault((row.series, row.staleness_set), []).append((row, result))
    return [_delay(thresholds[name], runs) for (name, _), runs in found.items()]


def first_step(result: ArmResult, threshold: float) -> int | None:
    """Scores 0.3, 0.7, 0.9 at steps 0, 2, 4: 2 for 0.7, None for 0.95."""
    return next((one.step for one in result.evaluations if one.score >= threshold), None)


def _delay(threshold: float, runs: list[tuple[Row, ArmResult]]) -> Delay:
    steps = [first_step(result, threshold) for _, result in runs]
    reached = [step for step in steps if step is not None]
    return Delay(
        series=runs[0][0].series,
        staleness=fmean(row.staleness for row, _ in runs if row.staleness is not None),
        threshold=threshold,
        step=median(reached) if reached else None,
        num_reached=len(reached),
        num_runs=len(runs),
        last_step=max(one.step for _, result in runs for one in result.evaluations),
    )
