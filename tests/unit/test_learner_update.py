"""What one step trains on: old log-probs, corrections, minibatches, turn rewards, refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from leeway.learner.batch import PackedBatch, build_batch
from leeway.learner.config import LearnerConfig
from leeway.learner.errors import NonFiniteError
from leeway.learner.objective.kinds import Correction, Reduce
from leeway.learner.objective.presets import PRESETS
from leeway.learner.trainer import Trainer
from leeway.learner.update import Update, build_update, tokens_of
from leeway.replay.errors import DataError
from leeway.replay.schema import MAX_REWARD, Group, GroupId, Trajectory, Turn

torch.set_num_threads(1)


def trajectory(
    name: str,
    sizes: list[int],
    reward: float = 1.0,
    turn_rewards: tuple[float, ...] | None = None,
    first_id: int = 1,
) -> Trajectory:
    """Turns of so many generated tokens, one observed token behind each, two of prompt; ids count
    up from `first_id`."""
    turns, position = [], 2
    for size in sizes:
        turns.append(Turn(position, size, 1, "search"))
        position += size + 1
    return Trajectory(
        trajectory_id=name,
        token_ids=np.arange(first_id, first_id + position, dtype=np.int32),
        turns=tuple(turns),
        logprobs=np.full(sum(sizes), -1.0, np.float32),
        versions=np.zeros(sum(sizes), np.int32),
        reward=reward,
        stop_reason="answer",
        scores={},
        duration_s=1.0,
        turn_rewards=turn_rewards,
    )


def batch_of(*trajectories: Trajectory) -> PackedBatch:
    group = Group(group_id=GroupId("g"), question_id="q", worker_id="w", trajectories=trajectories)
    return build_batch([group])


def two() -> PackedBatch:
    """Turns of 2 and 1 tokens that won, one turn of 1 token that lost; ids 1 to 7 and 30 to 33."""
    return batch_of(trajectory("a", [2, 1]), trajectory("b", [1], reward=0.0, first_id=30))


def many(num: int = 7) -> PackedBatch:
    return batch_of(*(trajectory(f"t{i}", [1 + i % 3, 2], float(i % 2)) for i in range(num)))


PROXIMAL_T = torch.tensor([-1.0, -1.0, -1.0, -1.0]) + torch.tensor([0.25, 1.5, 4.0, 1.0]).log()


def test_ratios_are_taken_against_the_policy_that_sampled() -> None:
    tokens = build_update(two(), PRESETS["grpo"], 0).tokens
    assert tokens.old_T.tolist() == [-1.0] * 4
    assert tokens.correction_T is None


def test_ratios_are_taken_against_the_start_of_the_step_where_old_is_proximal() -> None:
    objective = replace(PRESETS["grpo"], old="proximal")
    tokens = build_update(two(), objective, 0, proximal_T=PROXIMAL_T).tokens
    assert tokens.old_T.tolist() == PROXIMAL_T.tolist()
    assert tokens.correction_T is None


@pytest.mark.parametrize(
    ("correction", "expected"),
    [("truncate", [0.25, 1.5, 2.0, 1.0]), ("mask", [0.0, 1.5, 0.0, 1.0])],
)
def test_the_correction_is_the_start_of_the_step_over_the_sampler(
    correction: Correction, expected: list[float]
) -> None:
    objective = replace(PRESETS["decoupled-grpo"], correction=correction)
    tokens = build_update(two(), objective, 0, proximal_T=PROXIMAL_T).tokens
    assert tokens.correction_T is not None
    assert tokens.correction_T.tolist() == pytest.approx(expected, rel=1e-6)
    # Weights 1/(2 trajectories * 3 tokens) and 1/(2 * 1).
    by_hand = [expected[0] / 6, expected[1] / 6, expected[2] / 6, expected[3] / 2]
    assert tokens.term_weight_T.tolist() == pytest.approx(by_hand, rel=1e-6)


def minibatches(batch: PackedBatch, version: int, num: int = 3) -> tuple[tuple[int, ...], ...]:
    return build_update(batch, PRESETS["so-grpo"], version, num).minibatches


def test_one_minibatch_is_the_batch_in_order() -> None:
    assert minibatches(many(), 5, num=1) == ((0, 1, 2, 3, 4, 5, 6),)


def test_minibatches_hold_every_trajectory_once_in_equal_shares() -> None:
    shares = minibatches(many(), 5)
    assert sorted(b for share in shares for b in share) == list(range(7))
    assert [len(share) for share in shares] == [3, 2, 2]


def test_minibatches_are_drawn_by_the_version() -> None:
    batch = many()
    assert minibatches(batch, 5) == minibatches(batch, 5) == minibatches(many(), 5)
    assert len({minibatches(batch, version) for version in range(5)}) > 1


def test_there_are_no_more_minibatches_than_trajectories() -> None:
    assert sorted(minibatches(two(), 0, num=5)) == [(0,), (1,)]


@pytest.mark.parametrize("reduce", ["token", "trajectory", "turn"])
def test_weights_sum_to_one_over_each_minibatch(reduce: Reduce) -> None:
    batch = many()
    update = build_update(batch, replace(PRESETS["so-grpo"], reduce=reduce), 1, 3)
    for share in update.minibatches:
        weight_S = update.tokens.weight_T[tokens_of(batch, share)]
        assert weight_S.sum().item() == pytest.approx(1, abs=1e-6)


def test_weights_of_a_minibatch_by_hand() -> None:
    # Each trajectory stands alone: 3 tokens, and 1.
    update = build_update(two(), PRESETS["so-grpo"], 0, 2)
    assert update.tokens.weight_T.tolist() == pytest.approx([1 / 3] * 3 + [1.0])


def test_advantages_are_of_the_whole_batch_whatever_the_minibatches() -> None:
    one, three = (build_update(many(), PRESETS["so-grpo"], 1, num).tokens for num in (1, 3))
    assert one.a_T.tolist() == three.a_T.tolist()


def test_trajectories_of_equal_rewards_have_no_gradient() -> None:
    equal = batch_of(trajectory("a", [2]), trajectory("b", [1]))
    assert build_update(equal, PRESETS["so-grpo"], 0).has_gradient((0, 1)) == [False, False]
    assert build_update(two(), PRESETS["so-grpo"], 0).has_gradient((1,)) == [True]


def update_by_values(
    batch: PackedBatch, name: str, *values: float, gamma: float = 1.0, lam: float = 1.0
) -> Update:
    objective = replace(PRESETS[name], gamma=gamma, gae_lambda=lam)
    return build_update(batch, objective, 0, value_T=torch.tensor(values))


def test_the_reward_is_earned_by_the_last_trained_token() -> None:
    # With lambda 0 an advantage is reward + V of the next token - V.
    update = update_by_values(two(), "ppo", 0.0, 0.0, 0.0, 0.0, lam=0.0)
    assert update.tokens.a_T.tolist() == [0.0, 0.0, 1.0, 0.0]


def test_a_turn_s_reward_is_earned_by_its_last_token() -> None:
    batch = batch_of(trajectory("a", [2, 1, 3], 0.75, (0.5, 0.0, 0.25)))
    update = update_by_values(batch, "ppo", *[0.0] * 6, lam=0.0)
    assert update.tokens.a_T.tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 0.25]


def test_the_reward_of_a_turn_without_tokens_moves_to_the_turn_before_it() -> None:
    batch = batch_of(trajectory("a", [2, 0, 1, 0], 1.75, (0.5, 0.25, 0.0, 1.0)))
    assert batch.turn_reward_K.tolist() == [0.75, 0.0, 1.0, 0.0]
    update = update_by_values(batch, "ppo", *[0.0] * 3, lam=0.0)
    assert update.tokens.a_T.tolist() == [0.0, 0.75, 1.0]


def test_the_reward_of_a_first_turn_without_tokens_moves_to_the_first_that_has_one() -> None:
    batch = batch_of(trajectory("a", [0, 2], 1.0, (0.25, 0.75)))
    assert batch.turn_reward_K.tolist() == [0.0, 1.0]


def test_the_reward_of_a_trajectory_that_ends_on_an_empty_turn_is_not_lost() -> None:
    batch = batch_of(trajectory("a", [2, 0], 1.0))
    update = update_by_values(batch, "so-ppo", 0.25, 9.0)
    assert update.tokens.a_T.tolist() == [0.75, 0.75]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any), min_size=1,
                   max_size=3),
    by_turn=st.booleans(),
    gamma=st.floats(0.1, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_gae_of_a_batch_equals_a_loop(
    sizes: list[list[int]], by_turn: bool, gamma: float, lam: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rewards = [rng.integers(-2, 3, len(of)).astype(float).tolist() for of in sizes]
    batch = batch_of(
        *(trajectory(f"t{b}", of, sum(rewards[b]), tuple(rewards[b])) for b, of in enumerate(sizes))
    )
    value = rng.standard_normal(batch.num_tokens).astype(np.float32).tolist()
    expected, token = [], 0
    for b, of in enumerate(sizes):
        earned = list(rewards[b])
        trained = [k for k, size in enumerate(of) if size]
        for k, size in enumerate(of):
            if not size:
                to = max((t for t in trained if t < k), default=trained[0])
                earned[to], earned[k] = earned[to] + earned[k], 0.0
        # Steps as (first token, number of tokens, reward).
        steps: list[tuple[int, int, float]] = []
        for k in trained:
            if by_turn:
                steps.append((token, of[k], earned[k]))
            else:
                steps += [(token + i, 1, earned[k] * (i == of[k] - 1)) for i in range(of[k])]
            token += of[k]
        behind, advantages = 0.0, []
        for (at, num, reward), after in reversed(list(pairwise([*steps, None]))):
            delta = reward + gamma * (value[after[0]] if after else 0.0) - value[at]
            behind = delta + gamma * lam * behind
            advantages = [behind] * num + advantages
        expected += advantages
    update = update_by_values(batch, "so-ppo" if by_turn else "ppo", *value, gamma=gamma, lam=lam)
    assert update.tokens.a_T.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("turn_rewards", "problem"),
    [
        ((1.0,), r"trajectory a: 1 turn rewards for 2 turns"),
        ((0.5, float("nan")), r"trajectory a: turn 1: reward is nan"),
        ((float("inf"), 0.0), r"trajectory a: turn 0: reward is inf"),
        ((0.5, 0.25), r"trajectory a: its turn rewards sum to 0.75, its reward is 1"),
    ],
)
def test_turn_rewards_that_cannot_be_are_refused(
    turn_rewards: tuple[float, ...], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        batch_of(trajectory("a", [2, 1], 1.0, turn_rewards))


def test_an_empty_turn_is_no_sibling_of_the_turns_of_its_index() -> None:
    """First turns earned 1 and 1, the third has no token: without it there is nothing to tell."""
    batch = batch_of(
        trajectory("a", [1, 1], reward=1.0, turn_rewards=(1.0, 0.0)),
        trajectory("b", [1, 1], reward=2.0, turn_rewards=(1.0, 1.0)),
        trajectory("c", [0, 1], reward=0.0, turn_rewards=(0.0, 0.0)),
    )
    objective = replace(PRESETS["grpo"], advantage="group-turn")
    a_T = build_update(batch, objective, 0).tokens.a_T
    # Tokens: a0 a1 b0 b1 c1; second turns earned 0, 1 and 0.
    assert a_T.tolist() == pytest.approx([0, -0.5774, 0, 1.1547, -0.5774], abs=1e-4)


def test_a_value_that_is_not_finite_is_refused_naming_trajectory_and_turn() -> None:
    with pytest.raises(NonFiniteError, match=r"trajectory a, turn 1: value is inf"):
        update_by_values(two(), "ppo", 0.0, 0.0, torch.inf, torch.nan)


@pytest.mark.parametrize("name", ["reinforce", "rloo"])
def test_an_advantage_beyond_float32_is_refused_naming_trajectory_and_turn(name: str) -> None:
    """No reward of a record reaches so far: those are refused before they are packed."""
    batch = two()
    batch.reward_B[0] = 1e39
    with pytest.raises(NonFiniteError, match=r"trajectory a, turn 0: advantage is inf"):
        build_update(batch, PRESETS[name], 0)


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_largest_reward_that_is_taken_trains(name: str) -> None:
    batch = batch_of(trajectory("a", [2, 1], MAX_REWARD), trajectory("b", [1], 0.0))
    trainer = Trainer(tiny(), LearnerConfig(objective=name, warmup_steps=0))
    assert trainer.train_step(batch, 0).grad_norm > 0


@pytest.mark.parametrize(
    ("name", "problem"),
    [("ppo", "value is nan"), ("decoupled-grpo", "log-prob under the policy being trained is nan")],
)
def test_a_nan_at_the_start_of_a_step_stops_it_before_any_weight_changes(
    name: str, problem: str
) -> None:
    trainer = Trainer(tiny(), LearnerConfig(objective=name, warmup_steps=0))
    networks: list[nn.Module] = [trainer.model]
    read_first: nn.Module = trainer.model.base_model
    if trainer.critic is not None:
        networks.append(trainer.critic.model)
        read_first = trainer.critic.model.base_model
    # Only trajectory b holds id 30.
    read_first.get_parameter("embed_tokens.weight").data[30] = torch.nan
    before = [p.clone() for network in networks for p in network.parameters()]
    with pytest.raises(NonFiniteError, match=rf"trajectory b, turn 0: {problem}"):
        trainer.train_step(two(), 0)
    after = [p for network in networks for p in network.parameters()]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def test_a_fault_in_the_data_stops_a_step_of_two_minibatches_before_any_weight_changes() -> None:
    batch = two()
    batch.reward_B[1] = torch.inf
    config = LearnerConfig(objective="reinforce", warmup_steps=0, num_minibatches=2)
    trainer = Trainer(tiny(), config)
    before = [p.clone() for p in trainer.parameters]
    with pytest.raises(NonFiniteError, match=r"trajectory a, turn 0: advantage is -inf"):
        trainer.train_step(batch, 0)
    torch.testing.assert_close(trainer.parameters, before, rtol=0, atol=0)


def test_a_weight_that_only_the_second_minibatch_meets_stops_its_own_optimizer_step() -> None:
    config = LearnerConfig(objective="reinforce", warmup_steps=0, num_minibatches=2)
    trainer = Trainer(tiny(), config)
    trainer.model.base_model.get_parameter("embed_tokens.weight").data[30] = torch.nan
    batch = two()
    version = next(v for v in range(9) if minibatches(batch, v, 2) == ((0,), (1,)))
    taken: list[list[torch.Tensor]] = []
    trainer.optimizer.register_step_post_hook(
        lambda *_: taken.append([p.clone() for p in trainer.parameters])
    )
    with pytest.raises(NonFiniteError, match=r"trajectory b, turn 0: .* is nan; this optimizer"):
        trainer.train_step(batch, version)
    assert len(taken) == 1
    torch.testing.assert_close(trainer.parameters, taken[0], rtol=0, atol=0, equal_nan=True)
