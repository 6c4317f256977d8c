"""Our objectives against TRL's on random batches: values, and gradients by log-prob.

TRL has its losses in methods of its trainers. They are called without a trainer, on an object with
the settings that they read, whose model gives the log-probs of the test. Its advantages are made
amid generation, where nothing can call them, and it has no critic: those are compared with verl.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from leeway.learner.head import Head, head_logprobs, head_loss
from leeway.learner.objective.advantage import trajectory_advantage
from leeway.learner.objective.correction import correction_weight
from leeway.learner.objective.kinds import Correction
from leeway.learner.objective.loss import BatchTerms, Tokens, batch_terms, clipped, loss
from leeway.learner.objective.presets import PRESETS, Objective
from leeway.learner.objective.ratio import importance_ratio, log_ratio
from leeway.learner.objective.reduce import reduce_weight

EPS_LOW, EPS_HIGH = 0.2, 0.28
MAX_COMPLETION_LENGTH = 512


class Trainer(SimpleNamespace):
    """What TRL's loss methods read of their trainer, for one rank that accumulates nothing."""

    def __init__(self, trl: Any, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "loss_type": "grpo",
            "importance_sampling_level": "token",
            "epsilon_low": EPS_LOW,
            "epsilon_high": EPS_HIGH,
            "beta": 0.0,
            "delta": None,
            "use_vllm": False,
        }
        settings = defaults | settings
        arguments = SimpleNamespace(
            delta=settings.pop("delta"),
            use_bias_correction_kl=False,
            steps_per_generation=1,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        )
        super().__init__(
            args=arguments,
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(
                num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
            ),
            current_gradient_accumulation_steps=1,
            max_completion_length=MAX_COMPLETION_LENGTH,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            vllm_importance_sampling_correction=True,
            aux_loss_enabled=False,
            get_gamma_weights=trl.grpo.get_gamma_weights,
            _entropy_bonus_enabled=False,
            _metrics=defaultdict(lambda: defaultdict(list)),
            **settings,
        )

    def _get_per_token_logps_and_entropies(
        self, model: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, None]:
        return model, torch.zeros_like(model), None


def inputs(batch: Any, old_T: Tensor, a_T: Tensor, **more: Tensor) -> dict[str, Tensor]:
    """A batch as TRL's GRPO takes it. Observations are masked by `tool_mask`, padding by
    `completion_mask`."""
    is_inside_BL = batch.mask_BL.flip(-1).cumsum(-1).flip(-1) > 0
    return {
        "prompt_ids": torch.zeros(batch.num_rows, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(batch.num_rows, 1, dtype=torch.int64),
        "completion_ids": torch.zeros_like(batch.mask_BL),
        "completion_mask": is_inside_BL.long(),
        "tool_mask": batch.mask_BL,
        "old_per_token_logps": batch.pad(old_T),
        "advantages": batch.pad(a_T),
        "num_items_in_batch": batch.mask_BL.sum(),
    } | more


def check_loss(
    trl: Any,
    batch: Any,
    objective: Objective,
    a_T: Tensor | None = None,
    scale: float = 1.0,
    **settings: Any,
) -> None:
    """`objective` times `scale` is TRL's loss under `settings`."""
    lp_T, old_T = batch.policies()
    a_T = batch.tokens() if a_T is None else a_T
    tokens = Tokens(old_T, a_T, reduce_weight(objective.reduce, batch.segments), batch.segments)
    theirs = inputs(batch, old_T, a_T)
    trainer = Trainer(trl, **settings)
    batch.check_same(
        lambda x_T: loss(objective, x_T, tokens) * scale,
        lambda x_BL: trl.grpo._compute_loss(trainer, x_BL, theirs),
        lp_T,
    )


GRPO = replace(PRESETS["grpo"], eps_low=EPS_LOW, eps_high=EPS_HIGH)


# --- policy losses ---


def test_grpo(trl: Any, typed_batch: Any) -> None:
    """TRL's mean counts rows without a trained token, ours leaves them out."""
    check_loss(trl, typed_batch, GRPO, scale=typed_batch.filled_share)


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_the_token_reduction(trl: Any, typed_batch: Any, loss_type: str) -> None:
    """One name divides by the tokens of the micro-batch, the other by those of the step."""
    check_loss(trl, typed_batch, replace(GRPO, reduce="token"), loss_type=loss_type)


def test_dr_grpo_is_the_token_reduction_with_a_constant_denominator(
    trl: Any, typed_batch: Any
) -> None:
    """Dr. GRPO divides by rows times the longest completion allowed instead of by the tokens."""
    scale = typed_batch.num_tokens / (typed_batch.num_rows * MAX_COMPLETION_LENGTH)
    check_loss(trl, typed_batch, replace(GRPO, reduce="token"), scale=scale, loss_type="dr_grpo")


@pytest.mark.parametrize("c", [1.5, 3.0])
def test_two_sided_clipping_is_dual_clip(trl: Any, typed_batch: Any, c: float) -> None:
    """`delta` bounds the ratio of both signs; where A > 0 the clip is lower already."""
    objective = replace(GRPO, dual_clip=c)
    check_loss(trl, typed_batch, objective, scale=typed_batch.filled_share, delta=c)


@pytest.mark.parametrize("eps", [(3e-4, 4e-4), (EPS_LOW, EPS_HIGH)], ids=str)
def test_gspo(trl: Any, typed_batch: Any, eps: tuple[float, float]) -> None:
    """The gradient goes through the mean over the trajectory in both, so that here advantages may
    differ between its tokens (verl's gradient would not agree)."""
    objective = replace(PRESETS["gspo"], eps_low=eps[0], eps_high=eps[1])
    check_loss(
        trl,
        typed_batch,
        objective,
        scale=typed_batch.filled_share,
        importance_sampling_level="sequence",
        epsilon_low=eps[0],
        epsilon_high=eps[1],
    )


def test_cispo(trl: Any, typed_batch: Any) -> None:
    """TRL's epsilon_high is the bound itself, ours its distance from 1: 5 and 4. It has no lower
    bound, which is ours at a distance of 1."""
    check_loss(trl, typed_batch, PRESETS["cispo"], loss_type="cispo", epsilon_high=5.0)


def test_vespo(trl: Any, typed_batch: Any) -> None:
    """TRL bounds the log of the product below by log(1e-8) = -18.4, ours by -20, where the weight
    is below 1e-14 in both; policies are close enough to reach neither. The sign of a trajectory's
    advantage chooses k and lambda, so its tokens share it."""
    batch = typed_batch
    lp_T, old_T = batch.policies(spread=0.1)
    a_T = batch.per_trajectory(batch.normal(batch.num_rows))
    objective = PRESETS["vespo"]
    d_T = importance_ratio("sequence-product", lp_T - old_T, batch.segments).log()
    assert d_T.abs().max() < 18
    tokens = Tokens(old_T, a_T, reduce_weight("token", batch.segments), batch.segments)
    theirs = inputs(batch, old_T, a_T)
    theirs["advantages"] = batch.normal(batch.num_rows)
    theirs["advantages"][batch.segments.trajectory_of_T] = a_T
    trainer = Trainer(trl, loss_type="vespo")
    batch.check_same(
        lambda x_T: loss(objective, x_T, tokens),
        lambda x_BL: trl.grpo._compute_loss(trainer, x_BL, theirs),
        lp_T,
    )


def test_rloo_s_clipped_product_ratio(trl: Any, batch: Any) -> None:
    """TRL's RLOO clips the ratio of whole completions, exp(sum d), and takes the mean over them:
    `sequence-product` under the clip with reduce `trajectory`. Our preset `rloo` has neither ratio
    nor clip; where the policies are equal the gradients are those of this one. TRL masks padding
    alone here, so observations are cut out of its rows first."""
    objective = replace(GRPO, ratio="sequence-product")
    rows = batch.with_trajectories_as_rows()
    lp_T, old_T = rows.policies(spread=0.03)
    a_B = rows.normal(rows.num_rows)
    weight_T = reduce_weight("trajectory", rows.segments)
    tokens = Tokens(old_T, rows.per_trajectory(a_B), weight_T, rows.segments)
    old_BL = rows.pad(old_T)
    theirs = inputs(rows, old_T, old_T)
    theirs |= {"old_logps": (old_BL * rows.mask_BL).sum(-1), "advantages": a_B}
    empty_B = rows.mask_BL.sum(-1) == 0
    trainer = Trainer(trl)
    rows.check_same(
        lambda x_T: (
            loss(objective, x_T, tokens) * rows.filled_share
            - a_B[empty_B].sum() / rows.num_rows  # without tokens the ratio is 1
        ),
        lambda x_BL: trl.rloo._compute_loss(trainer, x_BL, theirs),
        lp_T,
    )


def test_rloo_without_a_step_has_the_gradient_of_reinforce(trl: Any, batch: Any) -> None:
    """At equal policies the gradient of min(w A, clip(w) A) by log-prob is A, that of our `rloo`.
    TRL sums over a completion's tokens and divides by completions, ours divides by tokens."""
    rows = batch.with_trajectories_as_rows()
    lp_T = rows.policies()[0]
    a_B = rows.normal(rows.num_rows)
    weight_T = reduce_weight("token", rows.segments) * rows.num_tokens / rows.num_rows
    tokens = Tokens(lp_T, rows.per_trajectory(a_B), weight_T, rows.segments)
    x_T, x_BL = lp_T.clone().requires_grad_(), rows.pad(lp_T).requires_grad_()
    theirs = inputs(rows, lp_T, lp_T)
    theirs |= {"old_logps": (x_BL.detach() * rows.mask_BL).sum(-1), "advantages": a_B}
    loss(PRESETS["rloo"], x_T, tokens).backward()
    trl.rloo._compute_loss(Trainer(trl), x_BL, theirs).backward()
    assert x_T.grad is not None and x_BL.grad is not None
    torch.testing.assert_close(x_T.grad, rows.pack(x_BL.grad), rtol=1e-7, atol=0)


@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_the_weight_from_behaviour_to_proximal_stands_outside_the_clip(
    trl: Any, typed_batch: Any, kind: Correction
) -> None:
    """Both multiply the clipped term; TRL makes the weight itself amid generation."""
    batch, objective = typed_batch, replace(GRPO, old="proximal", correction=kind)
    proximal_T, behaviour_T = batch.policies()
    lp_T, a_T = proximal_T + 0.3 * batch.tokens(), batch.tokens()
    weight_T = correction_weight(kind, proximal_T, behaviour_T, 2.0)
    s = batch.segments
    tokens = Tokens(proximal_T, a_T, reduce_weight("trajectory", s), s, weight_T)
    theirs = inputs(batch, proximal_T, a_T, importance_sampling_ratio=batch.pad(weight_T))
    trainer = Trainer(trl, use_vllm=True)
    batch.check_same(
        lambda x_T: loss(objective, x_T, tokens) * batch.filled_share,
        lambda x_BL: trl.grpo._compute_loss(trainer, x_BL, theirs),
        lp_T,
    )


def test_the_penalty_is_grpo_s_divergence_from_a_reference(trl: Any, typed_batch: Any) -> None:
    """GRPO adds beta KL(pi || reference) by k3; with the old policy as reference, and beta =
    strength * clip fraction, that is `penalty`."""
    batch, objective = typed_batch, replace(GRPO, ctn="penalty", ctn_strength=0.7)
    lp_T, old_T = batch.policies()
    a_T = batch.tokens()
    weight_T = reduce_weight("trajectory", batch.segments)
    tokens = Tokens(old_T, a_T, weight_T, batch.segments)
    terms = batch_terms(objective, lp_T, tokens)
    if terms.clip_fraction == 0:
        terms = BatchTerms(0.25, terms.masked_T)
    theirs = inputs(batch, old_T, a_T)
    theirs["ref_per_token_logps"] = theirs["old_per_token_logps"]
    trainer = Trainer(trl, beta=0.7 * terms.clip_fraction)
    batch.check_same(
        lambda x_T: loss(objective, x_T, tokens, terms) * batch.filled_share,
        lambda x_BL: trl.grpo._compute_loss(trainer, x_BL, theirs),
        lp_T,
    )


def test_the_clip_fraction(trl: Any, batch: Any) -> None:
    """TRL counts in float32."""
    lp_T, old_T = batch.policies()
    a_T = batch.tokens()
    trainer = Trainer(trl)
    trl.grpo._compute_loss(trainer, batch.pad(lp_T), inputs(batch, old_T, a_T))
    w_T = importance_ratio("token", log_ratio(lp_T, old_T), batch.segments)
    ours = clipped(GRPO, w_T, a_T).float().mean().item()
    (theirs,) = trainer._metrics["train"]["clip_ratio/region_mean"]
    assert theirs == pytest.approx(ours, rel=1e-6)


# --- advantages ---


def test_the_standard_deviation_of_a_group_takes_n_minus_1(trl: Any) -> None:
    """TRL's own function for it; beside it stands 1e-4 in TRL, 1e-6 in ours."""
    reward_GN = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    group_of_B = torch.arange(6).repeat_interleave(5)
    ours_GN = trajectory_advantage("group", reward_GN.flatten(), group_of_B, 6).view(6, 5)
    offset_GN = reward_GN - reward_GN.mean(1, keepdim=True)
    std_G1 = trl.utils.nanstd(reward_GN, dim=1, keepdim=True)
    torch.testing.assert_close(ours_GN, offset_GN / (std_G1 + 1e-6), rtol=1e-12, atol=1e-12)


# --- head ---


def head_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Hidden states, output weights, targets, and tokens per trajectory."""
    generator = torch.Generator().manual_seed(3)
    sizes = [4, 13, 1, 19]
    hidden_SH = torch.randn(sum(sizes), 16, generator=generator, dtype=dtype)
    weight_VH = torch.randn(211, 16, generator=generator, dtype=dtype) / 4
    target_S = torch.randint(211, (sum(sizes),), generator=generator)
    return hidden_SH, weight_VH, target_S, sizes


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["float64", "float32"]
)
def test_log_probs_and_entropy_of_the_head(trl: Any, dtype: torch.dtype, rtol: float) -> None:
    hidden_SH, weight_VH, target_S, _ = head_inputs(dtype)
    lp_S, entropy_S = head_logprobs(hidden_SH, Head(weight_VH), target_S, chunk_tokens=10)
    logits_SV = hidden_SH @ weight_VH.T
    theirs_S = trl.utils.selective_log_softmax(logits_SV[None], target_S[None])[0]
    torch.testing.assert_close(lp_S, theirs_S, rtol=rtol, atol=0)
    theirs_S = trl.utils.entropy_from_logits(logits_SV)
    torch.testing.assert_close(entropy_S, theirs_S, rtol=rtol, atol=0)


@pytest.mark.parametrize("chunk_tokens", [8, 64])
def test_gradients_of_the_head_are_autograd_s_through_selective_log_softmax(
    trl: Any, chunk_tokens: int
) -> None:
    hidden_SH, weight_VH, target_S, sizes = head_inputs(torch.float64)
    scale_S = torch.linspace(-1, 1, len(target_S), dtype=torch.float64)

    def loss_of(lp_S: Tensor, tokens: slice) -> Tensor:
        return (scale_S[tokens] * lp_S.exp()).sum()

    ours = [hidden_SH.clone().requires_grad_(), weight_VH.clone().requires_grad_()]
    theirs = [hidden_SH.clone().requires_grad_(), weight_VH.clone().requires_grad_()]
    found = head_loss(ours[0], Head(ours[1]), target_S, loss_of, sizes, chunk_tokens)
    logits_SV = theirs[0] @ theirs[1].T
    lp_S = trl.utils.selective_log_softmax(logits_SV[None], target_S[None])[0]
    expected = loss_of(lp_S, slice(None))
    torch.testing.assert_close(found.loss, expected, rtol=1e-12, atol=1e-15)
    found.loss.backward()
    expected.backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-14)
