"""What a sweep says: the largest staleness a series bears, and one sentence for each."""

from __future__ import annotations

from collections.abc import Sequence

from leeway.services.experiments.sweep_rows import Cell, Found

ON_POLICY = 0.5
"""A cell whose realised staleness is below this many versions counts as on-policy."""

LONG_RAMP = 0.5
"""Share of steps within the ramp above which a low score may be that of a run that is not through.
"""


class Verdict(Found):
    """Of one series."""

    series: str
    on_policy: float | None
    """Mean score without staleness; None where no such arm ended."""
    kept_staleness: float | None
    """Largest realised staleness, with all smaller ones, at which the mean score is at least
    `retention` of that; None where there is no on-policy score."""
    kept_score: float | None
    lost_staleness: float | None
    """The next larger one that was tried, where less is kept; None where everything was kept."""
    lost_score: float | None
    num_seeds: int
    """Fewest scores in the cells this rests on."""
    num_failed: int
    num_collapsed: int
    sentence: str


def verdicts(cells: Sequence[Cell], retention: float) -> list[Verdict]:
    """One for each series, in order."""
    names = dict.fromkeys(cell.series for cell in cells)
    return [_verdict([c for c in cells if c.series == name], retention) for name in names]


def _verdict(cells: list[Cell], retention: float) -> Verdict:
    name = cells[0].series
    found = _measured(cells)
    counts = {
        "num_failed": sum(cell.num_failed for cell in cells),
        "num_collapsed": sum(cell.num_collapsed for cell in cells),
    }
    if not found or found[0][0] >= ON_POLICY:
        return Verdict(
            series=name, on_policy=None, kept_staleness=None, kept_score=None,
            lost_staleness=None, lost_score=None, num_seeds=0, **counts,
            sentence=f"{name} has no on-policy score to compare with" + _alone(found)
            + _remarks(counts, min((len(one[2].scores) for one in found), default=0)) + ".",
        )  # fmt: skip
    on_policy = found[0][1]
    kept, lost = found[0], None
    for one in found:
        if one[1] < retention * on_policy:
            lost = one
            break
        kept = one
    used = found[: found.index(kept) + (2 if lost else 1)]
    num_seeds = min(len(one[2].scores) for one in used)
    return Verdict(
        series=name, on_policy=on_policy, kept_staleness=kept[0], kept_score=kept[1],
        lost_staleness=lost[0] if lost else None, lost_score=lost[1] if lost else None,
        num_seeds=num_seeds, **counts,
        sentence=_sentence(name, retention, on_policy, kept, lost)
        + _unfinished(lost, retention * on_policy)
        + _remarks(counts, num_seeds) + ".",
    )  # fmt: skip


Measured = tuple[float, float, Cell]
"""Realised staleness, mean score, and the cell."""


def _measured(cells: Sequence[Cell]) -> list[Measured]:
    """By staleness; cells without a score left out."""
    found = [
        (cell.staleness, cell.mean, cell)
        for cell in cells
        if cell.staleness is not None and cell.mean is not None
    ]
    return sorted(found, key=lambda one: one[0])


def _sentence(
    name: str, retention: float, on_policy: float, kept: Measured, lost: Measured | None
) -> str:
    base = f"of its on-policy score ({on_policy:.3f})"
    if lost is None and kept[0] < ON_POLICY:
        return f"{name} scores {on_policy:.3f} on-policy and was tried at no other staleness"
    if lost is None:
        return (
            f"{name} keeps {retention:.0%} {base} at every staleness tried, up to "
            f"{versions(kept[0])} ({kept[1]:.3f})"
        )
    fall = f"at {versions(lost[0])} it is at {lost[1]:.3f}"
    if kept[0] < ON_POLICY:
        return f"{name} keeps {retention:.0%} {base} at no staleness tried: {fall}"
    return f"{name} keeps {retention:.0%} {base} up to {versions(kept[0])} ({kept[1]:.3f}); {fall}"


def _alone(found: Sequence[Measured]) -> str:
    """: at 4 versions it is at 0.828, at 16 versions at 0.877"""
    scores = [f"at {versions(one[0])} it is at {one[1]:.3f}" for one in found[:1]]
    scores += [f"at {versions(one[0])} at {one[1]:.3f}" for one in found[1:]]
    return f": {', '.join(scores)}" if scores else ""


def _unfinished(lost: Measured | None, threshold: float) -> str:
    """, where 80% of the steps train on what the first version sampled: it may want more steps. Not
    of runs that had come to the score that counts as kept: it had been at 0.905 before, and fell
    again"""
    if lost is None or lost[2].num_collapsed or lost[2].ramp_share <= LONG_RAMP:
        return ""
    if lost[2].best is not None and lost[2].best >= threshold:
        return f", where it had been at {lost[2].best:.3f} before, and fell again"
    return (
        f", where {lost[2].ramp_share:.0%} of the steps train on what the first version sampled: "
        "it may want more steps"
    )


def _remarks(counts: dict[str, int], num_seeds: int) -> str:
    """; 1 seed, which shows no spread; 2 arms collapsed"""
    found = ["one seed, so the spread is unknown"] if num_seeds == 1 else []
    for key, word in (("num_collapsed", "collapsed"), ("num_failed", "failed")):
        number = counts[key]
        if number:
            found.append(f"{number} arm{'s' if number > 1 else ''} {word}")
    return "".join(f"; {remark}" for remark in found)


def versions(staleness: float) -> str:
    """1 -> 1 version, 15.98 -> 16.0 versions, 64 -> 64 versions"""
    shown = (
        f"{staleness:.1f}".removesuffix(".0")
        if staleness == round(staleness)
        else (f"{staleness:.1f}")
    )
    return f"{shown} version{'' if shown == '1' else 's'}"
