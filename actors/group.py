"""The sibling episodes of one question: all of them, or none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from leeway.actors.environment import Question
from leeway.actors.failures import EpisodeTimeout, first_cause
from leeway.replay.schema import Group, GroupId, Trajectory

PlayEpisode = Callable[[Question, str], Awaitable[Trajectory]]
"""Plays one episode of a question under a trajectory id."""


async def play_group(
    group_id: GroupId,
    question: Question,
    worker_id: str,
    play_episode: PlayEpisode,
    *,
    size: int,
    timeout_s: float,
) -> Group:
    """Play `size` siblings at once. If one fails the others are cancelled and its error is raised:
    an advantage over fewer siblings than configured would be another objective.

    Waits for the policy and the retriever, `timeout_s` at most; then raises EpisodeTimeout.
    """
    started = time.perf_counter()
    siblings: list[asyncio.Task[Trajectory]] = []
    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
            for i in range(size):
                siblings.append(tasks.create_task(_play(play_episode, question, f"{group_id}-{i}")))
    except TimeoutError:
        num_ended = sum(task.done() and not task.cancelled() for task in siblings)
        raise EpisodeTimeout(
            f"group {group_id}, question {question.id!r}: {num_ended} of {size} siblings had ended"
            f" after {time.perf_counter() - started:.1f} s, the others wait for the policy or the"
            " retriever; play fewer at once (rollout.max_groups_in_flight) or raise"
            " rollout.episode_timeout_s"
        ) from None
    except BaseExceptionGroup as failures:
        raise first_cause(failures) from None
    return Group(
        group_id=group_id,
        question_id=question.id,
        worker_id=worker_id,
        trajectories=tuple(task.result() for task in siblings),
    )


async def _play(play_episode: PlayEpisode, question: Question, trajectory_id: str) -> Trajectory:
    return await play_episode(question, trajectory_id)
