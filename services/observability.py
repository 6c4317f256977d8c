"""What a run shows of itself while it lasts: a live table on a terminal, plain lines elsewhere.

`leeway status` draws a remote run with the same code; what is not known yet is drawn as a dash.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from leeway.services.api.models import Engine, EventLoop, Run, Stage, Status
from leeway.services.snapshot import build_snapshot

__all__ = ["Display", "build_snapshot", "progress_line", "render"]

QUIET_LINE_S: Final = 10.0
"""Seconds between plain lines while no step ends."""
OVERDUE_SHARE: Final = 0.25
"""A stage that has used up so much of its deadline is shown."""
COMPUTES: Final = "learner"
"""Its event loop computes its steps, so it is late by one."""
LATE_S: Final = 0.25
"""An event loop that woke so late is shown: timers, heartbeats and answers waited for it."""


def render(snapshot: Status) -> RenderableType:
    """The live table; made for 100 columns, usable from 80."""
    parts: list[RenderableType] = [_progress(snapshot.run), Text(), _columns(snapshot)]
    if snapshot.engines:
        parts += [Text(), _engine_table(snapshot.engines)]
    if snapshot.run.last_event:
        parts += [Text(), Text(snapshot.run.last_event, style="dim", overflow="ellipsis")]
    run = snapshot.run
    return Panel(
        Group(*parts),
        title=Text.assemble((run.name, "bold"), f" · {run.phase}"),
        title_align="left",
        subtitle=Text(_clock(run.elapsed_s), style="dim"),
        subtitle_align="right",
        border_style="cyan",
        padding=(1, 2),
    )


def _progress(run: Run) -> RenderableType:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    total = run.num_steps or 1
    row.add_row(
        Text.assemble("step ", (f"{run.step}", "bold"), f" of {run.num_steps or '–'}"),
        ProgressBar(total=total, completed=min(run.step, total), complete_style="cyan"),
        Text.assemble("policy version ", (_number(run.policy_version), "bold")),
    )
    return row


def _columns(snapshot: Status) -> RenderableType:
    columns = Table.grid(padding=(0, 2), expand=True)
    for _ in range(3):
        columns.add_column(ratio=1)
    columns.add_row(
        _facts("learning", _learning_facts(snapshot)),
        _facts("off-policy", _off_policy_facts(snapshot)),
        _facts("flow", _flow_facts(snapshot)),
    )
    waiting = _waiting(snapshot)
    return Group(columns, Text(), waiting) if waiting.row_count else columns


def _waiting(snapshot: Status) -> Table:
    """Who waited of late; on a line each what the buffer last refused and why, who waits for whom
    now as the watchdog sees it, and which event loops are held up."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    if snapshot.waits.sentence:
        table.add_row("waits", Text(snapshot.waits.sentence))
    if snapshot.waits.refusal:
        refusal = Text(snapshot.waits.refusal, style="dim", overflow="ellipsis", no_wrap=True)
        table.add_row("", refusal)
    if snapshot.watchdog is not None:
        table.add_row("now", Text(snapshot.watchdog.waits))
        for stage in snapshot.watchdog.stages:
            if stage.idle_s > OVERDUE_SHARE * stage.deadline_s:
                table.add_row("", Text(_idle_words(stage), style="yellow"))
        if snapshot.watchdog.verdict is not None:
            table.add_row("ended", Text(snapshot.watchdog.verdict, style="bold red"))
    late = [one for one in snapshot.loops if one.lag_s >= LATE_S and one.process != COMPUTES]
    if late:
        table.add_row("late", Text(_late_words(late), style="yellow"))
    return table


def _idle_words(stage: Stage) -> str:
    """learner: no progress for 1,900 s; the run ends at 3,600 s"""
    return (
        f"{stage.name}: no progress for {stage.idle_s:,.0f} s; "
        f"the run ends at {stage.deadline_s:,.0f} s"
    )


def _late_words(loops: Iterable[EventLoop]) -> str:
    """event loops woke late in the last minute: serve 1.20 s, learner 0.31 s"""
    latest_first = sorted(loops, key=lambda loop: -loop.lag_s)
    each = ", ".join(f"{loop.process} {loop.lag_s:.2f} s" for loop in latest_first)
    return f"event loops woke late in the last minute: {each}"


def _facts(title: str, facts: Iterable[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for label, value in facts:
        table.add_row(label, value)
    return Group(Text(title, style="cyan"), table)


def _learning_facts(snapshot: Status) -> list[tuple[str, str]]:
    learning, held_out = snapshot.learning, snapshot.eval
    change = _number(held_out.before, ".3f")
    if held_out.latest is not None:
        change += f" → {held_out.latest:.3f}"
    return [
        ("reward", _number(learning.reward, ".3f")),
        ("exact match", _number(learning.exact_match, ".3f")),
        ("held out", change),
        ("entropy", _number(learning.entropy, ".3f")),
    ]


def _off_policy_facts(snapshot: Status) -> list[tuple[str, str]]:
    staleness, learning = snapshot.staleness, snapshot.learning
    bound = f" of {staleness.bound}" if staleness.bound is not None else ""
    return [
        ("staleness mean", _number(staleness.mean, ".2f")),
        ("staleness max", f"{_number(staleness.max)}{bound}"),
        ("clip fraction", _percent(learning.clip_fraction)),
        ("clip bias ‖C‖", _number(learning.clip_bias_norm, ".3g")),
    ]


def _flow_facts(snapshot: Status) -> list[tuple[str, str]]:
    replay = snapshot.replay
    return [
        ("generated t/s", _number(snapshot.generated_tokens_per_s, ",.0f")),
        ("trained t/s", _number(snapshot.learning.tokens_per_s, ",.0f")),
        ("playing / ready", f"{replay.num_slots} / {replay.num_ready}" if replay else "–"),
        ("leased / dropped", f"{replay.num_leased} / {replay.num_dropped}" if replay else "–"),
    ]


def _engine_table(engines: Iterable[Engine]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="cyan", pad_edge=False)
    table.add_column("engine")
    for title in ("version", "pause", "transfer", "tok/s"):
        table.add_column(title, justify="right", min_width=9)
    for engine in engines:
        table.add_row(
            engine.engine_id,
            _number(engine.version),
            _number(engine.pause_ms, ".1f", " ms"),
            _number(engine.transfer_ms, ".0f", " ms"),
            _number(engine.tokens_per_s, ",.0f"),
        )
    return table


def _number(value: float | None, form: str = "", unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _clock(seconds: float) -> str:
    """3725 -> 1:02:05"""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def progress_line(snapshot: Status) -> str:
    """One line for logs: the same numbers, what is not known left out."""
    run, learning, staleness = snapshot.run, snapshot.learning, snapshot.staleness
    facts = [
        ("reward", learning.reward, ".3f"),
        ("exact_match", learning.exact_match, ".3f"),
        ("held_out", snapshot.eval.latest, ".3f"),
        ("staleness_mean", staleness.mean, ".2f"),
        ("staleness_max", staleness.max, ""),
        ("clip_fraction", learning.clip_fraction, ".4f"),
        ("generated_tok_s", snapshot.generated_tokens_per_s, ".0f"),
        ("trained_tok_s", learning.tokens_per_s, ".0f"),
    ]
    words = [f"{name} {value:{form}}" for name, value, form in facts if value is not None]
    if snapshot.waits.sentence:
        words.append(f"({snapshot.waits.sentence})")
    if snapshot.watchdog is not None and snapshot.watchdog.verdict is not None:
        words.append(f"ended by the watchdog: {snapshot.watchdog.verdict}")
    head = f"{_clock(run.elapsed_s)} {run.phase} step {run.step}/{run.num_steps or '-'}"
    return " ".join([head, *words])


class Display:
    """Shows snapshots while a run lasts: a live table on a terminal, plain lines elsewhere.

    Plain lines come once per step and phase, and every ten seconds while neither changes.
    """

    def __init__(self, console: Console | None = None, is_quiet: bool = False) -> None:
        """`is_quiet` shows notes alone: somebody else prints the snapshots."""
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._is_quiet = is_quiet
        self._shown: Status | None = None
        self._last: tuple[str, int] | None = None
        self._last_at = 0.0
        self._last_note = ""

    def __enter__(self) -> Self:
        if is_live(self._console) and not self._is_quiet:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live.is_started:
            self._live.stop()

    def update(self, snapshot: Status) -> None:
        """Show this one."""
        self._shown, self._last_note = snapshot, ""
        if self._is_quiet:
            return
        if self._live.is_started:
            self._draw(render(snapshot))
            return
        now = time.monotonic()
        at = (snapshot.run.phase, snapshot.run.step)
        if at != self._last or now - self._last_at >= QUIET_LINE_S:
            self._console.print(progress_line(snapshot), soft_wrap=True, highlight=False)
            self._last, self._last_at = at, now

    def note(self, text: str) -> None:
        """Say why nothing new comes: below the last table, or as a line of its own, once for each
        reason (what stands in front of the semicolon; how long it may last may change)."""
        if self._live.is_started:
            last = render(self._shown) if self._shown is not None else Text()
            self._draw(Group(last, Text(text, style="yellow")))
            return
        reason = text.partition(";")[0]
        if reason != self._last_note:
            self._console.print(text, soft_wrap=True, highlight=False)
            self._last_note = reason

    def _draw(self, drawn: RenderableType) -> None:
        # The terminal writes ^C where the table ends: without room it would take a new line and
        # leave the table's first one standing.
        width = self._console.width - len("^C")
        self._live.update(Constrain(drawn, width), refresh=True)


def is_live(console: Console) -> bool:
    """Whether a picture may be drawn over and over: not into a file, a pipe or a dumb terminal."""
    return console.is_terminal and not console.is_dumb_terminal
