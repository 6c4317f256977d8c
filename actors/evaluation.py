"""Questions played to measure a policy: the held-out ones of a run, and those of `leeway eval`.

`play_each` is the one way to play them. What a failed episode means is its caller's business: it
ends the evaluation of a run (`evaluate`), and is a row of its own in `leeway eval`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final, NamedTuple

import msgspec
import tenacity

from leeway.actors.environment import Environment, Question
from leeway.actors.failures import EpisodeFailure, EpisodeTimeout, QuestionTooLong
from leeway.actors.policy import Policy
from leeway.actors.rollout import Limits, play
from leeway.actors.tokens import Tokens
from leeway.actors.turnstile import Turnstile
from leeway.replay import tracing
from leeway.replay.errors import DataError
from leeway.replay.schema import StopReason, Trajectory

NUM_ATTEMPTS: Final = 3
"""How often an episode of a run's own evaluation is played before the run fails with it."""

_RETRY_WAIT: Final = tenacity.wait_exponential_jitter(initial=0.5, max=10.0, jitter=0.5)
"""Before an episode is played again. The retriever's client and the engine's retries have already
waited for theirs."""


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """One episode to read."""

    question_id: str
    golden_answers: tuple[str, ...]
    text: str
    """Everything: prompt, turns and observations."""
    reward: float
    stop_reason: StopReason


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy scores on questions it was not trained on."""

    num_questions: int
    scores: dict[str, float]
    """Mean of every score by name, and of the reward."""
    exact_match_by_hops: dict[int, float]
    """Mean exact match by the questions' metadata `hops`; questions without it are left out."""
    num_by_hops: dict[int, int]
    stop_reasons: dict[StopReason, int]
    versions: tuple[int, ...]
    """Policy versions that sampled a token, ascending; several if weights changed meanwhile."""
    samples: tuple[Transcript, ...]
    duration_s: float


@dataclass(frozen=True)
class Table:
    """What every episode of an evaluation is played with."""

    policy: Policy
    environment: Environment
    tokens: Tokens
    limits: Limits
    episode_timeout_s: float
    """Seconds one episode may take; then it fails with EpisodeTimeout."""
    priority: int = 0
    """Of its requests."""
    turnstile: Turnstile = field(default_factory=Turnstile)

    async def play(self, question: Question, trajectory_id: str, temperature: float) -> Trajectory:
        """One episode. Raises an EpisodeFailure."""
        try:
            async with asyncio.timeout(self.episode_timeout_s):
                with tracing.span("evaluation.episode", {"leeway.trajectory": trajectory_id}):
                    return await play(
                        question,
                        self.policy,
                        self.environment,
                        self.tokens,
                        self.limits,
                        trajectory_id,
                        temperature=temperature,
                        priority=self.priority,
                        turnstile=self.turnstile,
                    )
        except TimeoutError:
            raise EpisodeTimeout(
                f"question {question.id!r} took longer than {self.episode_timeout_s:g} s; play"
                " fewer at once (policy.max_num_seqs) or raise rollout.episode_timeout_s"
            ) from None


class Asked(NamedTuple):
    """A question, and the start of its trajectories' ids."""

    name: str
    """Unique among all that one policy is ever asked: a policy may answer a request id it has seen
    from memory."""
    question: Question


class Played(NamedTuple):
    """A question that is done with."""

    place: int
    """Among the questions asked."""
    question: Question
    trajectories: tuple[Trajectory, ...]
    """One for each sample, in order; empty if one of them failed."""
    failure: EpisodeFailure | None


async def play_each(
    asked: Sequence[Asked],
    table: Table,
    *,
    max_concurrency: int,
    num_samples: int = 1,
    temperature: float = 0.0,
    num_attempts: int = 1,
) -> AsyncGenerator[Played]:
    """Play every question `num_samples` times, and yield each once all of its episodes have ended.

    `max_concurrency` episodes are in flight at most, begun in the order of `asked`. An episode that
    fails is played again up to `num_attempts` times in all; then its question fails as a whole, for
    a mean over the samples that happened to work would not compare with another. Any other error
    ends everything. Waits for the policy and the environment, each episode for
    `table.episode_timeout_s` at most. Who stops early closes it (contextlib.aclosing); that cancels
    what is in flight.
    """
    pending: Iterator[tuple[int, int]] = (
        (place, sample) for place in range(len(asked)) for sample in range(num_samples)
    )
    done: dict[int, dict[int, Trajectory | EpisodeFailure]] = defaultdict(dict)
    running: dict[asyncio.Task[Trajectory | EpisodeFailure], tuple[int, int]] = {}

    def begin() -> None:
        for place, sample in pending:
            name, question = asked[place]
            attempt = _attempt(table, question, f"{name}-{sample}", temperature, num_attempts)
            running[asyncio.create_task(attempt)] = (place, sample)
            if len(running) == max_concurrency:
                return

    try:
        begin()
        while running:
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            finished: list[Played] = []
            for task in ended:
                place, sample = running.pop(task)
                done[place][sample] = task.result()
                if len(done[place]) == num_samples:
                    finished.append(_played(place, asked[place].question, done.pop(place)))
            begin()  # before whoever takes the results does something with them
            for played in finished:
                yield played
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _attempt(
    table: Table, question: Question, name: str, temperature: float, num_attempts: int
) -> Trajectory | EpisodeFailure:
    """One episode, or why the last of its attempts failed."""
    retrying = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(num_attempts),
        wait=_RETRY_WAIT,
        retry=tenacity.retry_if_exception(_may_pass),
        reraise=True,
    )
    try:
        async for attempt in retrying:
            with attempt:
                number = attempt.retry_state.attempt_number
                trajectory_id = name if number == 1 else f"{name}-again{number}"
                return await table.play(question, trajectory_id, temperature)
    except EpisodeFailure as failure:
        return failure
    raise AssertionError("tenacity ends a retry by returning or raising")


def _may_pass(error: BaseException) -> bool:
    """A prompt that is too long stays so."""
    return isinstance(error, EpisodeFailure) and not isinstance(error, QuestionTooLong)


def _played(
    place: int, question: Question, by_sample: dict[int, Trajectory | EpisodeFailure]
) -> Played:
    results = [by_sample[sample] for sample in sorted(by_sample)]
    failure = next((result for result in results if isinstance(result, EpisodeFailure)), None)
    trajectories = tuple(result for result in results if isinstance(result, Trajectory))
    return Played(place, question, () if failure else trajectories, failure)


# --- the evaluations of a run -------------------------------------------------------------------


async def evaluate(
    questions: Sequence[Question],
    policy: Policy,
    environment: Environment,
    tokens: Tokens,
    limits: Limits,
    *,
    max_concurrency: int,
    episode_timeout_s: float,
    priority: int = 0,
    num_samples: int = 4,
) -> Evaluation:
    """Play every question once, greedily, its requests at `priority`. An episode that fails
    NUM_ATTEMPTS times fails the evaluation: a mean over the questions that happened to work would
    not compare with another.
    """
    if not questions:
        raise DataError("an evaluation needs at least one question; see data.held_out")
    started = time.perf_counter()
    evaluation_id = f"eval-{uuid.uuid4().hex[:12]}"
    asked = [Asked(f"{evaluation_id}-{i}", question) for i, question in enumerate(questions)]
    table = Table(policy, environment, tokens, limits, episode_timeout_s, priority)
    trajectory_of: dict[int, Trajectory] = {}
    playing = play_each(asked, table, max_concurrency=max_concurrency, num_attempts=NUM_ATTEMPTS)
    async with aclosing(playing) as each:
        async for done in each:
            if done.failure is not None:
                raise done.failure
            trajectory_of[done.place] = done.trajectories[0]
    played = [(question, trajectory_of[i]) for i, question in enumerate(questions)]
    exact_of_hops = _exact_match_by_hops(played)
    return Evaluation(
        num_questions=len(played),
        scores=_mean_scores([trajectory for _, trajectory in played]),
        exact_match_by_hops={hops: fmean(values) for hops, values in exact_of_hops.items()},
        num_by_hops={hops: len(values) for hops, values in exact_of_hops.items()},
        stop_reasons=dict(Counter(t.stop_reason for _, t in played)),
        versions=tuple(sorted({int(v) for _, t in played for v in t.versions})),
        samples=tuple(_transcript(q, t, tokens) for q, t in played[:num_samples]),
        duration_s=time.perf_counter() - started,
    )


def _mean_scores(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Every score is the same set of names in every episode of one environment."""
    names = trajectories[0].scores
    means = {name: fmean(t.scores[name] for t in trajectories) for name in names}
    return {"reward": fmean(t.reward for t in trajectories), **means}


def _exact_match_by_hops(played: Iterable[tuple[Question, Trajectory]]) -> dict[int, list[float]]:
    exact_of_hops: defaultdict[int, list[float]] = defaultdict(list)
    for question, trajectory in played:
        hops = question.metadata.get("hops")
        if isinstance(hops, int):
            exact_of_hops[hops].append(trajectory.scores.get("exact_match", 0.0))
    return dict(sorted(exact_of_hops.items()))


def _transcript(question: Question, trajectory: Trajectory, tokens: Tokens) -> Transcript:
    return Transcript(
        question_id=question.id,
        golden_answers=question.golden_answers,
        text=tokens.decode(trajectory.token_ids.tolist()),
        reward=trajectory.reward,
        stop_reason=trajectory.stop_reason,
    )
