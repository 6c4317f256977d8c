"""What is known about one optimizer step.

Letters: `T` trained tokens of the whole batch, `K` turns, `B` trajectories. Every number is of the
whole batch, over all ranks and micro-batches.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leeway.learner.batch import PackedBatch
from leeway.learner.critic import CriticMetrics
from leeway.learner.objective.kinds import Ratio
from leeway.learner.objective.loss import clipped
from leeway.learner.objective.presets import Objective
from leeway.learner.objective.ratio import importance_ratio, kl_k3, log_ratio, segment_sum
from leeway.learner.update import Update, tokens_of


class PolicyMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Of the policy being trained against the one that sampled, and the one its ratios are taken
    against (the same, unless the objective's `old` is proximal)."""

    clip_fraction_tokens: float
    """Share of trained tokens outside the clip, on the side where it removes the gradient. Under
    cispo it bounds their weight instead; what a dual clip removes is not counted."""
    clip_fraction_turns: float
    """Share of turns with at least one such token, among turns with trained tokens."""
    effective_sample_size: float
    """(sum w)^2 / sum w^2 / T, 1 when all ratios are equal."""
    log_ratio_abs_mean: float
    log_ratio_abs_p95: float
    log_ratio_abs_max: float
    """Of the absolute token log-ratio to the sampler, before clamping."""
    log_ratio_old_abs_mean: float | None
    log_ratio_old_abs_p95: float | None
    log_ratio_old_abs_max: float | None
    """Of |d|, the one to the policy that ratios are taken against; None where that is the
    sampler."""
    kl_behaviour: float
    """Mean over trained tokens of k3, the estimate of KL(policy || sampler)."""
    kl_old: float
    """The same against the policy that ratios are taken against."""
    correction_mean: float | None
    """Mean weight of a token outside the clip; None without a correction."""
    correction_share: float | None
    """Share of tokens whose weight was truncated or masked; None without a correction."""
    masked_fraction: float | None
    """Share of tokens that `second-moment` left without a gradient; None under other surrogates."""
    entropy: float
    """Mean over trained tokens, in nats."""
    gap_mean: float | None
    gap_max: float | None
    """|log-prob of learner minus that of engine| over tokens of the first minibatch that the
    learner's very version sampled. None without such a token."""


class DataMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Of the trajectories themselves."""

    staleness_mean: float
    staleness_p95: float
    staleness_max: int
    """Of the learner version minus the oldest trained-token version, per trajectory."""
    staleness_histogram: dict[int, int]
    """Trajectories by staleness."""
    reward_mean: float
    reward_std: float
    scores: dict[str, float]
    """Mean by name over the trajectories that carry the score, such as exact_match,
    think_tokens."""
    turns_per_trajectory: float
    trained_tokens_per_trajectory: float
    tokens_per_trajectory: float
    """Prompt, generated and observed tokens together."""
    invalid_share: float
    """Share of turns whose action could not be parsed."""
    num_zero_variance_groups: int
    num_groups: int
    num_trajectories: int
    num_tokens_trained: int


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step."""

    version: int
    """The version the step made."""
    loss: float
    learning_rate: float
    grad_norm: float
    """Before it was bounded."""
    grad_norm_applied: float
    """After bounding and normalization: what the optimizer saw."""
    ctn_norm: float | None
    """||C||, the norm of what the clip removed; 0 when nothing was clipped, None where neither
    objective nor `learner.measure_ctn` asks for it. The largest of the minibatches, as ctn_divisor;
    loss, rate and norms of the gradient are means over them."""
    ctn_divisor: float
    """What the gradient, or the learning rate, was divided by."""
    policy: PolicyMetrics
    data: DataMetrics
    critic: CriticMetrics | None
    """None for an objective without a critic."""
    num_optimizer_steps: int
    """One for each minibatch."""
    num_micro_batches: int
    """Of one rank."""
    num_tokens_read: int
    """Of one rank: positions its passes read, without those for ||C||."""
    seconds: float
    seconds_ctn: float
    """Spent on ||C||."""

    def as_dict(self) -> dict[str, float]:
        """Flat, by field name; `score/NAME` and `staleness_histogram/K` for the two mappings."""
        flat: dict[str, float] = {}
        for part in (self, self.policy, self.data, self.critic):
            for name in part.__struct_fields__ if part is not None else ():
                value = getattr(part, name)
                if isinstance(value, (int, float)):
                    flat[name] = value
        flat |= {f"score/{name}": value for name, value in self.data.scores.items()}
        flat |= {f"staleness_histogram/{k}": n for k, n in self.data.staleness_histogram.items()}
        return flat


def policy_metrics(
    update: Update,
    objective: Objective,
    lp_T: Tensor,
    entropy_T: Tensor,
    version: int,
    masked_fraction: float | None = None,
) -> PolicyMetrics:
    """From the log-probs that each token's optimizer step started from; an objective without ratio
    is measured by `token`."""
    batch, tokens = update.batch, update.tokens
    gap_T, gap_old_T = (lp_T - batch.behaviour_T).abs(), (lp_T - tokens.old_T).abs()
    old_mean, old_p95, old_max = _size(gap_old_T) if objective.old == "proximal" else (None,) * 3
    mean, p95, largest = _size(gap_T)
    d_T = log_ratio(lp_T, tokens.old_T)
    ratio: Ratio = "token" if objective.ratio == "none" else objective.ratio
    w_T = importance_ratio(ratio, d_T, tokens.segments).double()
    clipped_T = clipped(objective, w_T, tokens.a_T)
    turn_of_T, num_turns = tokens.segments.turn_of_T, tokens.segments.num_turns
    has_tokens_K = segment_sum(torch.ones_like(w_T), turn_of_T, num_turns) > 0
    has_clipped_K = segment_sum(clipped_T.double(), turn_of_T, num_turns) > 0
    # Later minibatches are read by weights that have moved on from the version.
    first_S = tokens_of(batch, update.minibatches[0])
    on_policy_E = gap_T[first_S[batch.version_T[first_S] == version]]
    correction_mean, correction_share = _correction(update, objective)
    return PolicyMetrics(
        clip_fraction_tokens=clipped_T.double().mean().item(),
        clip_fraction_turns=(has_clipped_K.sum() / has_tokens_K.sum()).item(),
        effective_sample_size=(w_T.sum() ** 2 / w_T.square().sum() / len(w_T)).item(),
        log_ratio_abs_mean=mean,
        log_ratio_abs_p95=p95,
        log_ratio_abs_max=largest,
        log_ratio_old_abs_mean=old_mean,
        log_ratio_old_abs_p95=old_p95,
        log_ratio_old_abs_max=old_max,
        kl_behaviour=kl_k3(log_ratio(lp_T, batch.behaviour_T)).mean().item(),
        kl_old=kl_k3(d_T).mean().item(),
        correction_mean=correction_mean,
        correction_share=correction_share,
        masked_fraction=masked_fraction,
        entropy=entropy_T.mean().item(),
        gap_mean=on_policy_E.mean().item() if len(on_policy_E) else None,
        gap_max=on_policy_E.max().item() if len(on_policy_E) else None,
    )


def _size(gap_T: Tensor) -> tuple[float, float, float]:
    """Mean, 95th percentile and largest."""
    return gap_T.mean().item(), float(np.quantile(gap_T.numpy(), 0.95)), gap_T.max().item()


def _correction(update: Update, objective: Objective) -> tuple[float | None, float | None]:
    """Mean weight, and the share of tokens whose weight the bound changed."""
    correction_T, tokens = update.tokens.correction_T, update.tokens
    if correction_T is None:
        return None, None
    w_T = log_ratio(tokens.old_T, update.batch.behaviour_T).exp()
    return correction_T.mean().item(), (correction_T != w_T).double().mean().item()


def staleness(batch: PackedBatch, version: int) -> NDArray[np.int64]:
    """[B] learner at 10, oldest versions [8, 9] -> staleness [2, 1]."""
    return version - np.array([t.oldest_version for t in batch.trajectories])


def data_metrics(batch: PackedBatch, version: int) -> DataMetrics:
    """Of a batch that a learner at `version` trains."""
    staleness_B = staleness(batch, version)
    trajectories = batch.trajectories
    rewards_B = np.array([t.reward for t in trajectories])
    actions = [turn.action for t in trajectories for turn in t.turns]
    return DataMetrics(
        staleness_mean=float(staleness_B.mean()),
        staleness_p95=float(np.quantile(staleness_B, 0.95)),
        staleness_max=int(staleness_B.max()),
        staleness_histogram=dict(sorted(Counter(staleness_B.tolist()).items())),
        reward_mean=float(rewards_B.mean()),
        reward_std=float(rewards_B.std()),
        scores=_score_means(batch),
        turns_per_trajectory=len(actions) / len(trajectories),
        trained_tokens_per_trajectory=batch.num_tokens / len(trajectories),
        tokens_per_trajectory=sum(len(t.token_ids) for t in trajectories) / len(trajectories),
        invalid_share=actions.count("invalid") / len(actions),
        num_zero_variance_groups=batch.num_zero_variance_groups,
        num_groups=len(batch.groups),
        num_trajectories=len(trajectories),
        num_tokens_trained=batch.num_tokens,
    )


def _score_means(batch: PackedBatch) -> dict[str, float]:
    names = sorted({name for t in batch.trajectories for name in t.scores})
    return {
        name: float(np.mean([t.scores[name] for t in batch.trajectories if name in t.scores]))
        for name in names
    }
