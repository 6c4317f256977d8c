"""Trajectories in the terminal: turns as blocks, tokens in colour; in a pipe the same, plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from leeway.services.trajectory_view import (
    ColourBy,
    Episode,
    Segment,
    printable,
    ratio_bin,
    ratio_labels,
    segments,
    version_bin,
    version_bins,
)

TURNS: Final = ("cyan", "yellow", "magenta", "green", "blue", "red")
TRAINED: Final = {"prompt": "dim", "generated": "bold green", "observed": "dim yellow"}
VERSIONS: Final = ("color(69)", "color(37)", "color(35)", "color(106)", "color(178)", "color(208)",
                   "color(203)", "color(199)")  # fmt: skip
"""From the oldest to the newest."""
RATIOS: Final = ("bold blue", "blue", "cyan", "default", "yellow", "red", "bold red")
"""From tokens that the model has come to sample less, to those it samples more."""
UNTRAINED: Final = "dim"

StyleOf = Callable[[Segment, int], str]
"""Style of a token: its segment, and its place among the L."""


def show(
    console: Console, title: str, episodes: Sequence[Episode], colour_by: ColourBy, note: str = ""
) -> None:
    """Every episode, below a legend."""
    bins = version_bins(episodes, len(VERSIONS))
    console.print(Text(printable(title), style="bold"))
    if console.is_terminal:
        console.print(_legend(episodes, colour_by, bins))
    for number, episode in enumerate(episodes, start=1):
        console.print()
        _show_episode(console, f"{number} of {len(episodes)}", episode, colour_by, bins)
    if note:
        console.print(Text(f"\n{note}"))


def _legend(
    episodes: Sequence[Episode], colour_by: ColourBy, bins: Sequence[tuple[int, int]]
) -> Text:
    most = max((len(episode.turns) for episode in episodes), default=0)
    entries: dict[ColourBy, list[tuple[str, str]]] = {
        "turn": [(f"turn {k + 1}", TURNS[k % len(TURNS)]) for k in range(min(most, len(TURNS)))],
        "trained": [(name, style) for name, style in TRAINED.items()],
        "version": [
            (f"version {low}" if low == high else f"versions {low}-{high}", style)
            for (low, high), style in zip(bins, VERSIONS, strict=False)
        ],
        "ratio": list(zip(ratio_labels(), RATIOS, strict=True)),
    }
    shown = [*entries[colour_by]]
    if colour_by != "trained":
        shown.append(("not trained", UNTRAINED))
    legend = Text(f"coloured by {colour_by}: ")
    for label, style in shown:
        legend.append(label, style=style).append("  ")
    return legend


def _show_episode(
    console: Console,
    place: str,
    episode: Episode,
    colour_by: ColourBy,
    bins: Sequence[tuple[int, int]],
) -> None:
    source = f"{episode.data_source} " if episode.data_source else ""
    console.print(Rule(Text(printable(f"{place} · {source}{episode.question_id}")), align="left"))
    for line in _headlines(episode):
        console.print(line)
    if episode.error is not None:
        console.print(Text(f"not played: {episode.error}", style="red"))
        return
    style_of = _style_of(episode, colour_by, bins)
    for segment in segments(episode):
        console.print(
            Text(_heading(episode, segment), style="bold" if segment.kind == "generated" else "")
        )
        text = Text()
        for i in range(segment.start, segment.stop):
            text.append(episode.texts[i], style=style_of(segment, i))
        console.print(Padding(text, (0, 0, 0, 2 if segment.kind == "generated" else 4)))


def _headlines(episode: Episode) -> Iterator[Text]:
    if episode.question is not None:
        yield Text(episode.question, style="bold")
    if episode.golden_answers:
        yield Text(f"right: {' or '.join(episode.golden_answers)}")
    if episode.error is not None:
        return
    verdict = ("wrong", "red") if episode.is_failed else ("right", "green")
    num_prompt = episode.turns[0].start if episode.turns else 0
    facts = (
        f" · reward {episode.reward:g} · ended by {episode.stop_reason} ·"
        f" {_versions(episode.versions)} · {len(episode.token_ids):,} tokens"
        f" ({num_prompt:,} prompt, {len(episode.logprobs):,} trained) ·"
        f" {episode.duration_s:.1f} s · trajectory {episode.trajectory_id}"
    )
    yield Text.assemble(verdict, facts)


def _versions(versions: Sequence[int]) -> str:
    low, high = min(versions), max(versions)
    return f"version {low}" if low == high else f"versions {low} to {high}"


def _heading(episode: Episode, segment: Segment) -> str:
    num = segment.stop - segment.start
    if segment.turn is None:
        return f"prompt, {num:,} tokens, not trained"
    if segment.kind == "observed":
        return f"  observed, {num:,} tokens, not trained"
    turn = episode.turns[segment.turn]
    part = slice(segment.trained, segment.trained + num)
    mean = sum(episode.logprobs[part]) / num
    words = (
        f"turn {segment.turn + 1}: {turn.action}, {num:,} tokens, "
        f"{_versions(episode.versions[part])}, mean log-prob {mean:.3f}"
    )
    if episode.ratios is not None:
        words += f", mean ratio {sum(episode.ratios[part]) / num:.3f}"
    return words if turn.reward is None else f"{words}, reward {turn.reward:g}"


def _style_of(episode: Episode, colour_by: ColourBy, bins: Sequence[tuple[int, int]]) -> StyleOf:
    def style_of(segment: Segment, i: int) -> str:
        if colour_by == "trained":
            return TRAINED[segment.kind]
        if segment.kind != "generated" or segment.turn is None:
            return UNTRAINED
        t = segment.trained + i - segment.start
        if colour_by == "turn":
            return TURNS[segment.turn % len(TURNS)]
        if colour_by == "version":
            return VERSIONS[version_bin(bins, episode.versions[t])]
        return RATIOS[ratio_bin(episode.ratios[t])] if episode.ratios else UNTRAINED

    return style_of
