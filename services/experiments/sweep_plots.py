"""The pictures of a sweep, by matplotlib, as PNG and SVG; the page takes the SVG into itself.

The horizontal axis is the realised staleness wherever staleness is one. On the page the colours of
text and lines become its CSS variables, so that one SVG serves a light and a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from leeway.services.experiments.arm_result import ArmResult
from leeway.services.experiments.sweep_arms import series_label
from leeway.services.experiments.sweep_canvas import (
    GRID,
    INK,
    PALETTE,
    Picture,
    line_look,
    panels,
    score_axis,
    short_names,
    single,
    staleness_axis,
    wrapped,
)
from leeway.services.experiments.sweep_rows import Cell, realised

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PER_RUN: Final = (
    ("clip_fraction_tokens", "Clipped tokens", "share of trained tokens"),
    ("clip_fraction_turns", "Clipped turns", "share of turns with a clipped token"),
    ("ctn_norm", "Clipping bias ‖C‖", "norm of the gradient that the clip removed"),
    ("grad_norm", "Gradient norm", "before it is bounded"),
    ("effective_sample_size", "Effective sample size", "1 when all ratios are equal"),
    ("kl_behaviour", "KL to the samplers", "nats"),
    ("entropy", "Entropy", "nats per token"),
    ("score/think_tokens", "Length of the reasoning", "tokens per trajectory"),
    ("reward_mean", "Reward of what was trained", "mean over trajectories"),
)
"""Curves of every run: name in the result, title, what the axis shows."""


def pictures(cells: Sequence[Cell], results: Sequence[ArmResult]) -> list[Picture]:
    """Every figure that has data."""
    names = list(dict.fromkeys(cell.series for cell in cells))
    measured = [cell for cell in cells if cell.mean is not None and cell.staleness is not None]
    if not measured:
        return []
    found = [
        Picture(
            "score_by_staleness",
            "Score against realised staleness",
            "Held-out exact match after the last step; mean over seeds, band: 95 % confidence.",
            lambda: _score_by_staleness(names, measured),
        ),
        Picture(
            "score_by_staleness_each",
            "The same, one at a time",
            "Each over the others in grey; points are single runs.",
            lambda: _each(names, measured),
        ),
        Picture(
            "heat_map",
            "Heat map",
            "Mean over runs; columns are the realised staleness. A cross counts collapsed runs.",
            lambda: _heat_map(names, measured),
        ),
    ]
    for clock, title in (("step", "over steps"), ("wall_s", "over wall clock")):
        found.append(
            Picture(
                f"learning_curves_{'steps' if clock == 'step' else 'seconds'}",
                f"Held-out score {title}",
                "A line for each run; brighter is staler.",
                lambda clock=clock: _curves(
                    names, results, partial(_evaluations, clock), clock, share=True
                ),
            )
        )
    for name, title, note in PER_RUN:
        if any(value is not None for r in results for value in r.curves.get(name, [])):
            found.append(
                Picture(
                    f"runs_{name.replace('score/', '')}",
                    title,
                    f"{note[:1].upper()}{note[1:]}; a line for each run.",
                    lambda name=name: _curves(names, results, partial(_metric, name), "step"),
                )
            )
    return found


# ---- single figures


def _score_by_staleness(names: list[str], cells: Sequence[Cell]) -> Figure:
    # The legend stands beside the plot, a line for each.
    figure, axes = single(8.4, max(4.4, 0.21 * len(names)))
    for n, (name, short) in enumerate(short_names(names).items()):
        _line(axes, cells, n, name, short)
    staleness_axis(axes, cells)
    axes.set_ylabel("held-out exact match")
    score_axis(axes, cells)
    legend = axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_color(INK)
    return figure


def _points(cells: Sequence[Cell], name: str) -> list[tuple[float, float, Cell]]:
    """Realised staleness, mean score and the cell, by staleness."""
    found = [
        (c.staleness, c.mean, c)
        for c in cells
        if c.series == name and c.staleness is not None and c.mean is not None
    ]
    return sorted(found, key=lambda point: point[0])


def _line(axes: Axes, cells: Sequence[Cell], number: int, name: str, label: str = "") -> None:
    look = line_look(number)
    points = _points(cells, name)
    x, y = [point[0] for point in points], [point[1] for point in points]
    axes.plot(x, y, **look, markersize=5, linewidth=1.8, label=label)
    band = [
        (lag, max(0.0, cell.low), min(1.0, cell.high))
        for lag, _, cell in points
        if cell.low is not None and cell.high is not None
    ]
    if band:
        lags, low, high = ([*values] for values in zip(*band, strict=True))
        axes.fill_between(lags, low, high, color=look["color"], alpha=0.1, linewidth=0)


def _each(names: list[str], cells: Sequence[Cell]) -> Figure:
    figure, grid = panels(names)
    for n, (name, axes) in enumerate(zip(names, grid, strict=False)):
        for other in names:
            found = _points(cells, other)
            if other != name:
                x, y = [point[0] for point in found], [point[1] for point in found]
                axes.plot(x, y, color=GRID, linewidth=1.2)
        _line(axes, cells, n, name)
        for lag, _, cell in _points(cells, name):
            lags, colour = [lag] * len(cell.scores), PALETTE[n % len(PALETTE)]
            axes.plot(lags, cell.scores, ".", color=colour, markersize=4)
        staleness_axis(axes, cells)
        score_axis(axes, cells)
    return figure


def _heat_map(names: list[str], cells: Sequence[Cell]) -> Figure:
    columns = _columns(cells)
    fields = heat_fields(names, cells, columns)
    labels = [wrapped(name) for name in short_names(names).values()]
    lines = [line for label in labels for line in label.split("\n")]
    width = 1.0 + 0.085 * max(len(line) for line in lines) + 0.85 * len(columns)
    figure, axes = single(width, 1.0 + 0.42 * max(len(names), 0.5 * len(lines)), grid=False)
    values = [[math.nan] * len(columns) for _ in names]
    for (row, column), (mean, num_collapsed) in fields.items():
        values[row][column] = mean
        crosses = f" ✕{num_collapsed}" if num_collapsed else ""
        axes.text(
            column, row, f"{mean:.2f}{crosses}", ha="center", va="center", fontsize=8.5,
            color="#ffffff" if mean < 0.55 else "#10161a",
        )  # fmt: skip
    axes.imshow(values, cmap="viridis", vmin=0.0, vmax=1.0, aspect="auto")
    axes.set_xticks(range(len(columns)), [_span(column) for column in columns])
    axes.set_yticks(range(len(names)), labels)
    axes.set_xlabel("realised staleness, versions")
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def heat_fields(
    names: Sequence[str], cells: Sequence[Cell], columns: Sequence[Sequence[float]]
) -> dict[tuple[int, int], tuple[float, int]]:
    """Mean score over runs, and how many collapsed, by row and column.

    Two settings of a series may come out at the same realised staleness: scores of 0.8, 0.6 and of
    0.1 in one field -> 0.5.
    """
    found: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        key = names.index(cell.series), _column_of(cell, columns)
        found.setdefault(key, []).append(cell)
    return {
        key: (
            fmean(score for cell in together for score in cell.scores),
            sum(cell.num_collapsed for cell in together),
        )
        for key, together in found.items()
    }


def _columns(cells: Sequence[Cell]) -> list[list[float]]:
    """Realised stalenesses that lie together: a gap of a fifth, and of half a version, divides.

    0, 0, 3.9, 4.0, 4.1, 16 -> [0, 0], [3.9, 4.0, 4.1], [16]
    """
    columns: list[list[float]] = []
    for lag in sorted(c.staleness for c in cells if c.staleness is not None):
        if columns and lag - columns[-1][0] < max(0.5, 0.2 * lag):
            columns[-1].append(lag)
        else:
            columns.append([lag])
    return columns


def _column_of(cell: Cell, columns: Sequence[Sequence[float]]) -> int:
    return next(n for n, column in enumerate(columns) if cell.staleness in column)


def _span(column: Sequence[float]) -> str:
    low, high = f"{column[0]:.3g}", f"{column[-1]:.3g}"
    return low if low == high else f"{low}–{high}"


# ---- a panel for each series


Points = tuple[list[float], list[float]]


def _curves(
    names: list[str],
    results: Sequence[ArmResult],
    points: Callable[[ArmResult], Points],
    clock: str,
    *,
    share: bool = False,
) -> Figure:
    figure, grid = panels(names)
    top = max((realised(r) or 0.0 for r in results), default=0.0)
    values: list[float] = []
    for name, axes in zip(names, grid, strict=False):
        axes.set_xlabel("step" if clock == "step" else "seconds", fontsize=8.5)
        for result in sorted(results, key=lambda r: realised(r) or 0.0):
            if series_label(result.spec.objective, result.spec.variant) == name:
                x, y = points(result)
                marker = "o" if len(x) == 1 else None
                colour = _lag_colour(realised(result), top)
                axes.plot(x, y, color=colour, linewidth=1.1, marker=marker, markersize=3)
                values += y
    for axes in grid[: len(names)]:
        if share:
            axes.set_ylim(0.0, 1.0)
        elif values:
            high = max(values)
            axes.set_ylim(min(0.0, *values), high * 1.08 if high > 0 else 1.0)
    _lag_bar(figure, grid[: len(names)], top)
    return figure


def _evaluations(clock: str, result: ArmResult) -> Points:
    found = result.evaluations
    return [getattr(one, clock) for one in found], [one.score for one in found]


def _metric(name: str, result: ArmResult) -> Points:
    steps = result.curves.get("step", [])
    pairs = [
        (step, value)
        for step, value in zip(steps, result.curves.get(name, []), strict=False)
        if step is not None and value is not None
    ]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _lag_scale(top: float) -> Any:
    from matplotlib.colors import SymLogNorm

    return SymLogNorm(linthresh=1.0, base=2, vmin=0.0, vmax=max(1.0, top))


def _lag_map() -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    # Without the ends, which a dark and a light page would swallow.
    return ListedColormap(colormaps["plasma"]([0.08 + 0.78 * n / 255 for n in range(256)]))


def _lag_colour(staleness: float | None, top: float) -> Any:
    return _lag_map()(_lag_scale(top)(staleness or 0.0))


def _lag_bar(figure: Figure, grid: Sequence[Axes], top: float) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.ticker import FuncFormatter, NullLocator

    mappable = ScalarMappable(_lag_scale(top), _lag_map())
    bar = figure.colorbar(mappable, ax=list(grid), fraction=0.03, pad=0.02, aspect=30)
    ticks = [0.0, *(2.0**n for n in range(12) if 2.0**n <= max(1.0, top) * 1.01)]
    bar.set_ticks(ticks)
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.tick_params(colors=INK, labelsize=8, length=0)
    bar.set_label("realised staleness, versions", color=INK, fontsize=8.5)
    bar.outline.set_visible(False)  # pyright: ignore
