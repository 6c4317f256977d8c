"""Advantages without a critic: a trajectory's reward against its siblings or the batch.

Letters: `B` trajectories, `G` groups; `group_of_B` maps each trajectory to its group. Float64 in
and out.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from leeway.learner.objective.ratio import segment_mean, segment_sum

Advantage = Literal["group", "group-unscaled", "group-turn", "leave-one-out", "batch"]

STD_FLOOR: Final = 1e-6


def has_equal_rewards(reward_B: Tensor, group_of_B: Tensor, num_groups: int) -> Tensor:
    """[G] bool: all rewards of the group are the same number, so it teaches nothing by itself."""
    low_G = torch.full((num_groups,), torch.inf, dtype=reward_B.dtype)
    low_G = low_G.scatter_reduce(0, group_of_B, reward_B, "amin")
    high_G = torch.full((num_groups,), -torch.inf, dtype=reward_B.dtype)
    high_G = high_G.scatter_reduce(0, group_of_B, reward_B, "amax")
    return low_G == high_G


def advantage(kind: Advantage, reward_B: Tensor, group_of_B: Tensor, num_groups: int) -> Tensor:
    """[B] one advantage per trajectory; each of its tokens shares it.

    group           (R_i - mean of the group) / (std of the group + 1e-6), std with n - 1 (GRPO)
    group-unscaled  R_i - mean of the group
    group-turn      equal to `group`: records carry no turn rewards
    leave-one-out   R_i - mean of the others (RLOO)
    batch           R_i - mean of the batch (REINFORCE with baseline)

    Rewards [1, 0, 0] of one group: group [1.1547, -0.5774, -0.5774], leave-one-out [1, -0.5, -0.5],
    batch [0.6667, -0.3333, -0.3333]. A group of equal rewards is exactly 0 in the first four.
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
