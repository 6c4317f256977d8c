"""The tables at the end of a soak."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from rich.console import Console
from rich.table import Table

from leeway.services.soak.judging import (
    BY_DESIGN,
    RULES,
    WITHIN_STEPS,
    Judgement,
    Report,
    as_keys,
    worst_first,
)

WIDTH: Final = 120
"""Of tables that go into a file."""
_STYLES: Final = {"flat": "green", "grows": "bold red", "undecided": "yellow"}
_ALONE: Final = ("own_bytes", "used_bytes")
"""Measures that have a row for each subject, also where they are flat."""
_MEANINGS: Final = {rule.measure: rule.meaning for rule in RULES}


def show(report: Report, *, as_json: bool) -> None:
    """The tables on stdout; with `as_json` they go to stderr, and the JSON line to stdout."""
    target = sys.stderr if as_json else sys.stdout
    console = Console(file=target, highlight=False, width=None if target.isatty() else WIDTH)
    console.print(_judged_table(report))
    console.print(_observed_table(report))
    if report.missing:
        names = ", ".join(_MEANINGS[measure] for measure in report.missing)
        console.print(f"[yellow]not measured, so undecided[/yellow]: {names}", soft_wrap=True)
    if as_json:
        print(json.dumps(as_keys(report)), flush=True)


def _judged_table(report: Report) -> Table:
    title = (
        f"{report.hours:.2f} h after {report.warm_up_minutes:.0f} min of warm-up: "
        f"{report.count('flat')} flat, {report.count('grows')} grow, "
        f"{report.count('undecided')} undecided"
    )
    table = _table(
        title,
        ("what", "of", "verdict"),
        ("median", "growth / h", "at most", "end to end", "allowed", "p"),
    )
    alone = [j for j in report.judged if j.verdict != "flat" or j.measure in _ALONE]
    for found in worst_first(alone):
        slope, unit = found.slope, found.measure
        style = _STYLES[found.verdict]
        table.add_row(
            _MEANINGS[unit],
            found.subject,
            f"[{style}]{found.verdict}[/{style}]",
            *(
                _text(value, unit)
                for value in (
                    slope.middle,
                    slope.per_hour,
                    slope.upper_per_hour,
                    slope.rise_per_hour,
                    found.limit_per_hour,
                )
            ),
            f"{slope.p:.3f}",
        )
    rest = sorted((j for j in report.judged if j not in alone), key=lambda j: j.measure)
    for measure, group in groupby(rest, key=lambda j: j.measure):
        table.add_row(*_flat_row(measure, list(group)))
    return table


def _flat_row(measure: str, flat: Sequence[Judgement]) -> tuple[str, ...]:
    """What is flat, of all subjects together: the sum of medians, the largest of each growth."""
    slopes = [judgement.slope for judgement in flat]
    subjects = flat[0].subject if len(flat) == 1 else f"{len(flat)} parts"
    return (
        _MEANINGS[measure],
        subjects,
        "[green]flat[/green]",
        _text(sum(slope.middle for slope in slopes), measure),
        _text(max(slope.per_hour for slope in slopes), measure),
        _text(max(slope.upper_per_hour for slope in slopes), measure),
        _text(max(slope.rise_per_hour for slope in slopes), measure),
        _text(min(judgement.limit_per_hour for judgement in flat), measure),
        "",
    )


def _observed_table(report: Report) -> Table:
    table = _table("not judged", ("what", "of", "why it may grow"), ("median", "growth / h"))
    for measure, group in groupby(
        sorted(report.observed, key=lambda j: j.measure), key=lambda j: j.measure
    ):
        found = list(group)
        table.add_row(
            measure,
            found[0].subject if len(found) == 1 else f"{len(found)} parts",
            BY_DESIGN.get(measure, WITHIN_STEPS),
            _text(sum(j.slope.middle for j in found), measure),
            _text(sum(j.slope.per_hour for j in found), measure),
        )
    return table


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _text(value: float, measure: str) -> str:
    """12,345,678 of a measure in bytes -> 11.8 MB."""
    return f"{value / 2**20:,.1f} MB" if measure.endswith("_bytes") else f"{value:,.2f}"
