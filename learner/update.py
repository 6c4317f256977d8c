"""What one step trains on: old log-probs, advantages and weights, made once for the whole batch.

Letters: `T` trained tokens of the batch, `K` turns, `N` steps of advantage estimation (trained
tokens, or turns with trained tokens), `B` trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leeway.learner.batch import PackedBatch, turn_and_trajectory
from leeway.learner.errors import NonFiniteError
from leeway.learner.objective.advantage import Estimate, gae, trajectory_advantage, turn_advantage
from leeway.learner.objective.advantage import whiten as whitened
from leeway.learner.objective.correction import correction_weight
from leeway.learner.objective.loss import Tokens
from leeway.learner.objective.presets import Objective
from leeway.learner.objective.ratio import ordered_size, spread
from leeway.learner.objective.reduce import reduce_weight


@dataclass(frozen=True)
class ValueTargets:
    """What the critic learns from one batch. `N` tokens: all trained ones, or the first of each
    turn."""

    token_N: Tensor
    """[N] int64 index of each in the batch."""
    old_N: Tensor
    """[N] value at the start of the step."""
    return_N: Tensor
    """[N] what it should have been."""


@dataclass(frozen=True)
class Update:
    """One step: a batch, and what its objective makes of it."""

    batch: PackedBatch
    tokens: Tokens
    """[T] weights sum to 1 over each minibatch."""
    minibatches: tuple[tuple[int, ...], ...]
    """Trajectories of each optimizer step."""
    targets: ValueTargets | None
    """None without a critic."""

    def has_gradient(self, trajectories: tuple[int, ...]) -> list[bool]:
        """Which of some trajectories have an advantage other than 0."""
        offset = self.batch.offset_B1
        is_zero_T = (self.tokens.a_T == 0).numpy()
        return [not is_zero_T[offset[b] : offset[b + 1]].all() for b in trajectories]


def build_update(
    batch: PackedBatch,
    objective: Objective,
    version: int,
    num_minibatches: int = 1,
    proximal_T: Tensor | None = None,
    value_T: Tensor | None = None,
) -> Update:
    """`proximal_T` [T] log-probs at the start of the step, where the objective's `old` is proximal;
    `value_T` [T] the critic's, where it has one.

    Raises NonFiniteError, naming trajectory and turn, for an advantage that is not finite.
    """
    exact_T, targets = _advantages(batch, objective, value_T)
    # As it is trained: float32 ends at 3.4e38.
    a_T = exact_T.float()
    check_finite(batch, a_T, "advantage")
    segments, behaviour_T = batch.segments, batch.behaviour_T
    minibatches = _minibatches(len(batch.trajectories), num_minibatches, version)
    weight_T = _weights(batch, objective, minibatches)
    correction_T = None
    if objective.correction != "none":
        assert proximal_T is not None, "the correction needs log-probs at the start of the step"
        correction_T = correction_weight(
            objective.correction, proximal_T, behaviour_T, objective.max_correction
        )
    old_T = behaviour_T if proximal_T is None else proximal_T
    tokens = Tokens(old_T, a_T, weight_T, segments, correction_T)
    return Update(batch, tokens, minibatches, targets)


def _weights(
    batch: PackedBatch, objective: Objective, minibatches: tuple[tuple[int, ...], ...]
) -> Tensor:
    """[T] reduce weights, with the denominators of each token's minibatch."""
    segments = batch.segments
    if len(minibatches) == 1:
        return reduce_weight(objective.reduce, segments)
    weight_T = torch.zeros(batch.num_tokens)
    for trajectories in minibatches:
        token_S = tokens_of(batch, trajectories)
        weight_T[token_S] = reduce_weight(objective.reduce, segments.take(token_S))
    return weight_T


def tokens_of(batch: PackedBatch, trajectories: tuple[int, ...]) -> Tensor:
    """[S] int64 index of the trained tokens of some trajectories."""
    return torch.from_numpy(np.concatenate(batch.spans(trajectories)))


def _minibatches(
    num_trajectories: int, num_minibatches: int, version: int
) -> tuple[tuple[int, ...], ...]:
    """Shares of the batch, drawn by the version so that every rank and a resumed run agree."""
    if num_minibatches == 1:
        return (tuple(range(num_trajectories)),)
    order = np.random.default_rng(version).permutation(num_trajectories)
    shares = np.array_split(order, min(num_minibatches, num_trajectories))
    return tuple(tuple(sorted(share.tolist())) for share in shares)


def _advantages(
    batch: PackedBatch, objective: Objective, value_T: Tensor | None
) -> tuple[Tensor, ValueTargets | None]:
    """[T] and what the critic learns. Float64, but where the tokens of a turn or a trajectory share
    a number that nothing else is made of: that is rounded before they get it."""
    targets = None
    if not objective.needs_critic:
        a_T = _without_critic(batch, objective)
    else:
        assert value_T is not None, "the advantage needs a critic's values"
        check_finite(batch, value_T, "value")
        by = _by_turn if objective.advantage == "gae-turn" else _by_token
        a_T, targets = by(batch, objective, value_T)
    return (whitened(a_T) if objective.whiten else a_T), targets


def _without_critic(batch: PackedBatch, objective: Objective) -> Tensor:
    if objective.advantage == "group-turn" and batch.has_turn_rewards:
        # A turn without tokens is nobody's sibling: no token could carry its advantage.
        turn_N, _, _ = _turns_with_tokens(batch)
        a_K = torch.zeros_like(batch.turn_reward_K)
        a_K[turn_N] = turn_advantage(
            batch.turn_reward_K[turn_N],
            batch.group_of_B[batch.trajectory_of_K[turn_N]],
            batch.turn_index_K[turn_N],
        )
        return spread(_shared(a_K, objective), batch.segments.turn_of_T)
    kind = "group" if objective.advantage == "group-turn" else objective.advantage
    a_B = trajectory_advantage(kind, batch.reward_B, batch.group_of_B, len(batch.groups))
    return spread(_shared(a_B, objective), batch.segments.trajectory_of_T)


def _shared(a_N: Tensor, objective: Objective) -> Tensor:
    return a_N if objective.whiten else a_N.float()


def _by_token(
    batch: PackedBatch, objective: Objective, value_T: Tensor
) -> tuple[Tensor, ValueTargets]:
    value_T, segments = value_T.double(), batch.segments
    turn_N, first_N, size_N = _turns_with_tokens(batch)
    reward_T = torch.zeros_like(value_T)
    reward_T[first_N + size_N - 1] = batch.turn_reward_K[turn_N]
    estimate = gae(
        reward_T, value_T, segments.trajectory_of_T, objective.gamma, objective.gae_lambda
    )
    return estimate.advantage_N, _targets(torch.arange(batch.num_tokens), value_T, estimate)


def _by_turn(
    batch: PackedBatch, objective: Objective, value_T: Tensor
) -> tuple[Tensor, ValueTargets]:
    segments = batch.segments
    turn_N, first_N, _ = _turns_with_tokens(batch)
    value_N = value_T[first_N].double()
    estimate = gae(
        batch.turn_reward_K[turn_N],
        value_N,
        batch.trajectory_of_K[turn_N],
        objective.gamma,
        objective.gae_lambda,
    )
    a_K = torch.zeros_like(batch.turn_reward_K)
    a_K[turn_N] = estimate.advantage_N
    a_T = spread(_shared(a_K, objective), segments.turn_of_T)
    return a_T, _targets(first_N, value_N, estimate)


def _turns_with_tokens(batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """[N] number, first token and size of each turn that has trained tokens."""
    size_K = ordered_size(batch.segments.turn_of_T, batch.segments.num_turns)
    turn_N = size_K.nonzero().squeeze(-1)
    return turn_N, (size_K.cumsum(0) - size_K)[turn_N], size_K[turn_N]


def _targets(token_N: Tensor, value_N: Tensor, estimate: Estimate) -> ValueTargets:
    return ValueTargets(token_N, value_N, estimate.return_N)


def check_finite(batch: PackedBatch, value_T: Tensor, name: str) -> None:
    """Raise NonFiniteError, naming trajectory and turn, unless every [T] number is finite."""
    # A sum is finite only if all numbers are, and is had in a fraction of the time.
    if torch.isfinite(value_T.sum()):
        return
    is_finite_T = torch.isfinite(value_T)
    if not is_finite_T.all():
        bad = int((~is_finite_T).nonzero()[0])
        where, value = turn_and_trajectory(batch, bad), value_T[bad].item()
        raise NonFiniteError(f"{where}: {name} is {value}; this optimizer step was not taken")
