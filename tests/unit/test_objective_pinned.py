"""Objectives and whole steps against sums done by hand, on a policy that knows nothing.

Its output layer is 0 and its hidden state the same at every position, so each of 16 tokens has
log-prob -ln 16, and the gradient of sum(c_t log pi_t) is had on paper: row v of the output layer
gets scale * (c of the tokens v - sum(c) / 16) in each of 4 columns, everything else gets 0. Its
norm is 2 scale sqrt(sum(c^2) - sum(c)^2 / 16) where all tokens differ.

The batch, unless said otherwise: the winner, A = 1, has turns of tokens 1, 2 and of token 3; the
loser, A = -1, one turn of tokens 4, 5. Each has half the weight: 1/6 and 1/4 a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from leeway.learner import critic as critics
from leeway.learner import passes
from leeway.learner.batch import PackedBatch, build_batch
from leeway.learner.critic import Critic
from leeway.learner.errors import NonFiniteError
from leeway.learner.metrics import StepMetrics
from leeway.learner.objective.loss import BatchTerms, Tokens, batch_terms, loss
from leeway.learner.objective.presets import PRESETS, Objective
from leeway.learner.objective.ratio import Segments
from leeway.learner.trainer import Trainer
from leeway.learner.update import ValueTargets
from leeway.learner.world import World
from leeway.replay.schema import Group, GroupId, Trajectory, Turn
from tests.unit.test_learner_trainer import configure, observed_step

V = 16
HALF = [[0.5, 0.1], [0.0]], [[-0.5, -0.1]]
"""Log-ratios by trajectory and turn. By token the first of both trajectories are clipped; by turn,
exp(0.3) = 1.35 and exp(-0.3) = 0.74, all but token 3."""

torch.set_num_threads(1)
exp = math.exp


def blank(scale: float = 1.0) -> LlamaForCausalLM:
    """The policy that knows nothing; its hidden state is `scale` four times."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V,
            hidden_size=4,
            intermediate_size=4,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            rms_norm_eps=1e-30,
        )
    )
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for weight in weights.values():
            weight.zero_()
        weights["model.embed_tokens.weight"].fill_(1.0)
        weights["model.norm.weight"].fill_(scale)
    return model


def trajectory(turns: Sequence[Sequence[float]], reward: float, first_id: int) -> Trajectory:
    """Turns of log-ratios, an observed token behind each, two tokens of prompt; the trained tokens
    count up from `first_id`."""
    ids, placed, token = [0, 0], [], first_id
    for turn in turns:
        placed.append(Turn(len(ids), len(turn), 1, "search"))
        ids += [*range(token, token + len(turn)), 0]
        token += len(turn)
    d = [d for turn in turns for d in turn]
    return Trajectory(
        trajectory_id=f"t{first_id}",
        token_ids=np.array(ids, np.int32),
        turns=tuple(placed),
        logprobs=(-math.log(V) - np.array(d)).astype(np.float32),
        versions=np.zeros(len(d), np.int32),
        reward=reward,
        stop_reason="answer",
        scores={},
        duration_s=1.0,
    )


def batch_of(
    d: Sequence[Sequence[Sequence[float]]] = HALF, rewards: Sequence[float] = (2.0, 0.0)
) -> PackedBatch:
    """One group, by log-ratio: rewards 2 and 0 are advantages 1 and -1 in `group-unscaled`."""
    first, trajectories = 1, []
    for turns, reward in zip(d, rewards, strict=True):
        trajectories.append(trajectory(turns, reward, first))
        first += sum(map(len, turns))
    group = Group(
        group_id=GroupId("g"), question_id="q", worker_id="w", trajectories=tuple(trajectories)
    )
    return build_batch([group])


def trainer_of(objective: str, scale: float = 1.0, **more: Any) -> Trainer:
    """In float64, and with a gradient that no bound shortens; 9 tokens are less than the batch, so
    every trajectory is a micro-batch of its own."""
    chosen = {"advantage": "group-unscaled", "max_grad_norm": 1e9} | more
    return Trainer(blank(scale).double(), configure(objective, 9, **chosen))


def stepped(
    trainer: Trainer, batch: PackedBatch | None = None, version: int = 0
) -> tuple[StepMetrics, list[Tensor]]:
    """And the gradient of the output layer at each optimizer step."""
    seen: list[Tensor] = []
    head: Any = trainer.model.get_output_embeddings()
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(head.weight.grad.clone()))
    return trainer.train_step(batch_of() if batch is None else batch, version), seen


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rows(c: Mapping[int, float], scale: float = 1.0) -> Tensor:
    """[V, 4] gradient of sum(c_t log pi_t), by token."""
    mean = sum(c.values()) / V
    return f64([[scale * (c.get(v, 0.0) - mean)] * 4 for v in range(V)])


def norm_of(*c: float, scale: float = 1.0) -> float:
    return 2 * scale * math.sqrt(sum(x * x for x in c) - sum(c) ** 2 / V)


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-6, abs=0)


def near_all(values: Sequence[float]) -> Any:
    return pytest.approx(values, rel=1e-9, abs=0)


def check_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def tokens_of(
    d: Sequence[Sequence[Sequence[float]]],
    a: Sequence[float],
    weights: Sequence[float],
    correction: Sequence[float] | None = None,
) -> tuple[Tensor, Tokens]:
    """Log-probs -1, -2, ... with a gradient, and tokens whose log-ratios to them are `d`."""
    turns = [len(turn) for of_trajectory in d for turn in of_trajectory]
    sizes = [sum(map(len, of_trajectory)) for of_trajectory in d]
    segments = Segments(
        torch.repeat_interleave(torch.tensor(turns)),
        torch.repeat_interleave(torch.tensor(sizes)),
        len(turns),
        len(sizes),
    )
    lp_T = -torch.arange(1, sum(sizes) + 1).double()
    d_T = f64([x for of_trajectory in d for turn in of_trajectory for x in turn])
    correction_T = None if correction is None else f64(correction)
    a_T, weight_T = f64(a), f64(weights)
    tokens = Tokens(lp_T - d_T, a_T, weight_T, segments, correction_T)
    return lp_T.requires_grad_(), tokens


def lost(
    objective: Objective, lp_T: Tensor, tokens: Tokens, terms: BatchTerms | None = None
) -> tuple[float, list[float]]:
    """Loss, and its gradient by token."""
    total = loss(objective, lp_T, tokens, terms)
    return total.item(), torch.autograd.grad(total, lp_T)[0].tolist()


# What stands behind the names.


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_constants_that_no_preset_names_are_those_of_the_papers(name: str) -> None:
    p = PRESETS[name]
    assert (p.ctn_c, p.ctn_raw, p.ctn_strength, p.ctn_target) == (1.0, False, 1.0, "gradient")
    assert (p.max_weight, p.max_second_moment, p.max_correction) == (2.0, 0.04, 2.0)
    assert (p.gamma, p.gae_lambda, p.dual_clip, p.whiten) == (1.0, 1.0, None, False)


@pytest.mark.parametrize(
    ("second", "is_masked"),
    [
        (0.2090, False),  # (0.0361 + 0.043681) / 2 = 0.0399
        (0.2100, True),  # (0.0361 + 0.0441) / 2 = 0.0401
    ],
)
def test_m2po_masks_from_a_mean_square_of_four_hundredths_on(
    second: float, is_masked: bool
) -> None:
    lp_T, tokens = tokens_of([[[0.19, second]]], [1, 1], [0.5, 0.5])
    assert batch_terms(PRESETS["m2po"], lp_T, tokens).masked_T.tolist() == [False, is_masked]


def test_a_masked_token_of_m2po_is_in_neither_loss_nor_gradient() -> None:
    lp_T, tokens = tokens_of([[[0.1, 0.2, 0.5]], [[-0.3]]], [1, 1, 1, -2], [0.1, 0.2, 0.3, 0.4])
    terms = BatchTerms(0.0, torch.tensor([False, False, True, False]))
    value, gradient = lost(PRESETS["m2po"], lp_T, tokens, terms)
    assert value == near(-(0.1 * exp(0.1) + 0.2 * exp(0.2) - 0.8 * exp(-0.3)))
    assert gradient == near_all([-0.1 * exp(0.1), -0.2 * exp(0.2), 0.0, 0.8 * exp(-0.3)])


DETACHED: dict[str, list[float]] = {
    # Of the winner the product ratio is exp(2.3), of the losers exp(-0.6) and exp(0.3).
    "topr": [1, 1, exp(-0.6), exp(-0.6), 1, 1],
    "tis": [exp(0.3), 2, exp(-0.2), exp(-0.4), exp(0.1), exp(0.2)],
    "cispo": [exp(0.3), 5, exp(-0.2), exp(-0.4), exp(0.1), exp(0.2)],
    "vespo": [exp(4.6 + 3 * (1 - exp(2.3)))] * 2
    + [exp(-1.8 + 2 * (1 - exp(-0.6)))] * 2
    + [exp(0.9 + 2 * (1 - exp(0.3)))] * 2,
}


@pytest.mark.parametrize("name", sorted(DETACHED))
def test_a_weight_of_the_log_prob_is_a_constant_to_the_gradient(name: str) -> None:
    w = DETACHED[name]
    d = [[[0.3], [2.0]], [[-0.2, -0.4]], [[0.1, 0.2]]]
    a, r = [1, 1, -1, -1, -2, -2], [0.05, 0.1, 0.15, 0.2, 0.25, 0.25]
    value, gradient = lost(PRESETS[name], *tokens_of(d, a, r))
    # Log-probs are -1 to -6, and the loss is -r w A lp.
    assert value == near(sum(r[t] * w[t] * a[t] * (t + 1) for t in range(6)))
    assert gradient == near_all([-r[t] * w[t] * a[t] for t in range(6)])


def test_the_gradient_of_a_turn_arithmetic_ratio_is_shared_out_by_the_tokens_own_ratios() -> None:
    """w = (exp(d_1) + ... + exp(d_n)) / n moves by exp(d_s) / n with token s, whatever token it
    weighs."""
    objective = replace(PRESETS["so-grpo"], ratio="turn-arithmetic")
    # w is 1.1016 of the first turn, 0.9512 of the second, 0.7336 of the loser's, which is clipped.
    d = [[[0.0, 0.2, 0.08], [-0.05]], [[-0.5, -0.15]]]
    a, r = [1, 2, 0.5, -1, -1, -1], [0.1, 0.1, 0.2, 0.2, 0.1, 0.3]
    value, gradient = lost(objective, *tokens_of(d, a, r))
    w = (1 + exp(0.2) + exp(0.08)) / 3
    # 0.1 * 1 + 0.1 * 2 + 0.2 * 0.5 = 0.4 of weighted advantage hangs on the first turn.
    of_first = [-0.4 / 3, -0.4 * exp(0.2) / 3, -0.4 * exp(0.08) / 3]
    assert value == pytest.approx(-0.4 * w + 0.2 * exp(-0.05) + 0.4 * 0.8, rel=1e-9)
    assert gradient == pytest.approx([*of_first, 0.2 * exp(-0.05), 0, 0], rel=1e-9, abs=1e-12)


def test_the_clip_fraction_of_the_penalty_is_the_share_of_clipped_tokens() -> None:
    # exp(0.3) = 1.35 is above 1.2 with A = 1; exp(-0.1) = 0.90 is above 0.8 with A = -1.
    d, a = [[[0.5, 0.1], [0.0]], [[-0.1, -0.1]]], [1, 1, 1, -1, -1]
    terms = batch_terms(PRESETS["so-grpo-penalty"], *tokens_of(d, a, [0.2] * 5))
    assert terms.clip_fraction == near(2 / 5)


def test_the_kl_of_the_penalty_is_weighed_by_the_reduce_weight_alone() -> None:
    """Not by the correction, which stands outside the clip, and by no number of tokens."""
    lp_T, tokens = tokens_of([[[0.5], [-0.2]]], [0, 0], [0.25, 0.75], correction=[2.0, 0.5])
    terms = BatchTerms(0.4, torch.zeros(2, dtype=torch.bool))
    objective = replace(PRESETS["so-grpo-penalty"], ctn_strength=3.0)
    value, gradient = lost(objective, lp_T, tokens, terms)
    assert value == near(1.2 * (0.25 * (exp(-0.5) - 0.5) + 0.75 * (exp(0.2) - 1.2)))
    assert gradient == near_all([0.3 * (1 - exp(-0.5)), 0.9 * (1 - exp(0.2))])


# Whole steps.


def test_the_policy_that_knows_nothing_has_the_gradient_that_it_was_made_for() -> None:
    metrics, (seen,) = stepped(trainer_of("grpo", scale=3.0))
    # Tokens 1 and 4 are clipped, at 1.2 and at 0.8.
    assert metrics.loss == near(-(1.2 + exp(0.1) + 1) / 6 + (0.8 + exp(-0.1)) / 4)
    c = {2: -exp(0.1) / 6, 3: -1 / 6, 5: exp(-0.1) / 4}
    check_close(seen, rows(c, scale=3.0))
    assert metrics.grad_norm == near(norm_of(*c.values(), scale=3.0))


M2PO = [[0.1, 0.2], [0.5]], [[-0.1, -0.3]]


def test_a_step_of_m2po_leaves_out_the_token_that_the_whole_batch_masks() -> None:
    # Squares 0.01, 0.01, 0.04, 0.09, 0.25 in order: the first four have mean 0.0375, all 0.08.
    metrics, (seen,) = stepped(trainer_of("m2po"), batch_of(M2PO))
    assert metrics.policy.masked_fraction == near(1 / 5)
    assert metrics.loss == near(-(exp(0.1) + exp(0.2) - exp(-0.1) - exp(-0.3)) / 5)
    c = {1: -exp(0.1) / 5, 2: -exp(0.2) / 5, 4: exp(-0.1) / 5, 5: exp(-0.3) / 5}
    check_close(seen, rows(c))


@pytest.mark.parametrize("version", range(4))
def test_each_minibatch_of_m2po_masks_its_own_tokens(version: int) -> None:
    # The winner's 0.01, 0.04, 0.25 have mean 0.1, the first two 0.025; the loser's 0.01, 0.09 have
    # 0.05, which masks token 5 as well.
    trainer = trainer_of("m2po", num_minibatches=2, learning_rate=1e-15)
    metrics, seen = stepped(trainer, batch_of(M2PO), version)
    assert metrics.policy.masked_fraction == near(2 / 5)
    # The version draws which is first; row 1 is far below 0 in the winner's alone.
    winner, loser = sorted(seen, key=lambda gradient: gradient[1, 0].item())
    check_close(winner, rows({1: -exp(0.1) / 3, 2: -exp(0.2) / 3}))
    check_close(loser, rows({4: exp(-0.1) / 2}))


def test_one_step_of_a_decoupled_objective_is_its_truncated_correction() -> None:
    """Ratios to the start of the step are 1; the sampler's stand outside the clip, at most 2."""
    d = [[0.9, 0.1], [0.0]], [[-0.5, -0.1]]
    metrics, (seen,) = stepped(trainer_of("decoupled-grpo"), batch_of(d))
    assert metrics.loss == near(-(2 + exp(0.1) + 1) / 6 + (exp(-0.5) + exp(-0.1)) / 4)
    c = {1: -2 / 6, 2: -exp(0.1) / 6, 3: -1 / 6, 4: exp(-0.5) / 4, 5: exp(-0.1) / 4}
    check_close(seen, rows(c))


@pytest.mark.parametrize("strength", [None, 3.0])
def test_a_step_of_the_penalty_form_pulls_every_token_back_by_the_clip_fraction(
    strength: float | None,
) -> None:
    """Also those of the third trajectory, whose advantage is 0."""
    d = [[0.5, 0.1], [0.0]], [[-0.1, -0.1]], [[0.4]]
    trainer = trainer_of("so-grpo-penalty", ctn_strength=strength)
    metrics, (seen,) = stepped(trainer, batch_of(d, rewards=(2.0, 0.0, 1.0)))
    # Tokens 1 and 2 of six are clipped; weights are 1/9, 1/6 and 1/3.
    f = (strength or 1.0) * 2 / 6
    surrogate = (1.2 + 1.2 + 1) / 9 - 2 * exp(-0.1) / 6
    kl = (exp(-0.5) - 0.5 + exp(-0.1) - 0.9) / 9 + 2 * (exp(0.1) - 1.1) / 6 + (exp(-0.4) - 0.6) / 3
    assert metrics.loss == near(-surrogate + f * kl)
    of_loser = exp(-0.1) / 6 + f * (1 - exp(0.1)) / 6
    c = {
        1: f * (1 - exp(-0.5)) / 9,
        2: f * (1 - exp(-0.1)) / 9,
        3: -1 / 9,
        4: of_loser,
        5: of_loser,
        6: f * (1 - exp(-0.4)) / 3,
    }
    check_close(seen, rows(c))
    assert (metrics.ctn_norm, metrics.ctn_divisor) == (None, 1)


BIAS: dict[str, tuple[float, ...]] = {
    "token": (exp(0.5) / 6, -exp(-0.5) / 4),
    "turn": (exp(0.3) / 6, exp(0.3) / 6, -exp(-0.3) / 4, -exp(-0.3) / 4),
}
"""weight w A of the clipped tokens of HALF, whose norms ||C|| are 0.625 and 0.823."""


@pytest.mark.parametrize("ratio", ["token", "turn"])
def test_ctn_norm_is_that_of_the_clipped_tokens_under_either_ratio(ratio: str) -> None:
    metrics, _ = stepped(trainer_of("so-grpo", ratio=ratio))
    assert metrics.ctn_norm == near(norm_of(*BIAS[ratio]))


LEFT = {2: -exp(0.1) / 6, 3: -1 / 6, 5: exp(-0.1) / 4}
"""Gradient of the unclipped tokens of HALF, by token."""


@pytest.mark.parametrize(
    ("more", "scale", "divisor"),
    [
        ({}, 1.0, 1.0),  # below c = 1
        ({}, 2.0, norm_of(*BIAS["token"], scale=2.0)),  # 1.25, above it
        ({"ctn_c": 0.25}, 1.0, norm_of(*BIAS["token"]) / 0.25),
        ({"ctn_c": 1.5}, 2.0, 1.0),
        ({"ctn_raw": True}, 1.0, norm_of(*BIAS["token"])),  # 0.625 makes the step longer
        ({"ctn_raw": True}, 2.0, norm_of(*BIAS["token"], scale=2.0)),
    ],
    ids=["safe-below", "safe-above", "c-below", "c-above", "raw-below", "raw-above"],
)
@pytest.mark.parametrize("target", [None, "learning-rate"])
def test_a_step_is_divided_by_what_the_configured_form_says(
    more: dict[str, float | bool], scale: float, divisor: float, target: str | None
) -> None:
    chosen = {"ctn": "gradient", "ctn_target": target, "learning_rate": 1e-3} | more
    trainer = trainer_of("grpo", scale, **chosen)
    metrics, (seen,) = stepped(trainer)
    assert metrics.ctn_divisor == near(divisor)
    of_gradient, of_rate = (divisor, 1.0) if target is None else (1.0, divisor)
    check_close(seen, rows(LEFT, scale) / of_gradient)
    assert metrics.grad_norm_applied == near(norm_of(*LEFT.values(), scale=scale) / of_gradient)
    assert metrics.learning_rate == near(1e-3 / of_rate)


def test_a_form_that_is_not_of_the_gradient_divides_nothing_however_large_the_bias() -> None:
    scale = 10.0  # of which ||C|| is 6.2
    metrics, (seen,) = stepped(trainer_of("grpo", scale, measure_ctn=True, learning_rate=1e-3))
    assert metrics.ctn_norm == near(norm_of(*BIAS["token"], scale=scale))
    assert (metrics.ctn_divisor, metrics.learning_rate) == (1, 1e-3)
    check_close(seen, rows(LEFT, scale))


def test_the_penalty_form_divides_nothing_however_large_the_bias() -> None:
    scale = 10.0  # of which ||C|| is 8.2
    trainer = trainer_of("so-grpo-penalty", scale, measure_ctn=True, learning_rate=1e-3)
    metrics, (seen,) = stepped(trainer)
    assert metrics.ctn_norm == near(norm_of(*BIAS["turn"], scale=scale))
    assert (metrics.ctn_divisor, metrics.learning_rate) == (1, 1e-3)
    # Four of five tokens are clipped; each is pulled back by 0.8 weight (1 - exp(-d)).
    c = {
        1: 0.8 * (1 - exp(-0.5)) / 6,
        2: 0.8 * (1 - exp(-0.1)) / 6,
        3: -1 / 6,
        4: 0.8 * (1 - exp(0.5)) / 4,
        5: 0.8 * (1 - exp(0.1)) / 4,
    }
    check_close(seen, rows(c, scale))


@pytest.mark.parametrize(
    ("d", "of_winner", "of_loser"),
    [
        # In a minibatch of its own the winner weighs 1/3 a token, the loser 1/2.
        (HALF, norm_of(exp(0.5) / 3), norm_of(exp(-0.5) / 2)),  # 1.06 and 0.59
        ((HALF[0], [[0.0, 0.0]]), norm_of(exp(0.5) / 3), 0.0),
        (([[0.0, 0.0], [0.0]], HALF[1]), 0.0, norm_of(exp(-0.5) / 2)),
    ],
    ids=["both", "only-winner", "only-loser"],
)
@pytest.mark.parametrize("version", range(4))
def test_the_ctn_norm_of_a_step_is_the_largest_of_its_minibatches(
    d: Any, of_winner: float, of_loser: float, version: int
) -> None:
    trainer = trainer_of("grpo", num_minibatches=2, learning_rate=1e-15, measure_ctn=True)
    metrics, _ = stepped(trainer, batch_of(d), version)
    assert metrics.ctn_norm == near(max(of_winner, of_loser))


def test_four_versions_draw_both_orders_of_two_minibatches() -> None:
    """Else the test above could not tell the largest from the first or the last."""
    orders = set()
    for version in range(4):
        trainer = trainer_of("grpo", num_minibatches=2, learning_rate=1e-15)
        _, seen = stepped(trainer, version=version)
        # Row 3 is -1/3 of the winner's token less a mean, and 0 less a mean in the loser's.
        orders.add(bool(seen[0][3, 0] < -0.1))
    assert orders == {True, False}


def test_the_divisor_of_a_step_is_the_largest_of_its_minibatches() -> None:
    for version in range(4):
        trainer = trainer_of(
            "grpo", ctn="gradient", ctn_raw=True, num_minibatches=2, learning_rate=1e-15
        )
        metrics, _ = stepped(trainer, version=version)
        assert metrics.ctn_divisor == near(norm_of(exp(0.5) / 3))


# The critic's bound, and numbers that are not finite.


@pytest.mark.parametrize(("bound", "factor"), [(1e9, 1.0), (0.3, 0.3 / 1.5), (1.6, 1.0)])
def test_the_critic_s_gradient_is_bounded_like_the_policy_s(bound: float, factor: float) -> None:
    # Values are 0 and returns 1, 1, 1, 0, 0, so the head's bias gets -3/5; its weight gets that
    # four times sqrt(21)/4: squares add up to 0.36 (1 + 21/4) = 1.5^2.
    config = configure("ppo", 9, max_grad_norm=bound)
    critic = Critic(blank(math.sqrt(21) / 4).double(), config, World())
    seen: list[Tensor] = []
    critic.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.flatten().clone() for p in critic.model.parameters())  # type: ignore[union-attr]
    )
    zero_N = torch.zeros(5).double()
    targets = ValueTargets(torch.arange(5), zero_N, f64([1, 1, 1, 0, 0]))
    metrics = critic.train(batch_of(), targets)
    assert metrics.critic_grad_norm == near(1.5)
    assert torch.cat(seen).norm().item() == near(1.5 * factor)
    assert seen[-1].item() == near(-0.6 * factor)  # of the bias


def check_keeps_weights(trainer: Trainer, batch: PackedBatch, sentence: str) -> None:
    before = [p.detach().clone() for p in trainer.parameters]
    with pytest.raises(NonFiniteError, match=rf"{sentence}; this optimizer step was not taken"):
        trainer.train_step(batch, 0)
    torch.testing.assert_close(trainer.parameters, before, rtol=0, atol=0)
    assert not trainer.optimizer.state


def test_a_loss_that_is_not_finite_ends_the_step_before_any_weight_changes() -> None:
    """In float32, which ends at 3.4e38: advantages of 1e35 are finite, times exp(20) they are
    not."""
    trainer = Trainer(blank(), configure("m2po", 9, advantage="group-unscaled"))
    trainer.objective = replace(trainer.objective, max_second_moment=math.inf)
    batch = batch_of(([[20.0]], [[0.0]]))
    batch.reward_B.mul_(1e35)
    check_keeps_weights(trainer, batch, "the loss is -inf")


@pytest.mark.parametrize("objective", ["grpo", "reinforce"])
def test_a_gradient_that_is_not_finite_ends_the_step_before_any_weight_changes(
    objective: str,
) -> None:
    """Winner and loser put numbers of 1.6e38 into four columns each: their norm is beyond
    float32."""
    advantage = "batch" if objective == "reinforce" else "group-unscaled"
    trainer = Trainer(blank(3e38), configure(objective, 9, advantage=advantage))
    batch = batch_of(([[0.1]], [[0.0]]))
    check_keeps_weights(trainer, batch, "the gradient norm is inf")


@pytest.mark.parametrize("objective", ["so-grpo", "grpo"])
def test_a_clipping_bias_that_is_not_finite_ends_the_step_before_any_weight_changes(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is only measured: the next step would be spoilt by the same weights."""
    trainer = trainer_of(objective, measure_ctn=True if objective == "grpo" else None)
    monkeypatch.setattr(trainer, "_bias_norm", lambda *_: math.nan)
    check_keeps_weights(trainer, batch_of(), "the norm of the clipping bias is nan")


def test_a_gradient_of_the_critic_that_is_not_finite_ends_its_step() -> None:
    critic = Critic(blank(3e38), configure("ppo", 9), World())
    before = [p.detach().clone() for p in critic.model.parameters()]
    zero_N = torch.zeros(5).double()
    with pytest.raises(NonFiniteError, match=r"loss is 0\.5\d*, its gradient norm inf; its"):
        critic.train(batch_of(), ValueTargets(torch.arange(5), zero_N, zero_N + 1))
    torch.testing.assert_close(list(critic.model.parameters()), before, rtol=0, atol=0)


# Splits.


class RandomSplit:
    """Any parts in any order, instead of the fewest and most equal ones."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.parts: list[int] = []

    def __call__(self, lengths: Mapping[int, int], *_: int) -> list[list[list[int]]]:
        order = self._rng.permutation(list(lengths)).tolist()
        is_cut = self._rng.random(len(order) - 1) < 0.6
        cuts = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(order)]
        parts = [order[a:b] for a, b in pairwise(cuts)]
        self.parts.append(len(parts))
        return [parts]


SPLIT: dict[str, dict[str, Any]] = {
    "so-grpo": {"ctn_raw": True},
    "so-grpo-penalty": {},
    "gspo": {"num_minibatches": 2, "ctn": "gradient", "ctn_raw": True},
    "decoupled-grpo": {"num_minibatches": 2},
    "m2po": {},
    "vespo": {},
    "grpo": {"ratio": "turn-arithmetic", "reduce": "turn", "ctn": "gradient", "ctn_raw": True},
    "so-ppo": {"ctn_raw": True, "critic_epochs": 2},
    "ppo": {"whiten": True, "num_minibatches": 2},
}


@pytest.mark.parametrize("name", sorted(SPLIT))
def test_no_split_into_micro_batches_changes_what_the_optimizers_see(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(name, **SPLIT[name])
    whole = observed_step(config)
    assert whole["gradient"].abs().max() > 1e-3
    for seed in range(3):
        split = RandomSplit(seed)
        monkeypatch.setattr(passes, "split", split)
        monkeypatch.setattr(critics, "split", split)
        torch.testing.assert_close(observed_step(config), whole, rtol=1e-7, atol=1e-10)
        assert max(split.parts) > 2
