"""From what the arms left to numbers: a row for each arm, a cell for each series at a staleness.

A series is everything that differs by staleness and seed only. Staleness is the realised one
everywhere here; how it was set serves to tell which arms are seeds of each other, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from statistics import fmean, median, stdev
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from leeway.services.experiments.arm_result import ArmResult, Status
from leeway.services.experiments.sweep_arms import series_label
from leeway.services.experiments.sweep_run import rate_of

SPIKE: Final = 5.0
"""A spike is a step whose gradient norm, before it is bounded, is above this many times the median
of its arm."""

_T_975: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""For 1 to 10 degrees of freedom. Beyond, 1.96 is too small by a tenth at most; sweeps have few
seeds."""


class Found(BaseModel):
    """Base of what a sweep has found. REST hands it out as it is, and docstrings become
    descriptions there."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Row(Found):
    """One arm. Means are over its optimizer steps; None where it has none."""

    arm: str
    series: str
    objective: str
    variant: dict[str, Any]
    """What the grid varied beside objective, staleness and seed."""
    seed: int
    learning_rate: float
    is_scan: bool
    """It ran for the scan of learning rates."""
    status: Status
    reason: str | None
    staleness_set: int
    staleness: float | None
    """Realised: mean over trained trajectories of the steps behind the ramp, in policy versions."""
    staleness_max: float | None
    score: float | None
    """Held-out exact match of the last evaluation; None for a failed arm."""
    score_before: float | None
    score_best: float | None
    collapse_step: int | None
    steps: int
    num_ramp_steps: int
    """Under exact, steps before the first that trained at the staleness that was set. They train on
    what the first version sampled."""
    wall_s: float
    clip_fraction_tokens: float | None
    clip_fraction_turns: float | None
    ctn_norm: float | None
    """||C||."""
    ctn_norm_max: float | None
    num_rescaled: int
    """Steps that clipping-triggered normalization changed."""
    grad_norm: float | None
    num_spikes: int
    effective_sample_size: float | None
    kl: float | None
    """KL (k3) to the policies that sampled; in nats."""
    kl_max: float | None
    entropy: float | None
    entropy_last: float | None
    think_tokens: float | None
    """Length of the reasoning text of a trajectory, in tokens."""
    think_tokens_last: float | None


def row_of(result: ArmResult) -> Row:
    """The row of an arm."""
    spec, curves = result.spec, result.curves
    scores = [one.score for one in result.evaluations]
    is_scored = result.status != "failed" and bool(scores)
    norms = _values(curves, "grad_norm")
    return Row(
        arm=spec.name,
        series=series_label(spec.objective, spec.variant),
        objective=spec.objective,
        variant=spec.variant,
        seed=spec.seed,
        learning_rate=rate_of(result),
        is_scan=spec.is_scan,
        status=result.status,
        reason=result.reason,
        staleness_set=spec.staleness,
        staleness=realised(result),
        staleness_max=max(_values(curves, "staleness_max"), default=None),
        score=scores[-1] if is_scored else None,
        score_before=scores[0] if scores else None,
        score_best=max(scores) if scores else None,
        collapse_step=result.collapse_step,
        steps=len(curves.get("step", [])),
        num_ramp_steps=_num_ramp_steps(result),
        wall_s=result.wall_s,
        clip_fraction_tokens=_mean(curves, "clip_fraction_tokens"),
        clip_fraction_turns=_mean(curves, "clip_fraction_turns"),
        ctn_norm=_mean(curves, "ctn_norm"),
        ctn_norm_max=max(_values(curves, "ctn_norm"), default=None),
        num_rescaled=sum(value != 1 for value in _values(curves, "ctn_divisor")),
        grad_norm=_mean(curves, "grad_norm"),
        num_spikes=sum(norm > SPIKE * median(norms) for norm in norms),
        effective_sample_size=_mean(curves, "effective_sample_size"),
        kl=_mean(curves, "kl_behaviour"),
        kl_max=max(_values(curves, "kl_behaviour"), default=None),
        entropy=_mean(curves, "entropy"),
        entropy_last=_last(curves, "entropy"),
        think_tokens=_mean(curves, "score/think_tokens"),
        think_tokens_last=_last(curves, "score/think_tokens"),
    )


def realised(result: ArmResult) -> float | None:
    """Mean staleness of what was trained, each step by its trajectories.

    Under exact the ramp is left out: it ends at the first step that reaches the largest staleness.
    Steps 0, 1, 2, 2, 2 -> 2. A run that ended within the ramp has no such step, and counts whole.
    """
    means = _values(result.curves, "staleness_mean")
    weights = _values(result.curves, "num_trajectories") or [1.0] * len(means)
    if not means or len(weights) != len(means):
        return None
    pairs = list(zip(means, weights, strict=True))
    behind = pairs[_num_ramp_steps(result) :] or pairs
    return sum(mean * weight for mean, weight in behind) / sum(weight for _, weight in behind)


def _num_ramp_steps(result: ArmResult) -> int:
    if result.spec.mode != "exact":
        return 0
    tops = _values(result.curves, "staleness_max")
    staleness = result.spec.staleness
    return next((n for n, top in enumerate(tops) if top >= staleness), len(tops))


def _values(curves: dict[str, list[float | None]], name: str) -> list[float]:
    return [value for value in curves.get(name, []) if value is not None]


def _mean(curves: dict[str, list[float | None]], name: str) -> float | None:
    values = _values(curves, name)
    return fmean(values) if values else None


def _last(curves: dict[str, list[float | None]], name: str) -> float | None:
    values = _values(curves, name)
    return values[-1] if values else None


class Cell(Found):
    """The seeds of one series at one staleness."""

    series: str
    staleness_set: int
    staleness: float | None
    """Realised, mean over seeds; None where every arm failed before its first step."""
    scores: list[float]
    """Of arms that ended, collapsed ones included, by seed."""
    mean: float | None
    low: float | None
    high: float | None
    """95 % confidence interval of the mean over seeds, by Student's t; None below two seeds."""
    best: float | None
    """Mean over these arms of the best evaluation of each."""
    num_arms: int
    num_failed: int
    num_collapsed: int
    ramp_share: float
    """Largest share of an arm's steps that train on what the first version sampled."""

    @property
    def is_incomplete(self) -> bool:
        return self.num_failed > 0


def student_t(freedom: int) -> float:
    """97.5 % quantile. 2 -> 4.303"""
    return _T_975[freedom - 1] if freedom <= len(_T_975) else 1.96


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Of the mean. [0.8, 0.9, 1.0] -> 0.9 +- 4.303 * 0.1 / sqrt(3) = 0.652 to 1.148."""
    if len(values) < 2:
        return None
    half = student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def cells_of(rows: Iterable[Row]) -> list[Cell]:
    """By series in order of appearance, then by staleness."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row.series, row.staleness_set), []).append(row)
    order = {name: n for n, name in enumerate(dict.fromkeys(key[0] for key in found))}
    keys = sorted(found, key=lambda key: (order[key[0]], key[1]))
    return [_cell(*key, found[key]) for key in keys]


def _cell(series: str, staleness_set: int, rows: list[Row]) -> Cell:
    rows = sorted(rows, key=lambda row: row.seed)
    scores = [row.score for row in rows if row.score is not None]
    best = [row.score_best for row in rows if row.score is not None and row.score_best is not None]
    lags = [row.staleness for row in rows if row.staleness is not None]
    bounds = interval(scores)
    return Cell(
        series=series,
        staleness_set=staleness_set,
        staleness=fmean(lags) if lags else None,
        scores=scores,
        mean=fmean(scores) if scores else None,
        low=None if bounds is None else bounds[0],
        high=None if bounds is None else bounds[1],
        best=fmean(best) if best else None,
        num_arms=len(rows),
        num_failed=sum(row.status == "failed" for row in rows),
        num_collapsed=sum(row.status == "collapsed" for row in rows),
        ramp_share=max(row.num_ramp_steps / max(1, row.steps) for row in rows),
    )


def select_grid(results: Iterable[ArmResult], names: Collection[str]) -> list[ArmResult]:
    """Those of the grid's arms, by the names that were written when the scan was done.

    What the scan alone ran is none of them, nor what ran at a rate that a later scan replaced. An
    arm of the scan that is one of the grid's too is there once.
    """
    return [result for result in results if result.spec.name in names]


def select_current(results: Iterable[ArmResult], names: Collection[str]) -> list[ArmResult]:
    """Those of the grid's arms and of the scan: without rates that a later scan replaced."""
    return [result for result in results if result.spec.is_scan or result.spec.name in names]
