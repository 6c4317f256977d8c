"""Made-up batches with the shape of search episodes: a prompt, then turns with observations between
them. Only sizes, rewards and ids mean something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leeway.learner.batch import PackedBatch, build_batch
from leeway.replay.schema import Group, GroupId, Trajectory, Turn


@dataclass(frozen=True)
class Shape:
    """Sizes of one trajectory, in tokens."""

    prompt: int
    turns: tuple[int, ...]
    """[K] trained tokens of each turn."""
    observations: tuple[int, ...]
    """[K - 1] tokens between them."""


def build_episodes(
    shapes: Sequence[Shape],
    rewards: Sequence[float],
    group_size: int,
    vocabulary: int,
    rng: np.random.Generator,
) -> PackedBatch:
    """One trajectory per shape, in groups of `group_size`; all of version 0."""
    trajectories = [
        _trajectory(str(i), shape, reward, vocabulary, rng)
        for i, (shape, reward) in enumerate(zip(shapes, rewards, strict=True))
    ]
    return build_batch(
        [
            Group(
                group_id=GroupId(str(first)),
                question_id=str(first),
                worker_id="bench",
                trajectories=tuple(trajectories[first : first + group_size]),
            )
            for first in range(0, len(trajectories), group_size)
        ]
    )


def _trajectory(
    name: str, shape: Shape, reward: float, vocabulary: int, rng: np.random.Generator
) -> Trajectory:
    turns: list[Turn] = []
    position = shape.prompt
    for num_generated, num_observed in zip(shape.turns, (*shape.observations, 0), strict=True):
        action = "search" if num_observed else "answer"
        turns.append(Turn(position, num_generated, num_observed, action))
        position += num_generated + num_observed
    num_trained = sum(shape.turns)
    return Trajectory(
        trajectory_id=name,
        token_ids=rng.integers(0, vocabulary, position, dtype=np.int32),
        turns=tuple(turns),
        logprobs=-rng.exponential(0.5, num_trained).astype(np.float32),
        versions=np.zeros(num_trained, np.int32),
        reward=reward,
        stop_reason="answer",
        scores={},
        duration_s=1.0,
    )
