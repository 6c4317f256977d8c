"""Advantages: a trajectory's reward against its siblings or the batch, or against a critic.

Letters: `T` trained tokens, `K` turns, `B` trajectories, `G` groups; `group_of_B` maps each
trajectory to its group, `turn_of_T` each token to its turn. Float64 in and out. Segments stand in
order: the tokens of a turn, and the turns of a trajectory, follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from leeway.learner.objective.kinds import Advantage
from leeway.learner.objective.ratio import segment_mean, segment_sum

STD_FLOOR: Final = 1e-6


def has_equal_rewards(reward_B: Tensor, group_of_B: Tensor, num_groups: int) -> Tensor:
    """[G] bool: all rewards of the group are the same number, so it teaches nothing by itself."""
    low_G = reward_B.new_full((num_groups,), torch.inf)
    low_G = low_G.scatter_reduce(0, group_of_B, reward_B, "amin")
    high_G = reward_B.new_full((num_groups,), -torch.inf)
    high_G = high_G.scatter_reduce(0, group_of_B, reward_B, "amax")
    return low_G == high_G


def trajectory_advantage(
    kind: Advantage, reward_B: Tensor, group_of_B: Tensor, num_groups: int
) -> Tensor:
    """[B] one advantage per trajectory; each of its tokens shares it.

    group           (R_i - mean of the group) / (std of the group + 1e-6), std with n - 1 (GRPO)
    group-unscaled  R_i - mean of the group
    leave-one-out   R_i - mean of the others (RLOO)
    batch           R_i - mean of the batch (REINFORCE with baseline)

    Rewards [1, 0, 0] of one group: group [1.1547, -0.5774, -0.5774], leave-one-out [1, -0.5, -0.5],
    batch [0.6667, -0.3333, -0.3333]. A group of equal rewards is exactly 0 in the first three.
    """
    if kind == "batch":
        return reward_B - reward_B.mean()
    offset_B = reward_B - segment_mean(reward_B, group_of_B, num_groups)[group_of_B]
    # Exact zeros: the mean of three 0.1 is not 0.1, and a std of 1e-17 would not save it.
    equal_G = has_equal_rewards(reward_B, group_of_B, num_groups)
    offset_B = offset_B.masked_fill(equal_G[group_of_B], 0.0)
    if kind == "group-unscaled":
        return offset_B
    size_G = segment_sum(torch.ones_like(reward_B), group_of_B, num_groups)
    if kind == "leave-one-out":
        # R_i - (S - R_i) / (n - 1) = (R_i - mean) n / (n - 1)
        return offset_B * (size_G / (size_G - 1).clamp(min=1))[group_of_B]
    variance_G = segment_sum(offset_B.square(), group_of_B, num_groups) / (size_G - 1).clamp(min=1)
    return offset_B / (variance_G.sqrt() + STD_FLOOR)[group_of_B]


def turn_advantage(reward_K: Tensor, group_of_K: Tensor, index_of_K: Tensor) -> Tensor:
    """[K] `group` among the siblings' turns of the same index: (r_k - mean) / (std + 1e-6).

    `reward_K` is each turn's own reward, `index_of_K` its place in its trajectory, from 0. A turn
    that no sibling has is alone and gets 0.

    Two siblings, turn rewards [1, 0] and [0, 0]: first turns [0.7071, -0.7071], second [0, 0].
    """
    _, cell_of_K = torch.stack([group_of_K, index_of_K]).unique(dim=1, return_inverse=True)
    return trajectory_advantage("group", reward_K, cell_of_K, int(cell_of_K.max()) + 1)


def segment_decayed_sum(value_N: Tensor, segment_of_N: Tensor, decay: float) -> Tensor:
    """[N] y_n = value_n + decay * y_{n+1} within each segment, from its end.

    By doubling: after step j every y holds its next 2^j terms, so the number of steps is the
    logarithm of the longest segment. values [1, 2, 4], one segment, decay 0.5 -> [3, 4, 4].
    """
    y_N = value_N.clone()
    span = 1
    while span < len(y_N):
        same_N = segment_of_N[:-span] == segment_of_N[span:]
        if not same_N.any():
            break
        y_N[:-span] += decay**span * torch.where(same_N, y_N[span:], 0.0)
        span *= 2
    return y_N


@dataclass(frozen=True)
class Estimate:
    """What a critic's values make of a batch, per step (a token, or a turn)."""

    advantage_N: Tensor
    return_N: Tensor
    """What the critic should have said: advantage + value."""


def gae(
    reward_N: Tensor, value_N: Tensor, trajectory_of_N: Tensor, gamma: float, lam: float
) -> Estimate:
    """Generalised advantage estimation (arXiv 1506.02438) over the steps `N` of each trajectory.

    delta_n = r_n + gamma V_{n+1} - V_n, A_n = delta_n + gamma lam A_{n+1}; V is 0 behind the end. A
    step is a trained token (observations are skipped) or a turn (value of its first token).

    One trajectory, rewards [0, 1], values [0.5, 0.25], gamma 1, lam 0.5: deltas [-0.25, 0.75],
    advantages [0.125, 0.75], returns [0.625, 1].
    """
    next_N = torch.zeros_like(value_N)
    goes_on_N = trajectory_of_N[:-1] == trajectory_of_N[1:]
    next_N[:-1] = torch.where(goes_on_N, value_N[1:], 0.0)
    delta_N = reward_N + gamma * next_N - value_N
    advantage_N = segment_decayed_sum(delta_N, trajectory_of_N, gamma * lam)
    return Estimate(advantage_N, advantage_N + value_N)


def whiten(a_T: Tensor) -> Tensor:
    """[T] (a - mean) / (std + 1e-6) over the batch's tokens, std with n - 1; [1, 3] -> [-0.7071,
    0.7071]. A single token, or equal ones, become 0."""
    offset_T = a_T - a_T.mean()
    variance = offset_T.square().sum() / max(1, len(a_T) - 1)
    return offset_T / (variance.sqrt() + STD_FLOOR)
