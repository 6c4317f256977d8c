"""The plots of a report as inline SVG. The only file that imports matplotlib.

Colours are written as placeholders and replaced by CSS variables, so that one SVG serves a light
and a dark page; text stays text and takes the font of the page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = Mapping[str, object]
"""One line of metrics.jsonl."""

INK: Final = "#0a0b0c"
GRID: Final = "#1a1b1c"
COLOURS: Final = ("#2a2b2c", "#3a3b3c", "#4a4b4c")
_VARIABLES: Final = {
    INK: "var(--muted)",
    GRID: "var(--rule)",
    **{colour: f"var(--series-{i})" for i, colour in enumerate(COLOURS, start=1)},
}


class Series(NamedTuple):
    """One line of a plot."""

    label: str
    keys: tuple[str, ...]
    """Names in metrics.jsonl; the first that a line holds is taken, a list by its mean."""
    scale: float = 1.0
    """Multiplies the values; 100 makes a share a percentage."""


class Panel(NamedTuple):
    """One plot over steps."""

    title: str
    note: str
    """What to look for, one short sentence."""
    series: tuple[Series, ...]
    unit: str = ""
    axis: Literal["linear", "log", "share"] = "linear"
    """`share` pins the axis to 0..1."""


PANELS: Final = (
    Panel(
        "Reward and exact match",
        "On training questions; points are held-out ones, played greedily.",
        (
            Series("exact match", ("score/exact_match",)),
            Series("reward", ("reward_mean",)),
        ),
        axis="share",
    ),
    Panel(
        "Staleness",
        "Policy versions between sampling and training; the dashed line is the bound.",
        (Series("mean", ("staleness_mean",)), Series("max", ("staleness_max",))),
        unit="versions",
    ),
    Panel(
        "Clip fraction",
        "What the clip takes out; it grows with staleness.",
        (
            Series("tokens", ("clip_fraction_tokens",), 100),
            Series("turns", ("clip_fraction_turns",), 100),
        ),
        unit="%",
    ),
    Panel(
        "Clipping bias ‖C‖",
        "Norm of the gradient the clip removed, and what the step was divided by.",
        (Series("‖C‖", ("ctn_norm",)), Series("divisor", ("ctn_divisor",))),
    ),
    Panel(
        "Gradient norm",
        "Before it is bounded, and as the optimizer saw it.",
        (Series("raw", ("grad_norm",)), Series("applied", ("grad_norm_applied",))),
    ),
    Panel(
        "Entropy",
        "A fast fall to zero means that exploration has ended.",
        (Series("per token", ("entropy",)),),
        unit="nats",
    ),
    Panel(
        "KL to the samplers",
        "How far the policy has moved from those that sampled its data.",
        (Series("k3 estimate", ("kl_behaviour",)),),
        unit="nats",
    ),
    Panel(
        "Engine against learner",
        "Difference in log-prob of the same token at equal weights; should stay flat.",
        (Series("mean", ("gap_mean",)), Series("max", ("gap_max",))),
        unit="nats",
        axis="log",
    ),
    Panel(
        "Publishing weights",
        "The pause stops generation, the transfer does not.",
        (Series("pause", ("pause_ms",)), Series("transfer", ("transfer_ms",))),
        unit="ms",
        axis="log",
    ),
    Panel(
        "Throughput",
        "Tokens sampled by the engines and trained by the learner.",
        (
            Series("generated", ("generated_tokens_per_s",)),
            Series("trained", ("trained_tokens_per_s",)),
        ),
        unit="tokens/s",
    ),
    Panel(
        "Behaviour",
        "Means over trajectories.",
        (
            Series("turns", ("turns_per_trajectory",)),
            Series("searches", ("score/num_searches",)),
        ),
        unit="per trajectory",
    ),
    Panel(
        "Length",
        "Trained tokens of a trajectory; search agents that collapse shorten first.",
        (
            Series("generated", ("trained_tokens_per_trajectory",)),
            Series("thinking", ("score/think_tokens",)),
        ),
        unit="tokens",
    ),
    Panel(
        "Buffer",
        "Groups that wait, are played, and are trained.",
        (
            Series("ready", ("num_ready",)),
            Series("playing", ("num_slots",)),
            Series("leased", ("num_leased",)),
        ),
        unit="groups",
    ),
    Panel(
        "Critic",
        "How much of the returns its values explain.",
        (Series("explained variance", ("explained_variance",)),),
    ),
    Panel(
        "Who waits",
        "Share of the time.",
        (
            Series("learner waits for rollouts", ("idle_share",), 100),
            Series("of it, for a group that is due", ("blocked_share",), 100),
            Series("rollouts wait for room", ("rollout_wait_share",), 100),
        ),
        unit="%",
    ),
)


class Plot(NamedTuple):
    """A finished plot."""

    title: str
    note: str
    unit: str
    legend: tuple[tuple[str, int], ...]
    """Label and number of the CSS variable --series-N."""
    svg: str


def draw_panels(
    lines: Sequence[Line],
    held_out: Sequence[tuple[int, float]] = (),
    max_staleness: int | None = None,
) -> list[Plot]:
    """Every panel that has data, in order, the staleness histogram after the staleness."""
    plots: list[Plot] = []
    for panel in PANELS:
        plot = _draw_panel(
            panel,
            lines,
            held_out if panel.axis == "share" else (),
            max_staleness if panel.title == "Staleness" else None,
        )
        if plot is not None:
            plots.append(plot)
        if panel.title == "Staleness":
            plots += _draw_histogram(lines)
    return plots


def points(lines: Sequence[Line], series: Series) -> tuple[list[float], list[float]]:
    """Steps and values where the series has a finite number."""
    steps, values = [], []
    for line in lines:
        value = next((v for key in series.keys if (v := _number(line.get(key))) is not None), None)
        step = _number(line.get("step"))
        if value is not None and step is not None:
            steps.append(step)
            values.append(value * series.scale)
    return steps, values


def _number(value: object) -> float | None:
    if isinstance(value, list):
        numbers = [n for item in value if (n := _number(item)) is not None]
        return sum(numbers) / len(numbers) if numbers else None
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None


def _draw_panel(
    panel: Panel,
    lines: Sequence[Line],
    held_out: Sequence[tuple[int, float]],
    bound: int | None,
) -> Plot | None:
    drawn = [(i, s, *points(lines, s)) for i, s in enumerate(panel.series, start=1)]
    drawn = [entry for entry in drawn if entry[2]]
    if not drawn and not held_out:
        return None
    with _Canvas(panel.title) as canvas:
        for i, _, steps, values in drawn:
            marker = "o" if len(steps) == 1 else None
            canvas.axes.plot(steps, values, color=COLOURS[i - 1], marker=marker, markersize=4)
        if bound is not None:
            canvas.use_whole_numbers()
            canvas.axes.axhline(bound, color=INK, linestyle=(0, (4, 3)), linewidth=1)
        if held_out:
            x, y = zip(*held_out, strict=True)
            canvas.axes.plot(x, y, "o", color=COLOURS[2], markersize=6, clip_on=False, zorder=3)
        values = [v for entry in drawn for v in entry[3]]
        _set_scale(canvas.axes, panel, values if bound is None else [*values, bound])
    legend = [(series.label, i) for i, series, _, _ in drawn]
    legend += [("held out", 3)] if held_out else []
    return Plot(panel.title, panel.note, panel.unit, tuple(legend), canvas.svg)


def _set_scale(axes: Axes, panel: Panel, values: Sequence[float]) -> None:
    if panel.axis == "share" and all(-0.2 <= value <= 1.05 for value in values):
        axes.set_ylim(min(0.0, *values) if values else 0.0, 1.0)
    elif panel.axis == "log" and values and min(values) > 0 and max(values) > 5 * min(values):
        _set_decades(axes, min(values), max(values))
    else:
        axes.set_ylim(bottom=min([*values, 0.0]) * 1.05, top=max([*values, 0.0]) * 1.1 or 1.0)


def _set_decades(axes: Axes, low: float, high: float) -> None:
    """Logarithmic from the power of ten below to the one above, labelled at those only."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=5))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _draw_histogram(lines: Sequence[Line]) -> list[Plot]:
    """Trajectories of the whole run by staleness; nothing where no line counts them."""
    counts: dict[int, float] = {}
    for line in lines:
        for key, value in line.items():
            found = re.fullmatch(r"staleness_histogram/(\d+)", key)
            number = _number(value)
            if found and number is not None:
                counts[int(found[1])] = counts.get(int(found[1]), 0.0) + number
    if not counts:
        return []
    total = sum(counts.values())
    with _Canvas("Staleness of the trajectories") as canvas:
        heights = [100 * counts[k] / total for k in sorted(counts)]
        canvas.axes.bar(sorted(counts), heights, color=COLOURS[0], width=0.72)
        canvas.axes.set_xticks(_few(range(max(counts) + 1)))
        canvas.axes.set_xlabel("versions")
    note = f"All {total:,.0f} trajectories trained, by their oldest token."
    return [Plot("Staleness of the trajectories", note, "%", (), canvas.svg)]


def _few(ticks: Sequence[int]) -> Sequence[int]:
    """At most 13 ticks, evenly apart."""
    return ticks[:: max(1, math.ceil(len(ticks) / 13))]


class _Canvas:
    """A figure in the style of the page; `svg` holds it after the `with`."""

    svg: str

    def __init__(self, name: str) -> None:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        self._name = name
        self._figure = Figure(figsize=(4.2, 2.1), layout="constrained")
        self.axes = self._figure.add_subplot()
        self.axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        self.axes.set_xlabel("step")
        self.axes.set_axisbelow(True)
        self.axes.grid(axis="y", color=GRID, linewidth=0.8)
        self.axes.tick_params(colors=INK, length=0, labelsize=9)
        self.axes.xaxis.label.set(color=INK, size=9)
        for side, spine in self.axes.spines.items():
            spine.set(visible=side == "bottom", color=GRID)

    def use_whole_numbers(self) -> None:
        """Ticks of the vertical axis at whole numbers only."""
        from matplotlib.ticker import MaxNLocator

        self.axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))

    def __enter__(self) -> _Canvas:
        return self

    def __exit__(self, *_: object) -> None:
        import matplotlib as mpl

        out = io.StringIO()
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": self._name}):
            self._figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        self.svg = _themed(out.getvalue(), self._name)


def _themed(svg: str, name: str) -> str:
    """Drop the XML prologue and the ids nobody refers to; put the page's colours in."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"(?:#|url\(#)([\w-]+)", svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda m: m[0] if m[1] in used else "", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    for placeholder, variable in _VARIABLES.items():
        svg = svg.replace(placeholder, variable)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{name}"', 1)
