"""How the pictures of a sweep look: palette, axes, panels, and the files they become."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

from leeway.services.experiments.sweep_rows import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE: Final = (
    "#1f77b4", "#e07b1a", "#2a9d5c", "#c8373c", "#8c62c2",
    "#8a6446", "#d45fa8", "#7d8590", "#a4a21f", "#1aa7b8",
)  # fmt: skip
MARKERS: Final = "osD^vPX<>*"
ROUNDS: Final = ("-", "--", ":")
"""Lines beyond the palette: the same colours and markers again, hollow and broken."""
DPI: Final = 150
MAX_COLUMNS: Final = 4
SEPARATOR: Final = " · "
"""Between the parts of a series' name."""
TITLE_CHARACTERS: Final = 32
"""What a panel is wide enough for."""
INK: Final = "#333a40"
GRID: Final = "#dddad4"
PAPER: Final = "#fffffe"
"""White to the eye, and told apart from white by the page, which leaves it out."""
_VARIABLES: Final = {INK: "var(--muted)", GRID: "var(--rule)", PAPER: "none"}


@dataclass(frozen=True)
class Picture:
    """One figure, not drawn yet."""

    name: str
    """Of its files."""
    title: str
    note: str
    draw: Callable[[], Figure]


# ---- names and lines


def short_names(names: Sequence[str]) -> dict[str, str]:
    """By name, what is left without the parts that all of them have.

    so-grpo · ratio turn · eps 0.2 and so-grpo · ratio token · eps 0.2 -> ratio turn, ratio token.
    A name that would be left without any stays whole, and so does a single one.
    """
    parts = {name: name.split(SEPARATOR) for name in names}
    shared = set.intersection(*(set(of_one) for of_one in parts.values())) if parts else set()
    if len(parts) < 2 or any(shared.issuperset(of_one) for of_one in parts.values()):
        return {name: name for name in names}
    return {
        name: SEPARATOR.join(part for part in of_one if part not in shared)
        for name, of_one in parts.items()
    }


def wrapped(name: str, characters: int = TITLE_CHARACTERS) -> str:
    """In lines of so many characters at most, broken between two parts only."""
    lines: list[str] = []
    for part in name.split(SEPARATOR):
        joined = f"{lines[-1]}{SEPARATOR}{part}" if lines else part
        if lines and len(joined) <= characters:
            lines[-1] = joined
        else:
            lines.append(part)
    return "\n".join(lines)


def line_look(number: int) -> dict[str, Any]:
    """Of the line of that number: no two of the first thirty are alike."""
    colour = PALETTE[number % len(PALETTE)]
    turn = number // len(PALETTE) % len(ROUNDS)
    return {
        "color": colour,
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": ROUNDS[turn],
        "markerfacecolor": PAPER if turn else colour,
    }


# ---- axes


def staleness_axis(axes: Axes, cells: Sequence[Cell]) -> None:
    """Linear up to one version, powers of two beyond."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    top = max((c.staleness for c in cells if c.staleness is not None), default=1.0)
    axes.set_xscale("symlog", base=2, linthresh=1.0, linscale=1.0)
    ticks = [0.0, *(2.0**n for n in range(14) if 2.0**n <= max(1.0, top) * 1.01)]
    axes.set_xticks(ticks)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(-0.12, max(1.0, top) * 1.12)
    axes.set_xlabel("realised staleness, versions")


def score_axis(axes: Axes, cells: Sequence[Cell]) -> None:
    """From 0 where a score is low, else from a tenth below the lowest: differences must be seen."""
    scores = [score for cell in cells for score in cell.scores]
    low = max(0.0, math.floor(min(scores) * 10 - 0.5) / 10)
    high = min(1.0, math.ceil(max(scores) * 10 + 0.2) / 10)
    axes.set_ylim(0.0 if low <= 0.3 else low, max(high, low + 0.1))


def single(width: float, height: float, grid: bool = True) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    _style(axes, grid)
    return figure, axes


def panels(names: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """One for each name, at most four in a row, none beyond."""
    from matplotlib.figure import Figure

    columns = min(MAX_COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    titles = [wrapped(name) for name in short_names(names).values()]
    height = 1.9 + 0.15 * max(title.count("\n") + 1 for title in titles)
    figure = Figure(
        figsize=(max(4.6, 2.5 * columns + 0.8), height * rows + 0.35), layout="constrained"
    )
    axes: list[Axes] = []
    for n, title in enumerate(titles):
        axes.append(figure.add_subplot(rows, columns, n + 1))
        axes[-1].set_title(title, fontsize=9.5, color=INK, loc="left")
        _style(axes[-1], True)
    return figure, axes


def _style(axes: Axes, grid: bool) -> None:
    axes.set_axisbelow(True)
    axes.patch.set_alpha(0.0)
    if grid:
        axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.tick_params(colors=INK, length=0, labelsize=8.5)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=INK, size=9)
    for side, spine in axes.spines.items():
        spine.set(visible=side == "bottom", color=GRID)


# ---- output


@dataclass(frozen=True)
class Drawn:
    """A picture as files."""

    picture: Picture
    png: bytes
    """On a light ground."""
    svg: str
    """The same, text as text."""

    @property
    def inline(self) -> str:
        """For the page: no ground, and its CSS variables for the colours of text and lines."""
        text = self.svg[self.svg.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        used = set(re.findall(r"(?:#|url\(#)([\w-]+)", text))
        text = re.sub(r' id="([\w.-]+)"', lambda m: m[0] if m[1] in used else "", text)
        text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
        text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
        for colour, variable in _VARIABLES.items():
            text = text.replace(colour, variable)
        text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)
        label = escape(self.picture.title, quote=True)
        return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def draw(picture: Picture) -> Drawn:
    """Once, saved twice."""
    import matplotlib as mpl

    png, svg = io.BytesIO(), io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": picture.name}):
        figure = picture.draw()
        figure.savefig(png, format="png", dpi=DPI, facecolor=PAPER)
        figure.savefig(svg, format="svg", facecolor=PAPER, metadata={"Date": None})
    return Drawn(picture, png.getvalue(), svg.getvalue().decode())
