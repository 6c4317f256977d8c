"""Clip, reduce, advantage, ctn and presets against hand-computed numbers."""

import math

import pytest
import torch

from leeway.learner.config import LearnerConfig
from leeway.learner.objective import clip as clips
from leeway.learner.objective.advantage import has_equal_rewards, trajectory_advantage
from leeway.learner.objective.ctn import bias_coefficient, ctn_divisor, ctn_penalty
from leeway.learner.objective.kinds import Advantage, Reduce
from leeway.learner.objective.loss import BatchTerms, Tokens, loss
from leeway.learner.objective.presets import PRESETS, resolve
from leeway.learner.objective.ratio import Segments
from leeway.learner.objective.reduce import reduce_weight
from leeway.replay.errors import ConfigurationError

TWO_TRAJECTORIES = Segments(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 1, 1]), 3, 2)
"""Turns of [[1 token], [2 tokens, 1 token]]."""


def test_clip_mask_follows_the_sign_of_the_advantage() -> None:
    w_T = torch.tensor([1.3, 1.3, 0.7, 0.7, 1.1, 1.3])
    a_T = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0])
    clipped_T = clips.clipped_tokens(w_T, a_T, 0.2, 0.2)
    assert clipped_T.tolist() == [True, False, False, True, False, False]


def test_clipped_surrogate_by_hand() -> None:
    w_T, a_T = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1]), torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    term_T = clips.clipped_surrogate(w_T, a_T, 0.2, 0.3)
    assert term_T.tolist() == pytest.approx([1.3, 0.5, -1.5, -0.8, 2.2])


def test_dual_clip_bounds_what_a_negative_advantage_costs() -> None:
    term_T = clips.clipped_surrogate(
        torch.tensor([5.0, 5.0]), torch.tensor([-1.0, 1.0]), 0.2, 0.2, 3
    )
    assert term_T.tolist() == pytest.approx([-3.0, 1.2])


def test_clipped_tokens_have_no_gradient_and_the_others_have_w_times_a() -> None:
    w_T = torch.tensor([1.5, 0.5, 1.1], requires_grad=True)
    clips.clipped_surrogate(w_T, torch.tensor([1.0, -1.0, 2.0]), 0.2, 0.2).sum().backward()
    assert w_T.grad is not None and w_T.grad.tolist() == [0.0, 0.0, 2.0]


def test_weights_of_the_detached_surrogates_by_hand() -> None:
    w_T, a_T = torch.tensor([3.0, 0.5, 3.0]), torch.tensor([1.0, -1.0, -1.0])
    assert clips.truncated_weight(w_T, 2.0).tolist() == [2.0, 0.5, 2.0]
    assert clips.cispo_weight(w_T, 0.2, 0.4).tolist() == pytest.approx([1.4, 0.8, 1.4])
    assert clips.topr_weight(w_T, a_T).tolist() == [1.0, 0.5, 1.0]
    expected = [9 * math.exp(-6), 0.125 * math.exp(1), 27 * math.exp(-4)]
    assert clips.vespo_weight(w_T, a_T).tolist() == pytest.approx(expected)


def test_second_moment_mask_drops_the_largest_until_the_mean_square_fits() -> None:
    # Candidates 0.1, 0.2, 0.5 (A > 0 and d > 0); -3 moves back towards the sampler.
    d_T, a_T = torch.tensor([0.5, 0.1, -3.0, 0.2]), torch.ones(4)
    assert clips.second_moment_mask(d_T, a_T, 0.04).tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token", [1 / 4] * 4),
        ("trajectory", [1 / 2, 1 / 6, 1 / 6, 1 / 6]),
        ("turn", [1 / 2, 1 / 8, 1 / 8, 1 / 4]),
    ],
)
def test_reduce_weights_by_hand(kind: Reduce, expected: list[float]) -> None:
    assert reduce_weight(kind, TWO_TRAJECTORIES).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("group", [1.1547, -0.5774, -0.5774]),
        ("group-turn", [1.1547, -0.5774, -0.5774]),
        ("group-unscaled", [2 / 3, -1 / 3, -1 / 3]),
        ("leave-one-out", [1.0, -0.5, -0.5]),
        ("batch", [0.55, -0.45, -0.45]),
    ],
)
def test_advantages_by_hand(kind: Advantage, expected: list[float]) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.8], dtype=torch.float64)
    a_B = trajectory_advantage(kind, rewards, torch.tensor([0, 0, 0, 1]), 2)
    assert a_B[:3].tolist() == pytest.approx(expected, abs=1e-4)


def test_a_group_of_equal_rewards_has_exactly_zero_advantage() -> None:
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1])
    assert has_equal_rewards(rewards, groups, 2).tolist() == [True, True]
    for kind in ("group", "group-unscaled", "leave-one-out"):
        assert trajectory_advantage(kind, rewards, groups, 2).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("norm", "c", "raw", "expected"),
    [
        (0, 1, True, 1),
        (4, 1, False, 4),
        (0.25, 1, False, 1),
        (0.25, 1, True, 0.25),
        (4, 2, False, 2),
    ],
)
def test_ctn_divisor_by_hand(norm: float, c: float, raw: bool, expected: float) -> None:
    assert ctn_divisor(norm, c, raw) == expected


def test_ctn_coefficient_is_weight_times_ratio_times_advantage_where_clipped() -> None:
    coefficient_T = bias_coefficient(
        torch.tensor([1.5, 1.1]), torch.tensor([2.0, 2.0]), torch.tensor([0.5, 0.5]),
        torch.tensor([True, False]),
    )  # fmt: skip
    assert coefficient_T.tolist() == [1.5, 0.0]


def test_ctn_penalty_by_hand() -> None:
    penalty = ctn_penalty(torch.tensor([0.1, 0.3]), torch.tensor([0.5, 0.5]), 0.25, 2.0)
    assert penalty.item() == pytest.approx(0.1)


def test_the_penalty_is_added_to_the_loss() -> None:
    lp_T, old_T = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-1.1, -1.1, -1.1, -1.1])
    tokens = Tokens(old_T, torch.zeros(4), torch.full((4,), 0.25), TWO_TRAJECTORIES)
    terms = BatchTerms(0.5, torch.zeros(4, dtype=torch.bool))
    total = loss(PRESETS["so-grpo-penalty"], lp_T, tokens, terms)
    assert total.item() == pytest.approx(0.5 * 0.0048374, rel=1e-3)


def test_so_grpo_loss_by_hand() -> None:
    # Turn ratios exp(0.1), exp(0.3) (clipped to 1.2), exp(-0.1); A = 1; weights 1/2, 1/6, 1/6, 1/6.
    d_T = torch.tensor([0.1, 0.2, 0.4, -0.1])
    s = TWO_TRAJECTORIES
    tokens = Tokens(torch.zeros(4), torch.ones(4), reduce_weight("trajectory", s), s)
    expected = -(math.exp(0.1) / 2 + 1.2 / 3 + math.exp(-0.1) / 6)
    assert loss(PRESETS["so-grpo"], d_T, tokens).item() == pytest.approx(expected, rel=1e-6)


def test_an_unknown_objective_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean so-grpo\? There are cispo,.*vespo"):
        resolve(LearnerConfig(objective="so_grpo"))


@pytest.mark.parametrize(
    ("objective", "override"),
    [
        ("rloo", {"eps_high": 0.3}),
        ("reinforce", {"ratio": "turn"}),
        ("vespo", {"ratio": "turn"}),
        ("cispo", {"dual_clip": 3.0}),
        ("grpo", {"ctn_c": 2.0}),
        ("so-grpo", {"ctn_strength": 2.0}),
        ("so-grpo-penalty", {"ctn_target": "learning-rate"}),
        ("grpo", {"gae_lambda": 0.9}),
        ("so-grpo", {"critic_learning_rate": 1e-3}),
        ("grpo", {"max_correction": 3.0}),
        ("rloo", {"old": "proximal"}),
        ("decoupled-grpo", {"eps_high": 0.3}),
        ("decoupled-ppo", {"dual_clip": 3.0}),
        ("cispo", {"eps_low": 0.3, "old": "proximal", "correction": "mask"}),
        ("ppo", {"value_clip": 0.2}),
        ("so-ppo", {"value_clip": 0.2, "critic_epochs": 1}),
        ("grpo", {"value_clip": 0.2}),
    ],
)
def test_an_override_that_would_do_nothing_is_refused(
    objective: str, override: dict[str, float | str]
) -> None:
    config = LearnerConfig.model_validate({"objective": objective} | override)
    with pytest.raises(ConfigurationError, match=f"learner.{next(iter(override))} does nothing"):
        resolve(config)


@pytest.mark.parametrize(
    ("objective", "override", "sentence"),
    [
        ("grpo", {"advantage": "gae"}, 'advantage = "gae" needs a critic'),
        ("ppo", {"advantage": "group"}, "leaves the critic"),
        ("rloo", {"ctn": "gradient"}, "triggered by the clip"),
        ("m2po", {"ctn": "penalty"}, "triggered by the clip"),
        ("m2po", {"ratio": "turn"}, 'tokens that learner.objective = "m2po" masks'),
        ("grpo", {"correction": "mask"}, 'set learner.old = "proximal"'),
        ("decoupled-grpo", {"old": "behaviour"}, 'or learner.correction = "none"'),
        ("tis", {"old": "proximal"}, "would undo"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(
    objective: str, override: dict[str, str], sentence: str
) -> None:
    config = LearnerConfig.model_validate({"objective": objective} | override)
    with pytest.raises(ConfigurationError, match=sentence):
        resolve(config)


ONE_STEP_FROM_PROXIMAL = [
    ("so-grpo", {"old": "proximal"}, 'ctn = "gradient" never finds a clipped token'),
    ("decoupled-grpo", {"ctn": "gradient"}, 'ctn = "gradient" never finds a clipped token'),
    ("decoupled-ppo", {"ctn": "penalty"}, 'ctn = "penalty" never finds a clipped token'),
    ("m2po", {"old": "proximal"}, 'learner.objective = "m2po" never masks a token'),
    ("m2po", {"old": "proximal", "correction": "mask"}, "never masks a token"),
    ("grpo", {"old": "proximal"}, 'correction = "none" leaves stale tokens uncorrected'),
    ("decoupled-grpo", {"correction": "none"}, "leaves stale tokens uncorrected"),
]


@pytest.mark.parametrize(("objective", "override", "sentence"), ONE_STEP_FROM_PROXIMAL)
def test_what_needs_ratios_is_refused_where_one_step_starts_from_the_policy_they_are_against(
    objective: str, override: dict[str, str], sentence: str
) -> None:
    one = {"objective": objective} | override
    with pytest.raises(ConfigurationError, match=f"{sentence}.*num_minibatches to at least 2"):
        resolve(LearnerConfig.model_validate(one))
    assert resolve(LearnerConfig.model_validate(one | {"num_minibatches": 2})).old == "proximal"


@pytest.mark.parametrize(
    "override",
    [{}, {"measure_ctn": True}, {"correction": "mask"}, {"old": "behaviour", "correction": "none"}],
)
def test_one_step_of_a_decoupled_objective_is_its_correction_and_stays(
    override: dict[str, str | bool],
) -> None:
    resolve(LearnerConfig.model_validate({"objective": "decoupled-grpo"} | override))


def test_a_clip_distance_of_a_decoupled_objective_is_read_from_the_second_minibatch_on() -> None:
    config = LearnerConfig(objective="decoupled-grpo", eps_low=0.1, num_minibatches=2)
    assert resolve(config).eps_low == 0.1


def test_a_value_clip_is_read_from_the_second_epoch_on() -> None:
    resolve(LearnerConfig(objective="ppo", value_clip=0.1, critic_epochs=2))


def test_configured_parts_replace_the_preset_s() -> None:
    config = LearnerConfig(ratio="turn-arithmetic", reduce="turn", dual_clip=3)
    objective = resolve(config)
    parts = (objective.ratio, objective.reduce, objective.dual_clip, objective.ctn)
    assert parts == ("turn-arithmetic", "turn", 3, "gradient")


def test_configured_clip_distances_replace_the_preset_s() -> None:
    objective = resolve(LearnerConfig(objective="gspo", eps_high=0.01))
    assert (objective.eps_low, objective.eps_high) == (3e-4, 0.01)
