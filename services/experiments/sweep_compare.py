"""Two sweeps beside each other: `leeway sweep compare A B`.

Series are matched by what they are: the objective, and the value of every key that one of the two
sweeps varies, be it written there, set for every arm, or what the preset has. The learning rate is
no part of it, as it may come from a scan; of several counterparts those at the same rate count.

    A: so-grpo (rate of the scan)    B: so-grpo · ratio turn · learning_rate 5e-5       the same
                                     B: so-grpo · ratio turn-arithmetic                 another

Cells are matched by realised staleness: for a cell of A the nearest of B, as far as the two lie
within a tenth, or half a version, of each other.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any

import msgspec

from leeway.learner.objective.presets import PRESETS
from leeway.replay.errors import ConfigurationError
from leeway.services.config import RunConfig
from leeway.services.config_text import flatten
from leeway.services.experiments.arm_result import ArmResult, ArmSpec
from leeway.services.experiments.sweep_arms import RATE, keys_of, series_label
from leeway.services.experiments.sweep_report import Findings
from leeway.services.experiments.sweep_rows import Cell, student_t
from leeway.services.experiments.sweep_run import rate_of


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One series at one staleness in both sweeps."""

    series_a: str
    series_b: str
    learning_rate_a: float
    learning_rate_b: float
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
    """Largest staleness that keeps the on-policy score in A and in B, by series; where the two
    write it otherwise, "its name in A | its name in B"."""
    only_a: list[str]
    """Series without a counterpart."""
    only_b: list[str]


@dataclass(frozen=True)
class _Series:
    name: str
    objective: str
    settings: Mapping[str, Any]
    """Value of every key by which series are told apart."""
    rate: float
    kept: float | None
    cells: Sequence[Cell]


def compare(a: Findings, b: Findings, across: Collection[str] = ()) -> Comparison:
    """Every pair that the two have in common. `across`: axes that may differ within a pair.

    Raises ConfigurationError for one of them that neither sweep varies.
    """
    keys = _told_apart_by(a, b, across)
    series_a, series_b = _series(a, keys), _series(b, keys)
    matched = [(one, other) for one in series_a for other in _counterparts(one, series_b)]
    found_a, found_b = {one.name for one, _ in matched}, {other.name for _, other in matched}
    asked = [key for key in a.plan if key != "name" and a.plan[key] != b.plan.get(key)]
    return Comparison(
        a=a.name,
        b=b.name,
        settings={key: (a.plan[key], b.plan.get(key)) for key in asked},
        pairs=[pair for one, other in matched for pair in _pairs(one, other)],
        kept={label(one.name, other.name): (one.kept, other.kept) for one, other in matched},
        only_a=[one.name for one in series_a if one.name not in found_a],
        only_b=[other.name for other in series_b if other.name not in found_b],
    )


def label(a: str, b: str) -> str:
    """grpo, or grpo | grpo · learning_rate 0.0001"""
    return a if a == b else f"{a} | {b}"


def _told_apart_by(a: Findings, b: Findings, across: Collection[str]) -> set[str]:
    specs = [result.spec for found in (a, b) for result in found.results]
    varied = {(key, axis) for spec in specs for axis in spec.variant for key in _keys(spec, axis)}
    axes = {axis for _, axis in varied}
    for axis in across:
        if all(axis not in one for one in varied):
            raise ConfigurationError(
                f"--across {axis}: neither {a.name} nor {b.name} varies it; they vary "
                f"{', '.join(sorted(axes)) or 'nothing else'}"
            )
    # One sweep may write eps, and the other the two keys it stands for.
    left_out = {key for key, axis in varied if {key, axis} & {RATE, *across}}
    return {key for key, _ in varied} - left_out


def _keys(spec: ArmSpec, axis: str) -> Collection[str]:
    return keys_of(axis, spec.variant[axis])


def _series(found: Findings, keys: Collection[str]) -> list[_Series]:
    first: dict[str, ArmResult] = {}
    for result in found.results:
        first.setdefault(series_label(result.spec.objective, result.spec.variant), result)
    return [
        _Series(
            name=verdict.series,
            objective=first[verdict.series].spec.objective,
            settings=_settings(first[verdict.series].spec, keys),
            rate=rate_of(first[verdict.series]),
            kept=verdict.kept_staleness,
            cells=[cell for cell in found.cells if cell.series == verdict.series],
        )
        for verdict in found.verdicts
    ]


def _settings(spec: ArmSpec, keys: Collection[str]) -> dict[str, Any]:
    """What the arm was told, else the preset's, else the default: what a base says of a key that it
    was not told is not in the folder."""
    told = {key: _value(text) for key, _, text in (o.partition("=") for o in spec.overrides)}
    default = dict(flatten(RunConfig().model_dump(mode="json")))
    preset = PRESETS.get(spec.objective)
    own = {key: getattr(preset, key.removeprefix("learner."), default.get(key)) for key in keys}
    return {key: told.get(key, own[key]) for key in keys}


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:  # --set takes text without quotes
        return text


def _counterparts(one: _Series, others: Sequence[_Series]) -> list[_Series]:
    same = [o for o in others if (o.objective, o.settings) == (one.objective, one.settings)]
    return [other for other in same if other.rate == one.rate] or same


def _pairs(one: _Series, other: _Series) -> list[Pair]:
    nearest = [(cell, _nearest(cell, other.cells)) for cell in one.cells]
    pairs = [_pair(one, cell, other, near) for cell, near in nearest if near is not None]
    return [pair for pair in pairs if pair is not None]


def _nearest(cell: Cell, others: Sequence[Cell]) -> Cell | None:
    if cell.staleness is None:
        return None
    lag = cell.staleness
    found = [(abs(o.staleness - lag), o) for o in others if o.staleness is not None]
    if not found:
        return None
    distance, nearest = min(found, key=lambda pair: pair[0])
    return nearest if distance <= max(0.5, 0.1 * lag) else None


def _pair(of_a: _Series, a: Cell, of_b: _Series, b: Cell) -> Pair | None:
    if not a.scores or not b.scores or a.staleness is None or b.staleness is None:
        return None
    difference = fmean(b.scores) - fmean(a.scores)
    half = half_width(a.scores, b.scores)
    return Pair(
        series_a=of_a.name,
        series_b=of_b.name,
        learning_rate_a=of_a.rate,
        learning_rate_b=of_b.rate,
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
