"""Advantages of steps and turns against hand-computed numbers.

Letters as in learner/objective/advantage.py: `N` steps, `K` turns, `T` trained tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from leeway.learner.batch import PackedBatch, build_batch
from leeway.learner.objective.advantage import (
    gae,
    segment_decayed_sum,
    turn_advantage,
    whiten,
)
from leeway.learner.objective.presets import PRESETS
from leeway.learner.update import build_update
from leeway.replay.schema import Group, GroupId, Trajectory, Turn


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def trajectory(
    sizes: list[int], reward: float, turn_rewards: tuple[float, ...] | None = None
) -> Trajectory:
    """Turns of so many generated tokens, one observed token behind each, two of prompt."""
    turns, position = [], 2
    for size in sizes:
        turns.append(Turn(position, size, 1, "search"))
        position += size + 1
    return Trajectory(
        trajectory_id=f"{sizes} {reward}",
        token_ids=np.arange(position, dtype=np.int32),
        turns=tuple(turns),
        logprobs=np.full(sum(sizes), -1.0, np.float32),
        versions=np.zeros(sum(sizes), np.int32),
        reward=reward,
        stop_reason="answer",
        scores={},
        duration_s=1.0,
        turn_rewards=turn_rewards,
    )


def batch_of(*trajectories: Trajectory) -> PackedBatch:
    return build_batch(
        [Group(group_id=GroupId("g"), question_id="q", worker_id="w", trajectories=trajectories)]
    )


# Rewards [0, 1], values [0.5, 0.25], then a trajectory of one step: reward 2, value 3.
#   deltas: 0 + gamma 0.25 - 0.5, 1 - 0.25, 2 - 3
@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        (1.0, 0.5, [-0.25 + 0.5 * 0.75, 0.75, -1.0]),
        (1.0, 1.0, [0.5, 0.75, -1.0]),
        (1.0, 0.0, [-0.25, 0.75, -1.0]),
        (0.5, 1.0, [-0.375 + 0.5 * 0.75, 0.75, -1.0]),
        (0.5, 0.5, [-0.375 + 0.25 * 0.75, 0.75, -1.0]),
    ],
)
def test_gae_by_hand(gamma: float, lam: float, expected: list[float]) -> None:
    found = gae(f64(0, 1, 2), f64(0.5, 0.25, 3), torch.tensor([0, 0, 1]), gamma, lam)
    assert found.advantage_N.tolist() == pytest.approx(expected)
    returns = [a + v for a, v in zip(expected, (0.5, 0.25, 3), strict=True)]
    assert found.return_N.tolist() == pytest.approx(returns)


def test_without_discount_and_lambda_gae_is_the_reward_to_come_minus_the_value() -> None:
    reward_N, value_N = f64(1, 0, 2, 4, 8), f64(0.5, 3, -1, 2, 0.25)
    found = gae(reward_N, value_N, torch.tensor([0, 0, 0, 1, 1]), 1.0, 1.0)
    assert found.return_N.tolist() == [3, 2, 2, 12, 8]
    assert found.advantage_N.tolist() == [2.5, -1, 3, 10, 7.75]


def test_with_lambda_zero_gae_is_the_temporal_difference() -> None:
    found = gae(f64(1, 0, 2), f64(0.5, 3, -1), torch.zeros(3, dtype=torch.int64), 0.9, 0.0)
    assert found.advantage_N.tolist() == pytest.approx([1 + 2.7 - 0.5, 0 - 0.9 - 3, 2 + 1])


def test_a_decayed_sum_ends_with_its_segment() -> None:
    found_N = segment_decayed_sum(f64(1, 2, 4, 8, 16), torch.tensor([0, 0, 0, 1, 1]), 0.5)
    assert found_N.tolist() == [3, 4, 4, 16, 16]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 100])
def test_a_decayed_sum_of_ones_is_a_geometric_series(length: int) -> None:
    found_N = segment_decayed_sum(
        torch.ones(length, dtype=torch.float64), torch.zeros(length, dtype=torch.int64), 0.5
    )
    assert found_N.tolist() == pytest.approx([2 - 0.5 ** (length - n - 1) for n in range(length)])


def test_gae_of_turns_without_discount_and_lambda_is_the_reward_to_come_minus_v_of_the_state() -> (
    None
):
    # Turns of 2, 0 and 1 tokens earn 1, 0 and 2; V at their first tokens is 0.5 and 0.25.
    batch = batch_of(trajectory([2, 0, 1], 3.0, (1.0, 0.0, 2.0)), trajectory([1], 1.0))
    value_T = torch.tensor([0.5, 9.0, 0.25, 4.0])
    update = build_update(batch, PRESETS["so-ppo"], 0, value_T=value_T)
    assert update.tokens.a_T.tolist() == [2.5, 2.5, 1.75, -3.0]
    assert update.targets is not None
    assert update.targets.token_N.tolist() == [0, 2, 3]
    assert update.targets.old_N.tolist() == [0.5, 0.25, 4.0]
    assert update.targets.return_N.tolist() == [3.0, 2.0, 1.0]


def test_gae_of_turns_discounts_by_turn_not_by_token() -> None:
    # Deltas: 0 + 0.5 * 0.25 - 0.5 = -0.375, 1 - 0.25 = 0.75; A_0 = -0.375 + 0.5 * 0.5 * 0.75.
    objective = replace(PRESETS["so-ppo"], gamma=0.5, gae_lambda=0.5)
    value_T = torch.tensor([0.5, 9.0, 9.0, 0.25, 9.0])
    update = build_update(batch_of(trajectory([3, 2], 1.0)), objective, 0, value_T=value_T)
    assert update.tokens.a_T.tolist() == pytest.approx([-0.1875] * 3 + [0.75] * 2)


def test_turn_advantage_by_hand() -> None:
    # Siblings' turn rewards [1, 0] and [0, 0]; a second group of one trajectory with [5].
    found_K = turn_advantage(
        f64(1, 0, 0, 0, 5), torch.tensor([0, 0, 0, 0, 1]), torch.tensor([0, 1, 0, 1, 0])
    )
    assert found_K.tolist() == pytest.approx([0.7071, 0, -0.7071, 0, 0], abs=1e-4)


def test_a_turn_that_no_sibling_has_gets_zero() -> None:
    # Turns [1, 3] and [3]: first turns have mean 2 and deviation 1.4142.
    found_K = turn_advantage(f64(1, 3, 3), torch.tensor([0, 0, 0]), torch.tensor([0, 1, 0]))
    assert found_K.tolist() == pytest.approx([-0.7071, 0, 0.7071], abs=1e-4)


def test_group_turn_compares_turns_of_one_index_where_turn_rewards_exist() -> None:
    batch = batch_of(
        trajectory([2, 1], 1.0, (1.0, 0.0)), trajectory([1, 2], 1.0, (0.0, 1.0))
    )  # fmt: skip
    objective = replace(PRESETS["so-grpo"], advantage="group-turn")
    a_T = build_update(batch, objective, 0).tokens.a_T
    s = 0.70711
    assert a_T.tolist() == pytest.approx([s, s, -s, -s, s, s], abs=1e-4)


@pytest.mark.parametrize("second", [None, (0.0, 0.0)])
def test_group_turn_is_group_unless_every_trajectory_names_its_turns_rewards(
    second: tuple[float, ...] | None,
) -> None:
    first = (0.5, 0.5) if second is None else None
    batch = batch_of(trajectory([2, 1], 1.0, first), trajectory([1, 2], 0.0, second))
    by_turn = replace(PRESETS["so-grpo"], advantage="group-turn")
    expected_T = build_update(batch, PRESETS["so-grpo"], 0).tokens.a_T
    assert expected_T.tolist() == pytest.approx([0.70711] * 3 + [-0.70711] * 3, abs=1e-4)
    assert build_update(batch, by_turn, 0).tokens.a_T.tolist() == expected_T.tolist()


@pytest.mark.parametrize(
    ("a", "expected"),
    [
        ([1.0, 3.0], [-0.70711, 0.70711]),
        ([0.0, 0.0, 3.0], [-0.57735, -0.57735, 1.1547]),
        ([2.0, 2.0, 2.0], [0.0, 0.0, 0.0]),
        ([7.0], [0.0]),
    ],
)
def test_whiten_by_hand(a: list[float], expected: list[float]) -> None:
    assert whiten(f64(*a)).tolist() == pytest.approx(expected, abs=1e-4)


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_the_batch_s_tokens() -> None:
    # Advantages 0.7071, 0.7071, 0.7071, -0.7071: mean 0.3536, deviation 0.7071.
    batch = batch_of(trajectory([2, 1], 1.0), trajectory([1], 0.0))
    a_T = build_update(batch, replace(PRESETS["grpo"], whiten=True), 0).tokens.a_T
    assert a_T.tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-4)


def test_whitening_leaves_the_critic_s_targets_alone() -> None:
    batch, value_T = batch_of(trajectory([2], 1.0)), torch.tensor([0.5, 0.25])
    update = build_update(batch, replace(PRESETS["ppo"], whiten=True), 0, value_T=value_T)
    # Advantages 0.5, 0.75: mean 0.625, deviation 0.1768.
    assert update.tokens.a_T.tolist() == pytest.approx([-0.7071, 0.7071], abs=1e-4)
    assert update.targets is not None and update.targets.return_N.tolist() == [1.0, 1.0]
