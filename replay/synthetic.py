"""Made-up groups of a given size, for benchmarks, demonstrations and tests."""

from __future__ import annotations

import numpy as np

from leeway.replay.schema import Group, GroupId, Trajectory, Turn
from leeway.replay.store import Slot


def build_group(
    slot: Slot,
    version: int | None = None,
    num_trajectories: int = 2,
    num_tokens: int = 12,
    seed: int = 0,
    newest: int | None = None,
) -> Group:
    """A well-formed group for `slot`, sampled by `version` (None: the slot's).

    With `newest` weights changed meanwhile: the tokens of each trajectory go from `version` to
    `newest` in equal parts, 8 from 3 to 4 as 3 3 3 3 4 4 4 4.

    Each trajectory has a quarter of prompt, then one search turn and one answer turn; `num_tokens`
    is all its tokens, at least 8. A trajectory of 4,000 tokens takes about 30 KiB as stored.
    """
    rng = np.random.default_rng(seed)
    oldest = slot.version if version is None else version
    num_versions = 1 if newest is None else newest - oldest + 1
    return Group(
        group_id=GroupId(slot.slot_id),
        question_id=f"question-{seed}",
        worker_id="synthetic",
        trajectories=tuple(
            _build_trajectory(f"{slot.slot_id}-{i}", oldest, num_versions, num_tokens, rng)
            for i in range(num_trajectories)
        ),
    )


def _build_trajectory(
    trajectory_id: str, oldest: int, num_versions: int, num_tokens: int, rng: np.random.Generator
) -> Trajectory:
    part = num_tokens // 4
    turns = (
        Turn(start=part, num_generated=part, num_observed=part, action="search"),
        Turn(start=3 * part, num_generated=num_tokens - 3 * part, num_observed=0, action="answer"),
    )
    num_trained = num_tokens - 2 * part
    return Trajectory(
        trajectory_id=trajectory_id,
        token_ids=rng.integers(0, 32_000, num_tokens, dtype=np.int32),
        turns=turns,
        logprobs=-rng.random(num_trained, dtype=np.float32),
        versions=(oldest + np.arange(num_trained) * num_versions // num_trained).astype(np.int32),
        reward=float(rng.integers(0, 2)),
        stop_reason="answer",
        scores={"exact_match": 1.0, "num_searches": 1.0},
        duration_s=0.5,
    )
