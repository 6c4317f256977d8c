"""Aggregation over tokens, as one weight per token.

The weights are computed once from the WHOLE batch, before it is split into micro-batches and
ranks, so that the loss is a plain sum of `weight_T * term_T` and any split gives the same
gradient. They sum to 1.

Letters: `T` trained tokens, `B` trajectories of |y_i| tokens and n_i turns of |y_k| tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leeway.learner.objective.kinds import Reduce
from leeway.learner.objective.ratio import Segments, ordered_size, segment_sum, spread


def reduce_weight(kind: Reduce, segments: Segments, dtype: torch.dtype = torch.float32) -> Tensor:
    """[T] computed in float64, given in `dtype`. Segments stand in order.

    token       1 / T
    trajectory  1 / (B |y_i|), the paper's 1/|y| (arXiv 2511.20718, GRPO)
    turn        1 / (B n_i |y_k|), the second-hand note's 1/n; turns without trained tokens do not
    count

    Trajectories of turns [[1], [2 tokens, 1]]: tokens are 4, so token -> 1/4 each;
    trajectory -> [1/2, 1/6, 1/6, 1/6]; turn -> [1/2, 1/8, 1/8, 1/4].
    """
    turn_of_T, trajectory_of_T = segments.turn_of_T, segments.trajectory_of_T
    if kind == "token":
        size = len(turn_of_T)
        return torch.full((size,), 1 / size, dtype=dtype, device=turn_of_T.device)
    size_B = ordered_size(trajectory_of_T, segments.num_trajectories)
    num_trajectories = int((size_B > 0).sum())
    if kind == "trajectory":
        return spread((1 / (num_trajectories * size_B.double())).to(dtype), trajectory_of_T)
    size_T = spread(ordered_size(turn_of_T, segments.num_turns).double(), turn_of_T)
    # 1/|y_k| summed over the tokens of a trajectory counts its turns.
    turns_B = segment_sum(1 / size_T, trajectory_of_T, segments.num_trajectories)
    return (1 / (num_trajectories * spread(turns_B, trajectory_of_T) * size_T)).to(dtype)
