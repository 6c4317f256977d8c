"""Greedy episodes over held-out questions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from leeway.actors.environment import Environment, Question
from leeway.actors.failures import EpisodeTimeout, first_cause
from leeway.actors.policy import Policy
from leeway.actors.rollout import Limits, play
from leeway.actors.tokens import Tokens
from leeway.replay.errors import DataError
from leeway.replay.schema import StopReason, Trajectory


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


async def evaluate(
    questions: Sequence[Question],
    policy: Policy,
    environment: Environment,
    tokens: Tokens,
    limits: Limits,
    *,
    max_concurrency: int,
    episode_timeout_s: float,
    num_samples: int = 4,
) -> Evaluation:
    """Play every question once, greedily. A failed episode fails the evaluation: a mean over the
    questions that happened to work would not compare with another.
    """
    if not questions:
        raise DataError("an evaluation needs at least one question; see data.held_out")
    started = time.perf_counter()
    free = asyncio.Semaphore(max_concurrency)
    # A policy may answer a request id it has seen from memory, so no two evaluations share one.
    evaluation_id = f"eval-{uuid.uuid4().hex[:12]}"

    async def play_one(i: int, question: Question) -> Trajectory:
        async with free:
            try:
                async with asyncio.timeout(episode_timeout_s):
                    return await play(
                        question,
                        policy,
                        environment,
                        tokens,
                        limits,
                        f"{evaluation_id}-{i}",
                        temperature=0.0,
                    )
            except TimeoutError:
                raise EpisodeTimeout(
                    f"question {question.id!r} took longer than {episode_timeout_s:g} s"
                ) from None

    try:
        async with asyncio.TaskGroup() as tasks:
            episodes = [tasks.create_task(play_one(i, q)) for i, q in enumerate(questions)]
    except BaseExceptionGroup as failures:
        raise first_cause(failures) from None
    played = [(q, task.result()) for q, task in zip(questions, episodes, strict=True)]
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
