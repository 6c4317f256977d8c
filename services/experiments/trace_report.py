"""What training on a recording came to: trace.json, a page, and a table on the screen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import TextIO

import msgspec

from leeway.services.experiments.sweep_html import fill, listed, table
from leeway.services.experiments.trace_schedule import Bias, Outcome


class TraceResult(msgspec.Struct, frozen=True, kw_only=True):
    """trace.json."""

    archive: str = ""
    objective: str
    policy: str
    """Staleness policy that was trained under."""
    max_staleness: int
    num_groups: int = 0
    """In the archive."""
    step_s: float = 0.0
    """Seconds a step takes on the made-up clock."""
    score_before: float | None
    """Held-out exact match; None where it was not asked for, or the engine is not torch."""
    score_after: float | None
    wall_s: float
    outcomes: list[Outcome] = []
    """The same groups under pace, under drop, and under `policy`."""


def bias_rows(result: TraceResult) -> Iterator[tuple[str, ...]]:
    """By turns, then by length: kind, trajectories, reward, and the share each policy trained."""
    kinds: dict[tuple[str, int], dict[str, Bias]] = {}
    for outcome in result.outcomes:
        for bias in outcome.bias:
            kinds.setdefault((bias.by, bias.value), {})[outcome.policy] = bias
    # Turns come before tokens.
    for (by, value), found in sorted(
        kinds.items(), key=lambda item: (item[0][0] != "turns", item[0])
    ):
        turns = f"{value} turn{'s' if value != 1 else ''}"
        what = turns if by == "turns" else f"≤ {value:,} tokens"
        most = max(found.values(), key=lambda bias: bias.num)
        shares = [
            f"{found[o.policy].kept:.1%}" if o.policy in found else "–" for o in result.outcomes
        ]
        yield (what, f"{most.num:,}", f"{most.reward:.3f}", *shares)


def outcome_rows(result: TraceResult) -> Iterator[tuple[str, ...]]:
    """One for each figure, a column for each policy."""
    shown: list[tuple[str, Callable[[Outcome], str]]] = [
        ("steps", lambda o: str(o.num_steps)),
        ("groups trained", lambda o: str(o.num_trained)),
        ("groups dropped", lambda o: str(o.num_dropped)),
        ("groups left over", lambda o: str(o.num_left)),
        ("staleness, mean", lambda o: _show(o.staleness_mean, 2)),
        ("staleness, largest", lambda o: "–" if o.staleness_max is None else str(o.staleness_max)),
        ("reward of the trained", lambda o: _show(o.reward_trained, 3)),
        ("reward of the dropped", lambda o: _show(o.reward_dropped, 3)),
        ("turns of the trained, mean", lambda o: _show(o.turns_trained, 2)),
        ("tokens of the trained, mean", lambda o: _show(o.tokens_trained, 0)),
    ]
    for name, of in shown:
        yield (name, *(of(outcome) for outcome in result.outcomes))


def outcome_columns(result: TraceResult) -> tuple[str, ...]:
    """Heads of outcome_rows."""
    return ("the same groups", *(f"under {outcome.policy}" for outcome in result.outcomes))


def bias_columns(result: TraceResult) -> tuple[str, ...]:
    """Heads of bias_rows."""
    shares = (f"under {outcome.policy}" for outcome in result.outcomes)
    return ("trajectories of", "number", "mean reward", *shares)


def _show(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def headline(result: TraceResult) -> str:
    """One sentence."""
    score = (
        f"held-out exact match {result.score_before:.3f} -> {result.score_after:.3f}"
        if result.score_before is not None and result.score_after is not None
        else "held-out questions were not played"
    )
    mine = next(o for o in result.outcomes if o.policy == result.policy)
    return (
        f"{result.objective} on {result.archive} under {result.policy}, max_staleness "
        f"{result.max_staleness}: {mine.num_steps} steps, {score}"
    )


def show(result: TraceResult, page: Path, file: TextIO) -> None:
    """The two tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=file)
    console.print(headline(result), highlight=False, soft_wrap=True)
    tables = (
        ("What was trained", outcome_columns(result), outcome_rows(result)),
        (
            "Share that was trained, of what had been played",
            bias_columns(result),
            bias_rows(result),
        ),
    )
    for title, columns, rows in tables:
        shown = Table(*columns, title=title, title_justify="left")
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
    console.print(f"report  {page}", highlight=False, soft_wrap=True)


def write_page(path: Path, result: TraceResult) -> None:
    """trace.html, self-contained."""
    notes = [
        "The groups are played again on a made-up clock: each takes as long as its longest "
        f"trajectory took when it was recorded, and a step takes {result.step_s:.3g} s, which "
        "makes rollouts and learner equally fast.",
        "Staleness is in versions of that clock. The log-probs are those of the recording.",
        "Groups left over at the end, fewer than a step, count as neither trained nor dropped.",
    ]
    body = f"""<header><p class="over">Training on a recording</p>
<h1>{escape(result.archive)}</h1><p>{escape(headline(result))}.</p></header>
<section><h2>The same groups under each policy</h2>
{_table(outcome_columns(result), outcome_rows(result))}</section>
<section><h2>Which trajectories are trained</h2>
<p>Share of the trajectories that a policy trained, of those that had been played. Under pace
nothing is dropped for its age; what drop loses is what takes long.</p>
{_table(bias_columns(result), bias_rows(result))}</section>
<section><h2>How to read this</h2>{listed(notes)}</section>"""
    path.write_text(fill(f"Leeway · {result.archive}", body), encoding="utf-8")


def _table(columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    head, *others = (escape(column) for column in columns)
    heads = f"<tr><th>{head}</th>{''.join(f'<td>{other}</td>' for other in others)}</tr>"
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>{''.join(f'<td>{escape(c)}</td>' for c in row[1:])}</tr>"
        for row in rows
    )
    return table(heads, body)
