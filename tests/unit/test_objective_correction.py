"""The weight exp(proximal - behaviour) outside the clip, against hand-computed numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from leeway.learner.objective.correction import correction_weight
from leeway.learner.objective.kinds import Correction
from leeway.learner.objective.loss import Tokens, loss
from leeway.learner.objective.presets import PRESETS
from leeway.learner.objective.ratio import Segments

BEHAVIOUR_T = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
PROXIMAL_T = BEHAVIOUR_T + torch.tensor([0.25, 1.5, 4.0], dtype=torch.float64).log()
ONE_TURN = Segments(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 1, 1)


@pytest.mark.parametrize(
    ("kind", "bound", "expected"),
    [
        ("none", 2.0, [1.0, 1.0, 1.0]),
        ("truncate", 2.0, [0.25, 1.5, 2.0]),
        ("truncate", 5.0, [0.25, 1.5, 4.0]),
        ("mask", 2.0, [0.0, 1.5, 0.0]),
        ("mask", 4.5, [0.25, 1.5, 4.0]),
    ],
)
def test_weights_by_hand(kind: Correction, bound: float, expected: list[float]) -> None:
    found_T = correction_weight(kind, PROXIMAL_T, BEHAVIOUR_T, bound)
    assert found_T.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["none", "truncate", "mask"])
def test_equal_policies_have_weight_one(kind: Correction) -> None:
    assert correction_weight(kind, PROXIMAL_T, PROXIMAL_T, 2.0).tolist() == [1.0] * 3


def test_extreme_gaps_stay_finite() -> None:
    proximal_T, behaviour_T = torch.tensor([-1e4, 0.0, -1e4]), torch.tensor([0.0, -1e4, -1e4])
    truncated_T = correction_weight("truncate", proximal_T, behaviour_T, 2.0)
    assert truncated_T.tolist() == pytest.approx([math.exp(-20), 2.0, 1.0])
    assert correction_weight("mask", proximal_T, behaviour_T, 2.0).tolist() == [0.0, 0.0, 1.0]
    unbounded_T = correction_weight("truncate", proximal_T, behaviour_T, 1e12)
    assert unbounded_T[1].item() == pytest.approx(math.exp(20))


def test_the_weight_multiplies_a_token_s_loss_and_gradient_outside_the_clip() -> None:
    # Ratios 1.1, 1.5 (clipped to 1.2), 1; A = 1; correction 0.25, 1.5, 2; weights 1/3.
    objective = replace(PRESETS["decoupled-grpo"], eps_low=0.2, eps_high=0.2)
    weight_T = torch.full((3,), 1 / 3, dtype=torch.float64)
    correction_T = correction_weight("truncate", PROXIMAL_T, BEHAVIOUR_T, 2.0)
    tokens = Tokens(PROXIMAL_T, torch.ones_like(weight_T), weight_T, ONE_TURN, correction_T)
    ratio_T = torch.tensor([1.1, 1.5, 1.0], dtype=torch.float64)
    lp_T = (PROXIMAL_T + ratio_T.log()).requires_grad_()
    total = loss(objective, lp_T, tokens)
    assert total.item() == pytest.approx(-(0.25 * 1.1 + 1.5 * 1.2 + 2 * 1.0) / 3)
    (gradient_T,) = torch.autograd.grad(total, lp_T)
    assert gradient_T.tolist() == pytest.approx([-0.25 * 1.1 / 3, 0.0, -2 / 3])


def test_a_masked_token_has_no_gradient() -> None:
    correction_T = correction_weight("mask", PROXIMAL_T, BEHAVIOUR_T, 2.0)
    weight_T = torch.full((3,), 1 / 3, dtype=torch.float64)
    tokens = Tokens(PROXIMAL_T, torch.ones_like(weight_T), weight_T, ONE_TURN, correction_T)
    lp_T = PROXIMAL_T.clone().requires_grad_()
    loss(replace(PRESETS["decoupled-grpo"], correction="mask"), lp_T, tokens).backward()
    assert lp_T.grad is not None
    assert lp_T.grad.tolist() == pytest.approx([0.0, -0.5, 0.0])
