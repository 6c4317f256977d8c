"""Our objectives against verl's on random batches: values, and gradients by log-prob."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from leeway.learner.critic import value_loss
from leeway.learner.head import Head, head_logprobs
from leeway.learner.objective.advantage import gae, trajectory_advantage, whiten
from leeway.learner.objective.correction import correction_weight
from leeway.learner.objective.kinds import Advantage, Correction, Reduce
from leeway.learner.objective.loss import Tokens, clipped, loss
from leeway.learner.objective.presets import PRESETS, Objective
from leeway.learner.objective.ratio import importance_ratio, kl_k3, log_ratio
from leeway.learner.objective.reduce import reduce_weight

REDUCES: list[tuple[Reduce, str]] = [
    ("token", "token-mean"),
    ("trajectory", "seq-mean-token-mean"),
]
"""Ours and verl's name."""
NO_DUAL_CLIP = 1e9
"""verl's dual clip cannot be left out, only put out of reach."""
OUR_FLOOR, VERL_FLOOR = 1e-6, 1e-8
EXACT = 1e-12
"""Relative, where neither side computes in float32."""
reduces = pytest.mark.parametrize(("ours", "theirs"), REDUCES, ids=["token", "trajectory"])


def actor(verl: Any, **parts: Any) -> Any:
    """verl's configuration of a policy loss."""
    return verl.configs.ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **parts)


def clips(objective: Objective) -> dict[str, float]:
    """verl's keys for the clip distances of an objective."""
    eps_low, eps_high = objective.eps_low, objective.eps_high
    assert eps_low is not None and eps_high is not None
    return {
        "clip_ratio_low": eps_low,
        "clip_ratio_high": eps_high,
        "clip_ratio_c": objective.dual_clip or NO_DUAL_CLIP,
    }


def check_policy_loss(
    verl: Any,
    batch: Any,
    name: str,
    objective: Objective,
    a_T: Tensor,
    agg: str,
    rows: Any = None,
    spread: float = 0.3,
    **parts: Any,
) -> None:
    """`objective` against verl's policy loss `name`, on rows of their own if given."""
    rows = rows or batch
    lp_T, old_T = batch.policies(spread)
    tokens = Tokens(old_T, a_T, reduce_weight(objective.reduce, batch.segments), batch.segments)
    old_BL, a_BL, config = rows.pad(old_T), rows.pad(a_T), actor(verl, **parts)
    policy_loss = verl.algos.get_policy_loss_fn(name)
    rows.check_same(
        lambda x_T: loss(objective, x_T, tokens),
        lambda x_BL: policy_loss(old_BL, x_BL, a_BL, rows.mask_BL, agg, config)[0],
        lp_T,
    )


# --- policy losses ---


@reduces
@pytest.mark.parametrize("dual_clip", [None, 1.5, 3.0])
def test_ppo_with_and_without_dual_clip(
    verl: Any, typed_batch: Any, ours: Reduce, theirs: str, dual_clip: float | None
) -> None:
    objective = replace(
        PRESETS["ppo"], reduce=ours, eps_low=0.2, eps_high=0.28, dual_clip=dual_clip
    )
    check_policy_loss(
        verl, typed_batch, "vanilla", objective, typed_batch.tokens(), theirs, **clips(objective)
    )


@reduces
def test_log_ratios_beyond_twenty_are_clamped_alike(
    verl: Any, batch: Any, ours: Reduce, theirs: str
) -> None:
    objective = replace(PRESETS["ppo"], reduce=ours)
    check_policy_loss(
        verl, batch, "vanilla", objective, batch.tokens(), theirs, spread=30, **clips(objective)
    )


def test_the_clip_fraction(verl: Any, batch: Any) -> None:
    """verl counts in float32."""
    objective = PRESETS["ppo"]
    lp_T, old_T = batch.policies()
    a_T = batch.tokens()
    config = actor(verl, **clips(objective))
    metrics = verl.algos.compute_policy_loss_vanilla(
        *map(batch.pad, (old_T, lp_T, a_T)), batch.mask_BL, "token-mean", config
    )[1]
    w_T = importance_ratio(objective.ratio, log_ratio(lp_T, old_T), batch.segments)
    ours = clipped(objective, w_T, a_T).float().mean().item()
    assert metrics["actor/pg_clipfrac"] == pytest.approx(ours, rel=1e-6)
    assert batch.num_tokens < 100 or 0.1 < ours < 0.9


@reduces
@pytest.mark.parametrize("eps", [(3e-4, 4e-4), (0.2, 0.28)], ids=str)
def test_gspo(
    verl: Any, typed_batch: Any, ours: Reduce, theirs: str, eps: tuple[float, float]
) -> None:
    """verl sends the gradient of a token through that token's log-prob, sg(s_i) A_t grad log pi_t;
    ours goes through the mean over the trajectory. They are one where the trajectory shares its
    advantage, as GSPO has it. verl bounds the averaged log-ratio above by 10, ours by 20: neither
    is reached.
    """
    objective = replace(PRESETS["gspo"], reduce=ours, eps_low=eps[0], eps_high=eps[1])
    a_T = typed_batch.per_trajectory(typed_batch.normal(typed_batch.num_rows))
    check_policy_loss(verl, typed_batch, "gspo", objective, a_T, theirs, **clips(objective))


@reduces
def test_gspo_with_an_advantage_per_token_has_the_same_value(
    verl: Any, batch: Any, ours: Reduce, theirs: str
) -> None:
    """Its gradient differs, for the reason that `test_gspo` gives: the advantages of a trajectory
    mix in ours, and stay with their tokens in verl's."""
    objective = replace(PRESETS["gspo"], reduce=ours, eps_low=0.1, eps_high=0.1)
    lp_T, old_T = batch.policies()
    a_T = batch.tokens()
    s = batch.segments
    our_loss = loss(objective, lp_T, Tokens(old_T, a_T, reduce_weight(ours, s), s))
    their_loss, _ = verl.algos.compute_policy_loss_gspo(
        *map(batch.pad, (old_T, lp_T, a_T)),
        batch.mask_BL,
        theirs,
        actor(verl, **clips(objective)),
    )
    torch.testing.assert_close(our_loss, their_loss, rtol=1e-7, atol=1e-7)


def test_the_turn_ratio_is_gspo_s_with_turns_as_rows(verl: Any, typed_batch: Any) -> None:
    """verl has no ratio per turn; its GSPO over rows that hold one turn each is one. A turn shares
    its advantage."""
    objective = replace(PRESETS["turn-ppo"], reduce="token")
    rows = typed_batch.with_turns_as_rows()
    a_T = rows.per_trajectory(rows.normal(rows.num_rows))
    check_policy_loss(
        verl, typed_batch, "gspo", objective, a_T, "token-mean", rows, **clips(objective)
    )


def test_the_turn_reduction_is_a_mean_over_rows_of_turns(verl: Any, batch: Any) -> None:
    """The mean over trajectories of the mean over turns is a mean over all turns where each
    trajectory has the same number of them, here one: every turn is a trajectory of its own."""
    rows = batch.with_turns_as_rows()
    objective = replace(PRESETS["turn-ppo"], reduce="turn")
    a_T = rows.per_trajectory(rows.normal(rows.num_rows))
    check_policy_loss(verl, rows, "gspo", objective, a_T, "seq-mean-token-mean", **clips(objective))


@reduces
@pytest.mark.parametrize("eps", [(1.0, 4.0), (0.2, 0.28)], ids=str)
def test_cispo(
    verl: Any, typed_batch: Any, ours: Reduce, theirs: str, eps: tuple[float, float]
) -> None:
    objective = replace(PRESETS["cispo"], reduce=ours, eps_low=eps[0], eps_high=eps[1])
    check_policy_loss(
        verl, typed_batch, "cispo", objective, typed_batch.tokens(), theirs, **clips(objective)
    )


@reduces
def test_reinforce_is_gpg(verl: Any, typed_batch: Any, ours: Reduce, theirs: str) -> None:
    """GPG's loss is -A log pi, as ours of `reinforce` and `rloo` is."""
    objective = replace(PRESETS["reinforce"], reduce=ours)
    check_policy_loss(verl, typed_batch, "gpg", objective, typed_batch.tokens(), theirs)


@reduces
def test_tis_is_bypass_mode_with_reinforce(
    verl: Any, typed_batch: Any, ours: Reduce, theirs: str
) -> None:
    objective = replace(PRESETS["tis"], reduce=ours)
    correction = verl.trainer_configs.RolloutCorrectionConfig(
        loss_type="reinforce",
        rollout_is="token",
        rollout_is_threshold=objective.max_weight,
        rollout_rs=None,
    )
    policy_loss = verl.configs.PolicyLossConfig(rollout_correction=correction)
    check_policy_loss(
        verl,
        typed_batch,
        "bypass_mode",
        objective,
        typed_batch.tokens(),
        theirs,
        policy_loss=policy_loss,
    )


def test_geo_mean_is_the_sequence_ratio_where_neither_clips(verl: Any, batch: Any) -> None:
    """GMPO clips the log-ratio of each token before it averages, GSPO the average: they agree where
    no token is clipped. GMPO's mean is over all rows, empty ones included, where ours counts those
    with a trained token."""
    objective = replace(PRESETS["gspo"], eps_low=0.99, eps_high=1e3)
    lp_T, old_T = batch.policies(spread=0.1)
    a_T = batch.per_trajectory(batch.normal(batch.num_rows))
    tokens = Tokens(old_T, a_T, reduce_weight("trajectory", batch.segments), batch.segments)
    config = actor(verl, clip_ratio_low=1e3, clip_ratio_high=1e3)
    old_BL, a_BL = batch.pad(old_T), batch.pad(a_T)
    geo_mean = verl.algos.compute_policy_loss_geo_mean
    batch.check_same(
        lambda x_T: loss(objective, x_T, tokens) * batch.filled_share,
        lambda x_BL: geo_mean(old_BL, x_BL, a_BL, batch.mask_BL, "unused", config)[0],
        lp_T,
    )


# --- three policies ---


@pytest.mark.parametrize(
    ("kind", "threshold"), [("truncate", 2.0), ("mask", "0.5_2.0")], ids=["truncate", "mask"]
)
def test_the_weight_from_behaviour_to_proximal(
    verl: Any, batch: Any, kind: Correction, threshold: float | str
) -> None:
    """`mask` is verl's IcePop: weights outside the interval become 0."""
    proximal_T, behaviour_T = batch.policies()
    theirs_BL, _ = verl.correction.compute_rollout_correction_weights(
        batch.pad(proximal_T) - batch.pad(behaviour_T), batch.mask_BL, "token", threshold
    )
    ours_T = correction_weight(kind, proximal_T, behaviour_T, 2.0)
    torch.testing.assert_close(ours_T, batch.pack(theirs_BL), rtol=EXACT, atol=0)


@reduces
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_decoupled_ppo(
    verl: Any, typed_batch: Any, ours: Reduce, theirs: str, kind: Correction
) -> None:
    batch, objective = typed_batch, replace(PRESETS["decoupled-ppo"], reduce=ours)
    proximal_T, behaviour_T = batch.policies()
    lp_T = proximal_T + 0.3 * batch.tokens()
    a_T = batch.tokens()
    s = batch.segments
    weight_T = correction_weight(kind, proximal_T, behaviour_T, 2.0)
    tokens = Tokens(proximal_T, a_T, reduce_weight(ours, s), s, weight_T)
    proximal_BL, a_BL = batch.pad(proximal_T), batch.pad(a_T)
    weight_BL, _ = verl.correction.compute_rollout_correction_weights(
        proximal_BL - batch.pad(behaviour_T),
        batch.mask_BL,
        "token",
        "0.5_2.0" if kind == "mask" else 2.0,
    )
    config = actor(verl, **clips(objective))
    vanilla = verl.algos.compute_policy_loss_vanilla
    batch.check_same(
        lambda x_T: loss(objective, x_T, tokens),
        lambda x_BL: vanilla(proximal_BL, x_BL, a_BL, batch.mask_BL, theirs, config, weight_BL)[0],
        lp_T,
    )


# --- divergence ---


@pytest.mark.parametrize("name", ["k3", "low_var_kl"])
@pytest.mark.parametrize("spread", [0.3, 12.0])
def test_k3_and_its_gradient(verl: Any, batch: Any, name: str, spread: float) -> None:
    """Both estimate KL(pi || reference) and clamp log-ratios to +-20. verl bounds the result by 10
    as well, which takes the gradient from tokens beyond it; ours does not."""
    lp_T, reference_T = batch.policies(spread)
    reference_BL = batch.pad(reference_T)
    batch.check_same(
        lambda x_T: kl_k3(log_ratio(x_T, reference_T)).clamp(max=10).sum(),
        lambda x_BL: batch.pack(verl.algos.kl_penalty(x_BL, reference_BL, name)).sum(),
        lp_T,
    )


# --- advantages ---


def outcome(batch: Any) -> tuple[Tensor, Tensor]:
    """[B] rewards, some equal within a group, and [B, L] with each reward at one trained token."""
    reward_B = batch.normal(batch.num_rows).mul(2).round().div(2)
    reward_BL = torch.zeros_like(batch.mask_BL, dtype=reward_B.dtype)
    reward_BL[:, 0] = reward_B
    return reward_B, reward_BL


def has_siblings(batch: Any) -> Tensor:
    """[B] bool."""
    return torch.bincount(batch.group_of_B)[batch.group_of_B] > 1


@pytest.mark.parametrize(
    ("kind", "name", "parts"),
    [
        ("group", "grpo", {"epsilon": 1e-6}),
        ("group-unscaled", "grpo", {"norm_adv_by_std_in_grpo": False}),
        ("leave-one-out", "rloo", {}),
        ("leave-one-out", "rloo_vectorized", {}),
    ],
    ids=["grpo", "dr-grpo", "rloo", "rloo-vectorized"],
)
def test_outcome_advantages(
    verl: Any, batch: Any, kind: Advantage, name: str, parts: dict[str, Any]
) -> None:
    """All take n - 1 and GRPO 1e-6 beside the standard deviation. A trajectory without siblings has
    advantage 0 in ours and in verl's vectorized RLOO; in verl's others it keeps its reward, since
    the mean of a group of one counts as 0 and its standard deviation as 1."""
    reward_B, reward_BL = outcome(batch)
    theirs_BL, _ = verl.algos.get_adv_estimator_fn(name)(
        token_level_rewards=reward_BL,
        response_mask=batch.mask_BL,
        index=batch.group_of_B.numpy(),
        **parts,
    )
    ours_B = trajectory_advantage(kind, reward_B, batch.group_of_B, len(reward_B))
    if name != "rloo_vectorized":
        assert ours_B[~has_siblings(batch)].abs().sum() == 0
        ours_B = torch.where(has_siblings(batch), ours_B, reward_B)
    if name == "grpo" and kind == "group":
        ours_B = torch.where(has_siblings(batch), ours_B, reward_B / (1 + 1e-6))
    # Rewards are of order 1, and a group of equal ones has exactly 0 in ours.
    torch.testing.assert_close(
        batch.per_trajectory(ours_B), batch.pack(theirs_BL), rtol=EXACT, atol=EXACT
    )


def check_whitened(ours_T: Tensor, theirs_T: Tensor, raw_T: Tensor) -> None:
    """Ours divides by std + 1e-6, verl by sqrt(variance + 1e-8). Both take n - 1; verl's factor
    n / (n - 1) is float32, which is good to 6e-8."""
    variance = raw_T.var()
    assert variance > 0
    ours_T = ours_T * (variance.sqrt() + OUR_FLOOR)
    theirs_T = theirs_T * (variance + VERL_FLOOR).sqrt()
    torch.testing.assert_close(ours_T, theirs_T, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (1.0, 0.0)])
def test_gae_skips_observations(verl: Any, batch: Any, gamma: float, lam: float) -> None:
    """Rewards at any trained token, values of observations and padding arbitrary. verl whitens what
    it returns; its returns show the advantages before that."""
    reward_T, value_T = batch.tokens(), batch.tokens()
    theirs_BL, returns_BL = verl.algos.compute_gae_advantage_return(
        batch.pad(reward_T), batch.pad(value_T), batch.mask_BL, gamma, lam
    )
    ours = gae(reward_T, value_T, batch.segments.trajectory_of_T, gamma, lam)
    torch.testing.assert_close(ours.return_N, batch.pack(returns_BL), rtol=1e-11, atol=1e-11)
    check_whitened(whiten(ours.advantage_N), batch.pack(theirs_BL), ours.advantage_N)


def test_reinforce_plus_plus_with_a_baseline_is_a_whitened_group_unscaled(
    verl: Any, batch: Any
) -> None:
    """Ours in two parts, `group-unscaled` and `whiten`; as in GRPO, verl leaves the reward of a
    trajectory without siblings as it is."""
    reward_B, reward_BL = outcome(batch)
    theirs_BL, _ = verl.algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        reward_BL, batch.mask_BL, batch.group_of_B.numpy()
    )
    ours_B = trajectory_advantage("group-unscaled", reward_B, batch.group_of_B, len(reward_B))
    raw_T = batch.per_trajectory(torch.where(has_siblings(batch), ours_B, reward_B))
    if raw_T.var() == 0:
        assert whiten(raw_T).abs().max() < 1e-6
    else:
        check_whitened(whiten(raw_T), batch.pack(theirs_BL), raw_T)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_is_gae_without_values(verl: Any, batch: Any, gamma: float) -> None:
    """Discounted returns, whitened: GAE with values 0 and lambda 1."""
    reward_T = batch.tokens()
    config = verl.trainer_configs.AlgoConfig(gamma=gamma)
    theirs_BL, returns_BL = verl.algos.compute_reinforce_plus_plus_outcome_advantage(
        batch.pad(reward_T), batch.mask_BL, config
    )
    zero_T = torch.zeros_like(reward_T)
    ours_T = gae(reward_T, zero_T, batch.segments.trajectory_of_T, gamma, 1.0).advantage_N
    torch.testing.assert_close(ours_T, batch.pack(returns_BL), rtol=1e-11, atol=1e-11)
    check_whitened(whiten(ours_T), batch.pack(theirs_BL), ours_T)


# --- critic and head ---


@pytest.mark.parametrize("clip", [0.2, 1.0])
def test_the_clipped_value_loss_is_half_the_mean_square(
    verl: Any, typed_batch: Any, clip: float
) -> None:
    """Ours is a number per token, whose mean over the tokens the critic takes."""
    batch = typed_batch
    value_T, old_T, return_T = batch.tokens(), batch.tokens(), batch.tokens()
    return_BL, old_BL = batch.pad(return_T), batch.pad(old_T)
    batch.check_same(
        lambda x_T: value_loss(x_T, old_T, return_T, clip).mean(),
        lambda x_BL: verl.algos.compute_value_loss(x_BL, return_BL, old_BL, batch.mask_BL, clip)[0],
        value_T,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_log_probs_and_entropy_of_the_head(verl: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden_SH = torch.randn(37, 16, generator=generator, dtype=dtype)
    weight_VH = torch.randn(211, 16, generator=generator, dtype=dtype)
    target_S = torch.randint(211, (37,), generator=generator)
    lp_S, entropy_S = head_logprobs(hidden_SH, Head(weight_VH), target_S, chunk_tokens=10)
    logits_SV = hidden_SH @ weight_VH.T
    rtol = 1e-12 if dtype == torch.float64 else 1e-6
    functional = verl.functional
    # Logits reach 20 here, whose float32 has a spacing of 2e-6.
    atol = rtol * logits_SV.abs().max().item()
    theirs_S = functional.logprobs_from_logits(logits_SV[None], target_S[None])[0]
    torch.testing.assert_close(lp_S, theirs_S, rtol=rtol, atol=atol)
    theirs_S = functional.entropy_from_logits(logits_SV)
    torch.testing.assert_close(entropy_S, theirs_S, rtol=rtol, atol=atol)
