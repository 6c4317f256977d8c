"""Importance ratios against hand-computed numbers, identities, and the turn-level lemma."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from leeway.learner.objective.loss import BatchTerms, Tokens, loss
from leeway.learner.objective.presets import PRESETS
from leeway.learner.objective.ratio import (
    Ratio,
    Segments,
    importance_ratio,
    kl_k3,
    log_ratio,
    ordered_size,
    segment_mean,
    segment_size,
)
from leeway.learner.objective.reduce import reduce_weight

RATIOS: tuple[Ratio, ...] = ("token", "turn", "turn-arithmetic", "sequence")


def segments(*turn_sizes_of_trajectory: list[int]) -> Segments:
    turns = [n for sizes in turn_sizes_of_trajectory for n in sizes]
    sizes = [sum(s) for s in turn_sizes_of_trajectory]
    return Segments(
        torch.repeat_interleave(torch.tensor(turns)),
        torch.repeat_interleave(torch.tensor(sizes)),
        len(turns),
        len(sizes),
    )


@pytest.mark.parametrize(
    ("segment_of_T", "num_segments", "sizes"),
    [([0, 0, 2], 3, [2, 0, 1]), ([1, 1], 4, [0, 2, 0, 0]), ([0], 1, [1]), ([], 2, [0, 0])],
)
def test_sizes_of_segments_in_order_are_those_of_any(
    segment_of_T: list[int], num_segments: int, sizes: list[int]
) -> None:
    index_T = torch.tensor(segment_of_T, dtype=torch.int64)
    assert ordered_size(index_T, num_segments).tolist() == sizes
    assert segment_size(index_T, num_segments).tolist() == sizes


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [1.0, 1.0, 1.0]),
        ("token", [1.0, math.exp(0.2), math.exp(0.4)]),
        ("turn", [math.exp(0.1), math.exp(0.1), math.exp(0.4)]),
        ("turn-arithmetic", [(1 + math.exp(0.2)) / 2] * 2 + [math.exp(0.4)]),
        ("sequence", [math.exp(0.2)] * 3),
        ("sequence-product", [math.exp(0.6)] * 3),
    ],
)
def test_ratio_of_a_turn_of_two_and_a_turn_of_one(kind: Ratio, expected: list[float]) -> None:
    d_T = torch.tensor([0.0, 0.2, 0.4], dtype=torch.float64)
    w_T = importance_ratio(kind, d_T, segments([2, 1]))
    assert w_T.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["turn", "turn-arithmetic"])
def test_one_token_turns_make_the_turn_ratio_the_token_ratio(kind: Ratio) -> None:
    d_T, s = torch.randn(5, dtype=torch.float64), segments([1, 1, 1], [1, 1])
    torch.testing.assert_close(importance_ratio(kind, d_T, s), importance_ratio("token", d_T, s))


def test_one_turn_trajectories_make_the_turn_ratio_the_sequence_ratio() -> None:
    d_T, s = torch.randn(5, dtype=torch.float64), segments([3], [2])
    torch.testing.assert_close(
        importance_ratio("turn", d_T, s), importance_ratio("sequence", d_T, s)
    )


@pytest.mark.parametrize("kind", RATIOS)
def test_equal_policies_have_ratio_one_and_no_divergence(kind: Ratio) -> None:
    lp_T = torch.randn(5)
    d_T = log_ratio(lp_T, lp_T)
    assert importance_ratio(kind, d_T, segments([3], [2])).tolist() == [1.0] * 5
    assert kl_k3(d_T).tolist() == [0.0] * 5


@pytest.mark.parametrize("kind", [*RATIOS, "sequence-product"])
def test_extreme_log_ratios_stay_finite(kind: Ratio) -> None:
    lp_T = torch.tensor([0.0, -1e4, -1.0, 0.0])
    d_T = log_ratio(lp_T, torch.tensor([-1e4, 0.0, -1e4, -1e4]))
    assert d_T.tolist() == [20.0, -20.0, 20.0, 20.0]
    assert importance_ratio(kind, d_T, segments([2], [2])).isfinite().all()


def test_a_turn_without_tokens_has_mean_zero() -> None:
    mean_K = segment_mean(torch.tensor([1.0, 3.0]), torch.tensor([0, 2]), 3)
    assert mean_K.tolist() == [1.0, 0.0, 3.0]


def test_k3_of_a_tenth() -> None:
    assert kl_k3(torch.tensor([0.1], dtype=torch.float64)).item() == pytest.approx(0.0048374180)


def lemma_error(kind: Ratio) -> float:
    """Largest difference between the finite-difference gradient of the loss and the lemma's, for
    trajectories of turns [2, 3, 1] and [2] of which no token is clipped.

    grad L = (1/B) sum_i (1/|y_i|) sum_k w_k (A_k/|y_k|) grad log pi(turn k), A_k summed over turn
    k.
    """
    torch.manual_seed(1)
    s = segments([2, 3, 1], [2])
    a_T = torch.randn(8, dtype=torch.float64)
    old_T = torch.randn(8, dtype=torch.float64) * 0.5 - 2
    mix = torch.randn(4, 8, 5, dtype=torch.float64)
    theta = torch.randn(4, dtype=torch.float64) * 0.3
    target_T = torch.tensor([0, 3, 1, 4, 2, 2, 1, 0])
    objective = replace(PRESETS["so-grpo"], ratio=kind, eps_low=1.0, eps_high=math.inf)
    weight_T = reduce_weight("trajectory", s, torch.float64)

    def logp(x: Tensor) -> Tensor:
        logits_TV = torch.einsum("p,ptv->tv", x, mix)
        return logits_TV.log_softmax(-1).gather(-1, target_T[:, None]).squeeze(-1)

    def maximised(x: Tensor) -> float:
        return -loss(objective, logp(x), Tokens(old_T, a_T, weight_T, s)).item()

    numeric = torch.stack([five_points(maximised, theta, i) for i in range(4)])
    w_T = importance_ratio(kind, log_ratio(logp(theta), old_T), s)
    turn_mean_T = segment_mean(a_T, s.turn_of_T, s.num_turns)[s.turn_of_T]
    by_hand_T = torch.tensor([1 / 12] * 6 + [1 / 4] * 2, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(logp, theta)
    return (numeric - (by_hand_T * w_T * turn_mean_T) @ jacobian).abs().max().item()


def five_points(f, theta: Tensor, i: int, h: float = 1e-3) -> Tensor:
    """Fourth-order central difference."""
    e = torch.zeros_like(theta)
    e[i] = h
    value = 8 * (f(theta + e) - f(theta - e)) - (f(theta + 2 * e) - f(theta - 2 * e))
    return torch.tensor(value / (12 * h), dtype=torch.float64)


def test_the_lemma_holds_for_the_geometric_turn_ratio() -> None:
    assert lemma_error("turn") < 1e-9


def test_the_lemma_fails_for_the_arithmetic_turn_ratio() -> None:
    assert lemma_error("turn-arithmetic") > 1e-3


@pytest.mark.parametrize(
    "name", sorted(name for name, preset in PRESETS.items() if preset.skips_zero_advantage)
)
def test_zero_advantage_has_zero_gradient(name: str) -> None:
    s = segments([2, 1], [1])
    lp_T = torch.randn(4, requires_grad=True)
    tokens = Tokens(torch.randn(4), torch.zeros(4), reduce_weight("token", s), s)
    terms = BatchTerms(0.5, torch.zeros(4, dtype=torch.bool))
    loss(PRESETS[name], lp_T, tokens, terms).backward()
    assert lp_T.grad is not None and lp_T.grad.abs().max() == 0
