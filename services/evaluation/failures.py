"""`failures.html`: what was answered wrongly or not played, to read turn by turn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from leeway.actors.environment import Question
from leeway.actors.tokens import Tokens
from leeway.services.evaluation.journal import Entry, read_last
from leeway.services.evaluation.results import Results
from leeway.services.evaluation.scores import is_right
from leeway.services.evaluation.settings import EPISODES_FILE
from leeway.services.trajectory_html import write_html
from leeway.services.trajectory_view import Episode, build_episode, failed_episode

MAX_SHOWN: Final = 200
"""Over all benchmarks, each having an equal part."""


def write_failures(page: Path, folder: Path, results: Results, model: Path) -> None:
    """Write the page. Of a question with several samples it shows the first wrong one."""
    quota = max(1, MAX_SHOWN // len(results.benchmarks))
    tokens = Tokens.load(model)
    num_failed: Counter[str] = Counter()
    episodes: list[Episode] = []
    for entry in filter(_is_failed, read_last(folder / EPISODES_FILE)):
        num_failed[entry.benchmark] += 1
        if num_failed[entry.benchmark] <= quota:
            episodes.append(_episode(entry, tokens))
    order = list(results.benchmarks)
    episodes.sort(key=lambda episode: order.index(episode.data_source))
    num_all = sum(num_failed.values())
    more = (
        f"{len(episodes):,} of {num_all:,} failed questions; the others are shown by"
        f" leeway trajectories show {folder} --failed --benchmark NAME."
    )
    write_html(
        page,
        f"Failures · {folder.name}",
        episodes,
        note=more if len(episodes) < num_all else "",
        facts=_facts(results),
    )


def _is_failed(entry: Entry) -> bool:
    return not entry.samples or not all(is_right(sample.scores) for sample in entry.samples)


def _episode(entry: Entry, tokens: Tokens) -> Episode:
    question: Question = msgspec.structs.replace(entry.question, data_source=entry.benchmark)
    group = entry.trajectories()
    if group is None:
        return failed_episode(question, entry.error or "")
    i = next(i for i, sample in enumerate(entry.samples) if not is_right(sample.scores))
    return build_episode(
        group.trajectories[i],
        group.group_id,
        group.question_id,
        tokens,
        question=question,
        scores=entry.samples[i].scores,
    )


def _facts(results: Results) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    for name, found in results.benchmarks.items():
        score_name, estimate = next(iter(found.scores.items()))
        facts.append((f"{name}, {score_name.replace('_', ' ')}", f"{estimate.mean:.3f}"))
    return facts
