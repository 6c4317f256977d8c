"""Importance ratios: how far the policy has moved from the one that sampled.

Letters: `T` trained tokens, `K` turns, `B` trajectories; `_T` is one value per trained token.
`d_T = lp_T - old_T`. Segments are given by an index per token, so turns need no padding, need not
have equal lengths, and two adjacent turns stay two. Sources: `turn` is
arXiv 2511.20718, `sequence` is GSPO (arXiv 2507.18071), `turn-arithmetic` a second-hand note on the
former.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from leeway.learner.objective.kinds import Ratio

MAX_LOG_RATIO: Final = 20.0
"""Log-ratios are clamped to +-20 before any exp: exp(20) = 4.9e8 keeps products finite in
float32."""


@dataclass(frozen=True)
class Segments:
    """Which turn and which trajectory each trained token belongs to."""

    turn_of_T: Tensor
    """[T] int64, unique over the batch."""
    trajectory_of_T: Tensor
    """[T] int64."""
    num_turns: int
    num_trajectories: int

    def take(self, token_S: Tensor | slice) -> Segments:
        """The segments of `S` chosen tokens, under the same numbers."""
        return Segments(
            self.turn_of_T[token_S],
            self.trajectory_of_T[token_S],
            self.num_turns,
            self.num_trajectories,
        )

    def to(self, device: torch.device) -> Segments:
        """The same segments on another device."""
        return Segments(
            self.turn_of_T.to(device),
            self.trajectory_of_T.to(device),
            self.num_turns,
            self.num_trajectories,
        )


def segment_sum(value_T: Tensor, segment_of_T: Tensor, num_segments: int) -> Tensor:
    """[S] sums. values [1, 2, 5], segments [0, 0, 1] -> [3, 5]."""
    zero_S = value_T.new_zeros(num_segments)
    return zero_S.index_add(0, segment_of_T, value_T)


def segment_size(segment_of_T: Tensor, num_segments: int) -> Tensor:
    """[S] int64, tokens of each segment. segments [0, 0, 1] -> [2, 1]."""
    if segment_of_T.is_cuda:
        # bincount waits there for the largest index.
        zero_S = segment_of_T.new_zeros(num_segments)
        return zero_S.index_add_(0, segment_of_T, torch.ones_like(segment_of_T))
    return torch.bincount(segment_of_T, minlength=num_segments)


def ordered_size(segment_of_T: Tensor, num_segments: int) -> Tensor:
    """[S] int64, tokens of each segment where numbers never fall, as turns and trajectories stand:
    two bounds for each segment are looked up, whatever the number of tokens. segments [0, 0, 2], 3
    -> [2, 0, 1]."""
    number_S = torch.arange(num_segments + 1, device=segment_of_T.device)
    return torch.searchsorted(segment_of_T, number_S).diff()


def spread(value_S: Tensor, segment_of_T: Tensor) -> Tensor:
    """[T] the value of each token's segment. values [3, 5], segments [0, 0, 1] -> [3, 3, 5].

    Indexing by brackets gives the same; its backward pass takes three times as long on a CPU.
    """
    return value_S.index_select(0, segment_of_T)


def segment_mean(value_T: Tensor, segment_of_T: Tensor, num_segments: int) -> Tensor:
    """[S] means; 0 for a segment without tokens. values [1, 2, 5], segments [0, 0, 1] -> [1.5,
    5]."""
    count_S = segment_size(segment_of_T, num_segments).clamp_(min=1)
    return segment_sum(value_T, segment_of_T, num_segments) / count_S


def log_ratio(lp_T: Tensor, old_T: Tensor) -> Tensor:
    """d_T = lp_T - old_T, clamped to +-20."""
    return (lp_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratio(kind: Ratio, d_T: Tensor, segments: Segments) -> Tensor:
    """w_T, one ratio per token, differentiable in d_T.

    none              1
    token             w_t = exp(d_t)
    turn              w_k = exp(mean over the turn of d_t), the same for every token of the turn
    turn-arithmetic   w_k = mean over the turn of exp(d_t)
    sequence          w_i = exp(mean over the trajectory of d_t)
    sequence-product  w_i = exp(sum over the trajectory of d_t), the sum clamped to +-20

    One turn with d = [0.0, 0.2]: token [1, 1.2214], turn 1.1052, turn-arithmetic 1.1107.
    """
    if kind == "none":
        return torch.ones_like(d_T)
    if kind == "token":
        return d_T.exp()
    if kind == "turn":
        w_K = segment_mean(d_T, segments.turn_of_T, segments.num_turns).exp()
        return spread(w_K, segments.turn_of_T)
    if kind == "turn-arithmetic":
        w_K = segment_mean(d_T.exp(), segments.turn_of_T, segments.num_turns)
        return spread(w_K, segments.turn_of_T)
    return _sequence_ratio(kind, d_T, segments)


def _sequence_ratio(kind: Ratio, d_T: Tensor, segments: Segments) -> Tensor:
    reduce = segment_mean if kind == "sequence" else segment_sum
    d_B = reduce(d_T, segments.trajectory_of_T, segments.num_trajectories)
    w_B = d_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return spread(w_B, segments.trajectory_of_T)


def kl_k3(d_T: Tensor) -> Tensor:
    """[T] Schulman's k3 estimate of KL(pi || old): exp(-d) - 1 + d, never negative.

    d = 0 -> 0; d = 0.1 -> 0.004837.
    """
    return torch.expm1(-d_T) + d_T
