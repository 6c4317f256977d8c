"""Every number that is told about a step, against sums done by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from leeway.learner.batch import PackedBatch, build_batch
from leeway.learner.metrics import PolicyMetrics, data_metrics, policy_metrics
from leeway.learner.objective.presets import PRESETS, Objective
from leeway.learner.update import build_update
from leeway.replay.schema import Action, Group, GroupId, Trajectory, Turn

VERSION = 10
D = (0.5, -0.1, 0.0, -0.2, -0.4)
"""Log-ratios of the five trained tokens."""
W = tuple(math.exp(d) for d in D)


def trajectory(
    name: str,
    turns: Sequence[tuple[int, int, Action]],
    versions: Sequence[int],
    reward: float,
    scores: dict[str, float],
) -> Trajectory:
    """Turns of (generated, observed, action) behind three tokens of prompt."""
    placed, position = [], 3
    for generated, observed, action in turns:
        placed.append(Turn(position, generated, observed, action))
        position += generated + observed
    return Trajectory(
        trajectory_id=name,
        token_ids=np.arange(position, dtype=np.int32),
        turns=tuple(placed),
        logprobs=np.full(len(versions), -1.0, np.float32),
        versions=np.array(versions, np.int32),
        reward=reward,
        stop_reason="answer",
        scores=scores,
        duration_s=1.0,
    )


def batch() -> PackedBatch:
    """One group: a wins with turns of 2 and 1 tokens, b loses with one of 2 and one of none."""
    a = trajectory(
        "a",
        [(2, 4, "search"), (1, 0, "answer")],
        versions=(9, 10, 10),
        reward=1.0,
        scores={"exact_match": 1.0, "think_tokens": 6.0},
    )
    b = trajectory("b", [(2, 0, "invalid"), (0, 1, "invalid")], (7, 10), 0.0, {"exact_match": 0.0})
    group = Group(group_id=GroupId("g"), question_id="q", worker_id="w", trajectories=(a, b))
    return build_batch([group])


def told(
    objective: Objective,
    d: Sequence[float] = D,
    proximal: Sequence[float] | None = None,
    num_minibatches: int = 1,
    version: int = VERSION,
) -> PolicyMetrics:
    """Of a policy whose log-probs lie `d` above the sampler's."""
    packed = batch()
    proximal_T = None if proximal is None else packed.behaviour_T + torch.tensor(proximal)
    update = build_update(packed, objective, version, num_minibatches, proximal_T)
    lp_T = packed.behaviour_T + torch.tensor(d)
    entropy_T = torch.tensor([0.5, 1.0, 1.5, 2.0, 4.0])
    return policy_metrics(update, objective, lp_T, entropy_T, version, 0.25)


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-6, abs=1e-7)


def test_clipped_are_tokens_that_the_bound_keeps_from_going_further() -> None:
    # The winner's first token at 1.65 and the loser's last at 0.67; the loser's 0.82 is inside, and
    # its 0.67 would be of no concern to a winner. Of four turns three have tokens, two a clipped.
    metrics = told(PRESETS["grpo"])
    assert metrics.clip_fraction_tokens == near(2 / 5)
    assert metrics.clip_fraction_turns == near(2 / 3)
    mirrored = told(PRESETS["grpo"], d=[-0.5, 0.1, 0.0, 0.2, 0.4])
    assert mirrored.clip_fraction_tokens == 0


def test_a_ratio_per_turn_clips_whole_turns() -> None:
    # Means 0.2, 0 and -0.3: exp(0.2) = 1.22 above 1.2, exp(-0.3) = 0.74 below 0.8.
    metrics = told(PRESETS["so-grpo"])
    assert metrics.clip_fraction_tokens == near(4 / 5)
    assert metrics.clip_fraction_turns == near(2 / 3)


def test_effective_sample_size_is_of_the_ratios_that_the_objective_uses() -> None:
    def size(w: Sequence[float]) -> float:
        return sum(w) ** 2 / sum(x * x for x in w) / 5

    turns = [math.exp(0.2)] * 2 + [1.0] + [math.exp(-0.3)] * 2
    assert told(PRESETS["grpo"]).effective_sample_size == near(size(W))
    assert told(PRESETS["so-grpo"]).effective_sample_size == near(size(turns))
    # Without a ratio of its own an objective is measured by that of each token.
    assert told(PRESETS["reinforce"]).effective_sample_size == near(size(W))


def test_log_ratios_are_told_by_size() -> None:
    metrics = told(PRESETS["grpo"])
    assert metrics.log_ratio_abs_mean == near((0.5 + 0.1 + 0.2 + 0.4) / 5)
    # In order 0, 0.1, 0.2, 0.4, 0.5; 95 % of the way from the first to the last is at place 3.8.
    assert metrics.log_ratio_abs_p95 == near(0.4 + 0.8 * 0.1)
    assert metrics.log_ratio_abs_max == near(0.5)
    assert metrics.log_ratio_old_abs_mean is None
    assert metrics.log_ratio_old_abs_p95 is None
    assert metrics.log_ratio_old_abs_max is None


def test_log_ratios_are_told_as_they_are_and_ratios_bounded() -> None:
    metrics = told(PRESETS["grpo"], d=[30.0, 0.0, 0.0, 0.0, 0.0])
    assert metrics.log_ratio_abs_max == near(30.0)
    assert metrics.kl_behaviour == near((math.exp(-20) - 1 + 20) / 5)


def test_against_a_proximal_policy_ratios_and_both_distances_are_told() -> None:
    p = (0.3, -0.1, 1.0, -0.2, 0.0)
    metrics = told(PRESETS["decoupled-grpo"], proximal=p)
    # d - p = 0.2, 0, -1, 0, -0.4
    assert metrics.log_ratio_abs_mean == near(1.2 / 5)
    assert metrics.log_ratio_old_abs_mean == near(1.6 / 5)
    assert metrics.log_ratio_old_abs_p95 == near(0.4 + 0.8 * 0.6)
    assert metrics.log_ratio_old_abs_max == near(1.0)
    k3 = [math.exp(-x) - 1 + x for x in (0.2, 0.0, -1.0, 0.0, -0.4)]
    assert metrics.kl_old == near(sum(k3) / 5)
    assert metrics.kl_behaviour == near(sum(math.exp(-x) - 1 + x for x in D) / 5)
    # Weights exp(p): 1.35, 0.90, 2.72, 0.82, 1; the third is cut to 2.
    weights = (math.exp(0.3), math.exp(-0.1), 2.0, math.exp(-0.2), 1.0)
    assert metrics.correction_mean == near(sum(weights) / 5)
    assert metrics.correction_share == near(1 / 5)


def test_a_masked_correction_counts_what_it_leaves_out() -> None:
    masked = replace(PRESETS["decoupled-grpo"], correction="mask", max_correction=1.3)
    metrics = told(masked, proximal=(0.3, -0.1, 1.0, -0.2, -0.3))
    # exp(0.3) = 1.35 and exp(1) lie above 1.3, exp(-0.3) = 0.74 below 1 / 1.3.
    assert metrics.correction_mean == near((math.exp(-0.1) + math.exp(-0.2)) / 5)
    assert metrics.correction_share == near(3 / 5)


def test_where_ratios_are_taken_against_the_sampler_both_estimates_of_kl_are_the_same() -> None:
    metrics = told(PRESETS["so-grpo"])
    assert metrics.kl_behaviour == near(sum(math.exp(-d) - 1 + d for d in D) / 5)
    assert metrics.kl_old == metrics.kl_behaviour
    assert metrics.correction_mean is None and metrics.correction_share is None


def test_entropy_is_the_mean_over_tokens_and_the_masked_share_is_handed_through() -> None:
    metrics = told(PRESETS["grpo"])
    assert metrics.entropy == near((0.5 + 1.0 + 1.5 + 2.0 + 4.0) / 5)
    assert metrics.masked_fraction == 0.25


def test_the_gap_is_of_tokens_that_this_very_version_sampled() -> None:
    # Versions 9, 10, 10, 7, 10: tokens 1, 2 and 4.
    metrics = told(PRESETS["grpo"])
    assert metrics.gap_mean == near((0.1 + 0.0 + 0.4) / 3)
    assert metrics.gap_max == near(0.4)
    of_another = told(PRESETS["grpo"], version=8)
    assert of_another.gap_mean is None and of_another.gap_max is None


def test_the_gap_is_of_the_first_minibatch() -> None:
    packed = batch()
    objective = PRESETS["grpo"]
    (first,), _ = build_update(packed, objective, VERSION, 2).minibatches
    metrics = told(objective, num_minibatches=2)
    of_trajectory = [(0.1 + 0.0) / 2, 0.4]
    assert metrics.gap_mean == near(of_trajectory[first])
    # All others are of the whole batch.
    assert metrics.entropy == near(9 / 5)


def test_staleness_is_that_of_the_oldest_token_of_each_trajectory() -> None:
    metrics = data_metrics(batch(), VERSION)
    # 10 - 9 and 10 - 7.
    assert metrics.staleness_mean == 2.0
    assert metrics.staleness_p95 == near(1 + 0.95 * 2)
    assert metrics.staleness_max == 3
    assert metrics.staleness_histogram == {1: 1, 3: 1}


def test_data_is_told_by_trajectory() -> None:
    metrics = data_metrics(batch(), VERSION)
    assert metrics.reward_mean == 0.5
    assert metrics.reward_std == 0.5
    assert metrics.turns_per_trajectory == 2.0
    assert metrics.trained_tokens_per_trajectory == 2.5
    # Prompts of 3, then 2 + 4 + 1 and 2 + 1.
    assert metrics.tokens_per_trajectory == (10 + 6) / 2
    assert metrics.invalid_share == 2 / 4
    assert (metrics.num_groups, metrics.num_trajectories, metrics.num_tokens_trained) == (1, 2, 5)
    assert metrics.num_zero_variance_groups == 0


def test_a_score_is_the_mean_over_the_trajectories_that_carry_it() -> None:
    assert data_metrics(batch(), VERSION).scores == {"exact_match": 0.5, "think_tokens": 6.0}


def test_groups_of_equal_rewards_are_counted() -> None:
    (group,) = batch().groups
    a, _ = group.trajectories
    same = Group(group_id=GroupId("same"), question_id="q", worker_id="w", trajectories=(a, a))
    metrics = data_metrics(build_batch([group, same, same]), VERSION)
    assert metrics.num_zero_variance_groups == 2
    assert (metrics.num_groups, metrics.num_trajectories) == (3, 6)
    # Rewards 1, 0, 1, 1, 1, 1: mean 5/6, variance 5/36.
    assert metrics.reward_mean == near(5 / 6)
    assert metrics.reward_std == near(math.sqrt(5) / 6)
