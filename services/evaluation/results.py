"""From the episodes of an evaluation to its numbers: `results.json`, and a table for people.

The numbers follow from the settings and the episodes alone: one that was stopped and went on has
the results of one that was not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leeway.replay.errors import LeewayError
from leeway.services.evaluation.benchmarks import AVERAGED
from leeway.services.evaluation.journal import Entry, read_last
from leeway.services.evaluation.scores import is_right, score_names
from leeway.services.evaluation.settings import EPISODES_FILE, FORMAT, RESULTS_FILE, Settings
from leeway.services.evaluation.statistics import Estimate, Scored, average, pass_at_k, score

_MEANS: Final = {
    "num_searches": "searches",
    "num_turns": "turns",
    "num_invalid": "malformed",
    "retrieved_answer": "retrieved",
}
"""Means over the episodes that were played, where the environment has them, and their titles."""


class BenchmarkResult(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark."""

    num_questions: int
    num_errors: int
    """Questions that could not be played; each counts as wrong in every score."""
    errors: dict[str, int]
    """The same by reason."""
    scores: dict[str, Estimate]
    """exact_match, f1, substring or accuracy, and pass@k: means over all questions, 0 to 1."""
    means: dict[str, float]
    """num_searches and so on: means over the episodes that were played."""
    stop_reasons: dict[str, int]
    """Episodes by what ended them."""


class Average(msgspec.Struct, frozen=True, kw_only=True):
    """The plain mean over benchmarks."""

    benchmarks: tuple[str, ...]
    is_complete: bool
    """It is over the seven of the field."""
    scores: dict[str, Estimate]


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """`results.json`."""

    format: int = FORMAT
    leeway: str
    """Version of the program."""
    settings: Settings
    benchmarks: dict[str, BenchmarkResult]
    average: Average | None
    """Over those of the seven that were played; None without one."""


def summarise(folder: Path, settings: Settings, pass_k: Sequence[int], seed: int) -> Results:
    """The numbers of everything that was played."""
    by_benchmark: dict[str, list[Entry]] = {name: [] for name in settings.benchmarks}
    for entry in read_last(folder / EPISODES_FILE):
        without_tokens = msgspec.structs.replace(entry, group=None)
        by_benchmark[entry.benchmark].append(without_tokens)
    scored: dict[str, Scored] = {}
    benchmarks: dict[str, BenchmarkResult] = {}
    for name, found in by_benchmark.items():
        # Not in the order in which they happened to end, which the resampling would depend on.
        found.sort(key=lambda entry: entry.question.id)
        scored[name] = score(name, list(_rows(found, settings.num_samples, pass_k)), seed)
        benchmarks[name] = _result(found, scored[name])
    averaged = tuple(name for name in AVERAGED if name in scored)
    return Results(
        leeway=version("leeway-rl"),
        settings=settings,
        benchmarks=benchmarks,
        average=Average(
            benchmarks=averaged,
            is_complete=averaged == AVERAGED,
            scores=average([scored[name] for name in averaged]),
        )
        if averaged
        else None,
    )


def _rows(
    entries: Sequence[Entry], num_samples: int, pass_k: Sequence[int]
) -> Iterator[dict[str, float]]:
    """The scores of each question: means over its samples, 0 for one that could not be played."""
    scores = [sample.scores for entry in entries for sample in entry.samples]
    names = score_names(scores, any(entry.question.choices for entry in entries))
    for entry in entries:
        samples = [_named(sample.scores, names) for sample in entry.samples]
        row = {name: fmean(s[name] for s in samples) if samples else 0.0 for name in names}
        num_right = sum(is_right(sample.scores) for sample in entry.samples)
        yield row | {f"pass@{k}": pass_at_k(num_samples, num_right, k) for k in pass_k}


def _named(scores: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Of a benchmark with and without choices, an open question's accuracy is its exact match."""
    return {name: scores.get(name, scores.get("exact_match", 0.0)) for name in names}


def _result(entries: Sequence[Entry], scored: Scored) -> BenchmarkResult:
    samples = [sample for entry in entries for sample in entry.samples]
    errors = Counter(entry.reason or "failure" for entry in entries if not entry.samples)
    means = {
        name: round(fmean(sample.scores[name] for sample in samples), 6)
        for name in _MEANS
        if samples and all(name in sample.scores for sample in samples)
    }
    return BenchmarkResult(
        num_questions=len(entries),
        num_errors=sum(errors.values()),
        errors=dict(sorted(errors.items())),
        scores=scored.estimates(),
        means=means,
        stop_reasons=dict(sorted(Counter(sample.stop_reason for sample in samples).items())),
    )


def write_results(folder: Path, results: Results) -> None:
    """Write results.json, whole or not at all."""
    partial = folder / f".{RESULTS_FILE}.partial"
    try:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
        partial.replace(folder / RESULTS_FILE)
    except OSError as error:
        raise LeewayError(
            f"{folder / RESULTS_FILE} cannot be written: {error.strerror or error}"
        ) from None


# --- for people ---------------------------------------------------------------------------------

_TITLES: Final = {"exact_match": "exact match", "f1": "F1", "substring": "sub-string"}
_ORDER: Final = ("exact_match", "f1", "substring", "accuracy", "reward")
_WORDS: Final = ("benchmark", "ended by")
"""Columns that hold words; numbers stand to the right."""
Rows = list[list[str]]


def show(results: Results, console: Console) -> None:
    """Two tables: scores, and how episodes went. Columns that nothing fills are left out."""
    between = "\n" if console.is_terminal else " "
    _print(console, *_score_table(results, between), average=results.average is not None)
    console.print(Text("in brackets: 95 % of resamples of the questions", style="dim"))
    console.print()
    _print(console, *_episode_table(results), average=False)
    for name, one in results.benchmarks.items():
        if one.errors:
            words = (
                f"{name}: {one.num_errors:,} not played ({_counts(one.errors)}), counted as wrong"
            )
            console.print(Text(words), soft_wrap=True)


def _score_table(results: Results, between: str) -> tuple[list[str], Rows]:
    found = dict.fromkeys(n for one in results.benchmarks.values() for n in one.scores)
    names = [name for name in _ORDER if name in found]
    names += [name for name in found if name not in _ORDER]
    rows = [
        [name, f"{one.num_questions:,}", *(_cell(one.scores.get(n), between) for n in names)]
        for name, one in results.benchmarks.items()
    ]
    if results.average is not None:
        average = results.average
        of = "the seven" if average.is_complete else f"{len(average.benchmarks)} of the seven"
        cells = (_cell(average.scores.get(name), between) for name in names)
        rows.append([f"average of{between}{of}", "", *cells])
    return ["benchmark", "questions", *(_TITLES.get(name, name) for name in names)], rows


def _episode_table(results: Results) -> tuple[list[str], Rows]:
    names = [n for n in _MEANS if any(n in one.means for one in results.benchmarks.values())]
    rows = [
        [
            name,
            *(f"{one.means[n]:.2f}" if n in one.means else "" for n in names),
            f"{one.num_errors:,}",
            _counts(one.stop_reasons),
        ]
        for name, one in results.benchmarks.items()
    ]
    return ["benchmark", *(_MEANS[name] for name in names), "errors", "ended by"], rows


def _counts(counts: Mapping[str, int]) -> str:
    """answer 95, invalid 5"""
    return ", ".join(f"{reason} {number:,}" for reason, number in counts.items())


def _cell(estimate: Estimate | None, between: str) -> str:
    """0.312 [.298 .327], or 0.990 [.970 1.00]: four characters for each bound."""
    if estimate is None:
        return ""
    low, high = (f"{v:.3f}".removeprefix("0")[:4] for v in (estimate.low, estimate.high))
    return f"{estimate.mean:.3f}{between}[{low} {high}]"


def _print(console: Console, header: Sequence[str], rows: Rows, *, average: bool) -> None:
    if console.is_terminal:
        console.print(_rich_table(header, rows, average))
    else:
        console.print(Text(_plain_table(header, rows)), soft_wrap=True)


def _rich_table(header: Sequence[str], rows: Rows, average: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in header:
        is_word = name in _WORDS
        table.add_column(name, justify="left" if is_word else "right", no_wrap=name != "ended by")
    for number, row in enumerate(rows):
        is_average = average and number == len(rows) - 1
        if is_average:
            table.add_section()
        table.add_row(*map(Text, row), style="bold" if is_average else None)
    return table


def _plain_table(header: Sequence[str], rows: Rows) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if name in _WORDS else cell.rjust(width)
            for cell, width, name in zip(row, widths, header, strict=True)
        ).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join(lines)
