"""The packed objective against the loop that one would write over padded tensors.

Both sides start from the same log-probs and give the same loss and the same gradient with respect
to them; `tests/unit/test_bench.py` checks it. The log-probs come packed for ours and padded for the
loop, so that neither pays for the other's layout.

Letters: `T` trained tokens, `B` trajectories, `L` padded tokens of a trajectory, `K` turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leeway.learner.batch import PackedBatch
from leeway.learner.objective.loss import loss
from leeway.learner.objective.presets import PRESETS, Objective
from leeway.learner.update import build_update
from leeway.services.bench.episodes import Shape, build_episodes
from leeway.services.bench.result import BenchResult
from leeway.services.bench.timing import interleaved

Outcome = tuple[Tensor, Tensor]
"""Loss, and its gradient with respect to the log-probs."""


@dataclass(frozen=True)
class Padded:
    """A batch as a padded implementation holds it."""

    old_BL: Tensor
    turn_BL: Tensor
    """int64 index of the turn in its trajectory; -1 for prompt, observation and padding."""
    value_BL: Tensor
    reward_B: Tensor
    group_B: list[int]
    num_turns_B: list[int]


@dataclass(frozen=True)
class Case:
    """The same batch and log-probs in both layouts."""

    batch: PackedBatch
    value_T: Tensor
    lp_T: Tensor
    padded: Padded
    lp_BL: Tensor


def build_case(
    num_trajectories: int, turn_tokens: tuple[int, int], num_turns: int = 4, seed: int = 0
) -> Case:
    """Turns of `turn_tokens` (fewest, most) trained tokens, 200 observed between; groups of 8."""
    rng = np.random.default_rng(seed)
    fewest, most = turn_tokens
    shapes = [
        Shape(100, tuple(rng.integers(fewest, most + 1, num_turns).tolist()), (200,) * 3)
        for _ in range(num_trajectories)
    ]
    rewards = rng.integers(0, 2, num_trajectories).astype(float).tolist()
    batch = build_episodes(shapes, rewards, 8, 32_000, rng)
    generator = torch.Generator().manual_seed(seed)
    # Turns drift apart by about the clip distance, so both branches of the clip occur.
    drift_K = 0.2 * torch.randn(batch.segments.num_turns, generator=generator)
    noise_T = 0.1 * torch.randn(batch.num_tokens, generator=generator)
    lp_T = batch.behaviour_T + drift_K[batch.segments.turn_of_T] + noise_T
    value_T = torch.rand(batch.num_tokens, generator=generator)
    mask_BL, turn_BL = _layout(batch)
    padded = Padded(
        _pad(batch.behaviour_T, mask_BL),
        turn_BL,
        _pad(value_T, mask_BL),
        batch.reward_B.float(),
        batch.group_of_B.tolist(),
        [len(t.turns) for t in batch.trajectories],
    )
    return Case(batch, value_T, lp_T.requires_grad_(), padded, _pad(lp_T, mask_BL).requires_grad_())


def _layout(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """[B, L] mask of trained tokens, and their turns."""
    turn_BL = torch.full(
        (len(batch.trajectories), max(len(t.token_ids) for t in batch.trajectories)), -1
    )
    for b, trajectory in enumerate(batch.trajectories):
        for k, turn in enumerate(trajectory.turns):
            turn_BL[b, turn.start : turn.start + turn.num_generated] = k
    return turn_BL >= 0, turn_BL


def _pad(value_T: Tensor, mask_BL: Tensor) -> Tensor:
    value_BL = torch.zeros(mask_BL.shape)
    value_BL[mask_BL] = value_T.detach()
    return value_BL


# --- ours ---


def packed(objective: Objective, case: Case) -> Callable[[], Outcome]:
    """The loss alone: advantages and weights are made before."""
    tokens = build_update(case.batch, objective, 0, value_T=case.value_T).tokens

    def work() -> Outcome:
        total = loss(objective, case.lp_T, tokens)
        return total.detach(), torch.autograd.grad(total, case.lp_T)[0]

    return work


def packed_update(objective: Objective, case: Case) -> Callable[[], Outcome]:
    """Advantages, weights and the loss."""
    return lambda: packed(objective, case)()


# --- the padded loop ---


def padded_loss(lp_BL: Tensor, batch: Padded, a_BL: Tensor, objective: Objective) -> Tensor:
    """Mean over trajectories of the mean over their tokens, a ratio per turn."""
    assert objective.eps_low is not None and objective.eps_high is not None
    low, high = 1 - objective.eps_low, 1 + objective.eps_high
    losses: list[Tensor] = []
    for b, num_turns in enumerate(batch.num_turns_B):
        log_ratio_L = lp_BL[b] - batch.old_BL[b]
        total = lp_BL.new_zeros(())
        for k in range(num_turns):
            mask_L = batch.turn_BL[b] == k
            ratio = ((log_ratio_L * mask_L).sum() / mask_L.sum()).exp()
            term_L = torch.minimum(ratio * a_BL[b], ratio.clamp(low, high) * a_BL[b])
            total = total + (term_L * mask_L).sum()
        losses.append(-total / (batch.turn_BL[b] >= 0).sum())
    return torch.stack(losses).mean()


def padded_group_advantages(batch: Padded) -> Tensor:
    """[B, L] (reward - mean of the group) / (std + 1e-6), the same for every token."""
    a_BL = torch.zeros(batch.old_BL.shape)
    for group in sorted(set(batch.group_B)):
        rows = [b for b, of_row in enumerate(batch.group_B) if of_row == group]
        reward = batch.reward_B[rows]
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        for b, value in zip(rows, advantage, strict=True):
            a_BL[b] = value * (batch.turn_BL[b] >= 0)
    return a_BL


def padded_turn_gae(batch: Padded, gamma: float, lam: float) -> Tensor:
    """[B, L] generalised advantage estimation over turns; the last one earns the reward."""
    a_BL = torch.zeros(batch.old_BL.shape)
    for b, num_turns in enumerate(batch.num_turns_B):
        next_value = next_advantage = torch.zeros(())
        for k in reversed(range(num_turns)):
            position = (batch.turn_BL[b] == k).nonzero().squeeze(-1)
            value = batch.value_BL[b, position[0]]
            reward = batch.reward_B[b] if k == num_turns - 1 else 0.0
            next_advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
            a_BL[b, position] = next_advantage
            next_value = value
    return a_BL


def padded(objective: Objective, case: Case) -> Callable[[], Outcome]:
    """The loss alone: advantages are made before."""
    a_BL = _padded_advantages(objective, case.padded)

    def work() -> Outcome:
        total = padded_loss(case.lp_BL, case.padded, a_BL, objective)
        return total.detach(), torch.autograd.grad(total, case.lp_BL)[0]

    return work


def padded_update(objective: Objective, case: Case) -> Callable[[], Outcome]:
    """Advantages and the loss."""
    return lambda: padded(objective, case)()


def _padded_advantages(objective: Objective, batch: Padded) -> Tensor:
    if objective.needs_critic:
        return padded_turn_gae(batch, objective.gamma, objective.gae_lambda)
    return padded_group_advantages(batch)


# --- run ---


def run(*, quick: bool) -> BenchResult:
    """256 trajectories of 4 turns with 2,000 trained tokens; `quick` has fewer repeats."""
    repeats = 3 if quick else 11
    even, ragged = build_case(256, (500, 500)), build_case(256, (50, 950))
    so_grpo, so_ppo = PRESETS["so-grpo"], PRESETS["so-ppo"]
    cases = [
        ("so-grpo, 4 x 500 tokens", even, so_grpo, packed, padded),
        ("so-grpo, 4 x 50 to 950 tokens", ragged, so_grpo, packed, padded),
        ("the same, with group advantages", ragged, so_grpo, packed_update, padded_update),
        ("so-ppo, with turn GAE", ragged, so_ppo, packed_update, padded_update),
    ]
    timed = [
        (name, case, interleaved(ours(objective, case), loop(objective, case), repeats))
        for name, case, objective, ours, loop in cases
    ]
    alone, whole = (min(rows, key=_speedup) for rows in (timed[:2], timed[2:]))
    return BenchResult(
        name="objective",
        columns=("case", "trajectories", "trained tokens", "packed ms", "padded ms", "speedup"),
        rows=tuple(
            (
                name,
                str(len(case.batch.trajectories)),
                f"{case.batch.num_tokens:,}",
                f"{1e3 * ours_s:.1f}",
                f"{1e3 * loop_s:.1f}",
                f"{loop_s / ours_s:.1f}",
            )
            for name, case, (ours_s, loop_s) in timed
        ),
        keys={
            "speedup": _speedup(alone),
            "packed_ms": 1e3 * alone[2][0],
            "padded_ms": 1e3 * alone[2][1],
            "speedup_with_advantages": _speedup(whole),
        },
    )


def _speedup(row: tuple[str, Case, tuple[float, float]]) -> float:
    return row[2][1] / row[2][0]
