"""One evaluation: what was not played yet is played, kept question by question, and counted.

benchmarks ── less those in episodes.jsonl ──> play_each ──> episodes.jsonl ──> results.json
                                                                          └───> failures.html
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from leeway.actors.config import model_dir
from leeway.actors.environment import Question
from leeway.actors.evaluation import Asked, Played, play_each
from leeway.actors.tokens import Tokens
from leeway.replay.errors import LeewayError
from leeway.replay.schema import Group, GroupId, Trajectory
from leeway.services.config import RunConfig
from leeway.services.evaluation.benchmarks import Benchmark
from leeway.services.evaluation.failures import write_failures
from leeway.services.evaluation.journal import Entry, Journal, entry_of, read_entries
from leeway.services.evaluation.players import open_table
from leeway.services.evaluation.progress import Display, Tally
from leeway.services.evaluation.results import Results, summarise, write_results
from leeway.services.evaluation.scores import own_scores, search_scores
from leeway.services.evaluation.settings import (
    EPISODES_FILE,
    FAILURES_FILE,
    Settings,
    check,
    check_or_write,
)

WORKER_ID: Final = "eval"


class TooManyErrors(LeewayError):
    """More questions could not be played than the evaluation may bear."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do."""

    config: RunConfig
    settings: Settings
    benchmarks: Sequence[Benchmark]
    folder: Path
    pass_k: Sequence[int]
    num_attempts: int
    """Times an episode is played before its question counts as an error."""
    max_error_share: float
    """Share of all questions that may be errors."""


def run(plan: Plan, console: Console) -> Results:
    """Play what is left, and write results.json and failures.html.

    Raises TooManyErrors as soon as too many questions could not be played. What was played stays,
    and the same plan goes on from there; questions that failed are then played again.
    """
    check_or_write(plan.folder, plan.settings)
    with Journal(plan.folder / EPISODES_FILE) as journal:
        finished = set(_finished(journal.path))
        asked = _asked(plan.benchmarks, finished)
        tally = Tally(len(asked) + len(finished), len(finished))
        if finished:
            console.print(f"{len(finished):,} questions were played before", soft_wrap=True)
        if asked:
            try:
                with _quiet_stdout():
                    asyncio.run(_play(plan, asked, journal, Display(console, tally), tally))
            except KeyboardInterrupt:
                _say_kept(plan, tally)
                raise
        results = summarise(plan.folder, plan.settings, plan.pass_k, plan.settings.seed)
    write_results(plan.folder, results)
    write_failures(plan.folder / FAILURES_FILE, plan.folder, results, model_dir(plan.config.model))
    return results


def left_of(plan: Plan) -> tuple[int, int]:
    """Questions that `run` would play, and those that its folder holds already. Changes nothing.

    Raises ConfigurationError for a folder that holds an evaluation with other settings.
    """
    check(plan.folder, plan.settings)
    journal = plan.folder / EPISODES_FILE
    finished = set(_finished(journal)) if journal.is_file() else set[tuple[str, str]]()
    return len(_asked(plan.benchmarks, finished)), len(finished)


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """What libraries write to stdout (vLLM logs there) goes to stderr: stdout is for the results.

    By descriptor, for some of it is not written by Python.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _finished(path: Path) -> Iterator[tuple[str, str]]:
    """Benchmark and id of each question that was played to its end."""
    for entry in read_entries(path):
        if entry.samples:
            yield entry.benchmark, entry.question.id


def _asked(
    benchmarks: Sequence[Benchmark], finished: set[tuple[str, str]]
) -> list[tuple[str, Asked]]:
    return [
        (benchmark.name, Asked(_name(benchmark, question), question))
        for benchmark in benchmarks
        for question in benchmark.questions
        if (benchmark.name, question.id) not in finished
    ]


def _name(benchmark: Benchmark, question: Question) -> str:
    """Unique over the benchmarks; some ids begin with the benchmark's name already."""
    is_named = question.id.startswith(f"{benchmark.name}-")
    return question.id if is_named else f"{benchmark.name}-{question.id}"


async def _play(
    plan: Plan, asked: Sequence[tuple[str, Asked]], journal: Journal, display: Display, tally: Tally
) -> None:
    is_greedy = plan.settings.decoding == "greedy"
    async with open_table(plan.config, model_dir(plan.config.model)) as table:
        each = play_each(
            [one for _, one in asked],
            table,
            max_concurrency=plan.config.policy.max_num_seqs,
            num_samples=plan.settings.num_samples,
            temperature=0.0 if is_greedy else 1.0,
            num_attempts=plan.num_attempts,
        )
        with display.shown():
            async with aclosing(each):
                async for played in each:
                    benchmark, one = asked[played.place]
                    score = _scoring(plan, played.question, table.tokens)
                    entry = _entry(benchmark, one.name, played, score)
                    journal.append(entry)
                    tally.add(entry)
                    display.update(benchmark)
                    _check_errors(plan, tally)


def _scoring(
    plan: Plan, question: Question, tokens: Tokens
) -> Callable[[Trajectory], dict[str, float]]:
    """How an episode is scored."""
    if plan.config.environment.factory != "search":
        return own_scores
    return lambda trajectory: search_scores(question, trajectory, tokens)


def _entry(
    benchmark: str,
    name: str,
    played: Played,
    score: Callable[[Trajectory], dict[str, float]],
) -> Entry:
    failure = played.failure
    if failure is not None:
        return Entry(
            benchmark=benchmark,
            question=played.question,
            reason=failure.reason,
            error=str(failure),
        )
    group = Group(
        group_id=GroupId(name),
        question_id=played.question.id,
        worker_id=WORKER_ID,
        trajectories=played.trajectories,
    )
    return entry_of(benchmark, played.question, group, [score(t) for t in played.trajectories])


def _check_errors(plan: Plan, tally: Tally) -> None:
    if tally.num_errors <= plan.max_error_share * tally.num_questions:
        return
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in tally.errors.most_common())
    raise TooManyErrors(
        f"{tally.num_errors:,} of {tally.num_questions:,} questions could not be played"
        f" ({reasons}), more than --max-error-share {plan.max_error_share:g} allows; what was"
        f" played is kept in {plan.folder}, and the same command goes on from there. The latest:"
        f" {tally.last_error}"
    )


def _say_kept(plan: Plan, tally: Tally) -> None:
    print(
        f"stopped after {tally.num_done:,} of {tally.num_questions:,} questions, which are kept in"
        f" {plan.folder}; the same command goes on from there",
        file=sys.stderr,
    )
