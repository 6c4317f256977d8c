"""The critic: its loss by hand, where values are read, what it learns, and what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from leeway.learner.batch import PackedBatch, build_batch
from leeway.learner.config import LearnerConfig
from leeway.learner.critic import Critic, value_loss
from leeway.learner.errors import NonFiniteError
from leeway.learner.objective.presets import PRESETS
from leeway.learner.trainer import Trainer
from leeway.learner.update import ValueTargets, build_update
from leeway.learner.world import World
from leeway.replay.schema import Group, GroupId, Trajectory, Turn

V = 64

torch.set_num_threads(1)


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


def trajectory(sizes: list[int], reward: float, seed: int) -> Trajectory:
    """Turns of so many generated tokens, two observed tokens behind each, three of prompt."""
    rng = np.random.default_rng(seed)
    turns, position = [], 3
    for size in sizes:
        turns.append(Turn(position, size, 2, "search"))
        position += size + 2
    return Trajectory(
        trajectory_id=f"t{seed}",
        token_ids=rng.integers(0, V, position).astype(np.int32),
        turns=tuple(turns),
        logprobs=(-np.log(V) + 0.5 * rng.standard_normal(sum(sizes))).astype(np.float32),
        versions=np.zeros(sum(sizes), np.int32),
        reward=reward,
        stop_reason="answer",
        scores={},
        duration_s=1.0,
    )


def batch_of(*trajectories: Trajectory) -> PackedBatch:
    return build_batch(
        [Group(group_id=GroupId("g"), question_id="q", worker_id="w", trajectories=trajectories)]
    )


def two() -> PackedBatch:
    """Turns of 2 and 1 tokens that won, one turn of 1 token that lost."""
    return batch_of(trajectory([2, 1], 1.0, 1), trajectory([1], 0.0, 2))


def six() -> PackedBatch:
    return batch_of(*(trajectory([1 + i % 3, 2, i % 2], float(i % 2), i) for i in range(6)))


def configure(objective: str = "ppo", tokens: int = 4096, **more: float) -> LearnerConfig:
    # Below the 256 that a configuration allows, so that a tiny batch makes many micro-batches.
    return LearnerConfig(objective=objective, warmup_steps=0).model_copy(
        update={"micro_batch_tokens": tokens, **more}
    )


def critic_of(config: LearnerConfig, model: LlamaForCausalLM | None = None) -> Critic:
    """In float64, with a head other than 0."""
    critic = Critic((model or tiny()).double(), config, World())
    torch.manual_seed(1)
    critic.model.head.weight.data.normal_(std=0.1)
    return critic


def targets_of(critic: Critic, batch: PackedBatch, name: str = "ppo") -> ValueTargets:
    targets = build_update(batch, PRESETS[name], 0, value_T=critic.values(batch)).targets
    assert targets is not None
    return targets


def gradient_of(critic: Critic, batch: PackedBatch, targets: ValueTargets) -> Tensor:
    """What the optimizer saw, of all passes one behind the other."""
    seen: list[Tensor] = []
    critic.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.flatten().clone() for p in critic.model.parameters())  # type: ignore[union-attr]
    )
    critic.train(batch, targets)
    return torch.cat(seen)


@pytest.mark.parametrize(
    ("value", "expected", "slope"),
    [
        (0.5, 0.32, 0.0),  # 0.5 max(0.25, 0.64): clipped, so no gradient
        (0.1, 0.405, -0.9),
        (-0.5, 1.125, -1.5),  # 0.5 max(2.25, 1.44): the clip never hides a value that got worse
        (1.5, 0.32, 0.0),
        (2.0, 0.5, 1.0),
    ],
)
def test_value_loss_by_hand(value: float, expected: float, slope: float) -> None:
    """Old value 0, return 1, clip 0.2."""
    value_N = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    zero_N = torch.zeros_like(value_N)
    loss_N = value_loss(value_N, zero_N, zero_N + 1, 0.2)
    assert loss_N.item() == pytest.approx(expected)
    assert torch.autograd.grad(loss_N.sum(), value_N)[0].item() == pytest.approx(slope)


def test_values_start_at_zero() -> None:
    assert Critic(tiny(), configure(), World()).values(six()).abs().max() == 0


@pytest.mark.parametrize("tokens", [12, 4096])
def test_the_value_of_a_token_is_read_where_the_token_is_predicted(tokens: int) -> None:
    model, batch = tiny().double(), six()
    critic = critic_of(configure(tokens=tokens), model)
    head = critic.model.head
    expected = []
    for b, position in zip(
        batch.segments.trajectory_of_T.tolist(), batch.position_T.tolist(), strict=True
    ):
        before = torch.from_numpy(batch.trajectories[b].token_ids[:position].astype(np.int64))
        hidden_LH = model.base_model(input_ids=before[None]).last_hidden_state[0]
        expected.append(hidden_LH[-1] @ head.weight[0] + head.bias[0])
    value_T = critic.values(batch)
    torch.testing.assert_close(value_T, torch.stack(expected).detach(), rtol=1e-9, atol=1e-9)
    assert value_T.unique().numel() == batch.num_tokens


@pytest.mark.parametrize(
    ("name", "loss", "bias"),
    [
        ("ppo", 0.5 * 3 / 4, -3 / 4),  # returns 1, 1, 1 and 0 of four tokens
        ("so-ppo", 0.5 * 2 / 3, -2 / 3),  # returns 1, 1 and 0 of three turns
    ],
)
def test_loss_and_gradient_by_hand_where_values_are_zero(
    name: str, loss: float, bias: float
) -> None:
    """By turn, only the first token of each is learned from."""
    config = configure(name, max_grad_norm=1e9)
    critic, batch = Critic(tiny().double(), config, World()), two()
    seen: list[float] = []
    critic.optimizer.register_step_pre_hook(
        lambda *_: seen.append(critic.model.head.bias.grad.item())  # type: ignore[union-attr]
    )
    metrics = critic.train(batch, targets_of(critic, batch, name))
    assert metrics.value_loss == pytest.approx(loss)
    assert seen == [pytest.approx(bias)]


def test_gae_by_turn_learns_the_values_of_first_tokens_only() -> None:
    critic, batch = critic_of(configure("so-ppo")), six()
    targets = targets_of(critic, batch, "so-ppo")
    turn_of_T = batch.segments.turn_of_T.tolist()
    first = [t for t, k in enumerate(turn_of_T) if t == 0 or turn_of_T[t - 1] != k]
    assert targets.token_N.tolist() == first
    assert len(first) < batch.num_tokens
    torch.testing.assert_close(targets.old_N, critic.values(batch)[targets.token_N])


@pytest.mark.parametrize("name", ["ppo", "so-ppo"])
def test_micro_batches_do_not_change_the_critic_s_gradient(name: str) -> None:
    batch, gradients = six(), []
    for tokens in (4096, 12):
        critic = critic_of(configure(name, tokens, critic_epochs=2))
        gradients.append(gradient_of(critic, batch, targets_of(critic, batch, name)))
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["ppo", "so-ppo"])
def test_the_value_loss_of_a_fixed_batch_falls(name: str) -> None:
    critic, batch = Critic(tiny(), configure(name, critic_learning_rate=1e-3), World()), six()
    losses = [critic.train(batch, targets_of(critic, batch, name)).value_loss for _ in range(30)]
    assert losses[0] == pytest.approx(0.25, abs=0.07)  # half the mean square of returns 0 and 1
    assert losses[-1] < 0.2 * losses[0]


def test_in_the_warm_up_only_the_critic_learns() -> None:
    config = configure("ppo", critic_warmup_steps=2)
    trainer, batch = Trainer(tiny(), config), six()
    assert trainer.critic is not None
    start = [p.clone() for p in trainer.parameters]
    for version in range(2):
        critic_before = [p.clone() for p in trainer.critic.model.parameters()]
        metrics = trainer.train_step(batch, version)
        assert (metrics.learning_rate, metrics.grad_norm) == (0, 0)
        pairs = zip(trainer.critic.model.parameters(), critic_before, strict=True)
        assert any(not torch.equal(p, q) for p, q in pairs)
    torch.testing.assert_close(trainer.parameters, start, rtol=0, atol=0)
    trainer.train_step(batch, 2)
    assert any(not torch.equal(p, q) for p, q in zip(trainer.parameters, start, strict=True))


def test_two_epochs_are_two_optimizer_steps_and_the_second_can_be_clipped() -> None:
    batch = six()
    config = configure(critic_epochs=2, critic_learning_rate=0.1, value_clip=1e-3)
    critic, steps = critic_of(config), []
    critic.optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    metrics = critic.train(batch, targets_of(critic, batch))
    assert len(steps) == 2
    assert metrics.value_clip_fraction > 0


def test_one_epoch_is_one_optimizer_step_and_clips_nothing() -> None:
    critic, batch, steps = critic_of(configure(value_clip=1e-3)), six(), []
    critic.optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    assert critic.train(batch, targets_of(critic, batch)).value_clip_fraction == 0
    assert len(steps) == 1


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("old", "returns", "expected"),
    [
        # Left over are 0, 0, 1 with variance 2/9; returns have 2/3.
        ((1.0, 2.0, 2.0), (1.0, 2.0, 3.0), 2 / 3),
        ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0), 1.0),
        ((3.0, 2.0, 1.0), (1.0, 2.0, 3.0), -3.0),
        ((3.0, 2.0, 1.0), (1.0, 1.0, 1.0), 0.0),
    ],
)
def test_explained_variance_by_hand(
    old: tuple[float, ...], returns: tuple[float, ...], expected: float
) -> None:
    targets = ValueTargets(torch.tensor([0, 2, 3]), f64(*old), f64(*returns))
    metrics = critic_of(configure()).train(two(), targets)
    assert metrics.explained_variance == pytest.approx(expected)
    assert metrics.value_mean == pytest.approx(sum(old) / 3)


def test_equal_rewards_explain_nothing_in_spite_of_rounding() -> None:
    batch = batch_of(*(trajectory([3, 2], 0.1, seed) for seed in range(4)))
    critic = critic_of(configure())
    assert critic.train(batch, targets_of(critic, batch)).explained_variance == 0


def test_a_return_that_is_not_finite_is_refused_and_keeps_the_weights() -> None:
    critic = critic_of(configure())
    before = [p.clone() for p in critic.model.parameters()]
    with pytest.raises(NonFiniteError, match="the critic's loss is inf"):
        critic.train(two(), ValueTargets(torch.tensor([0, 3]), f64(0, 0), f64(1, torch.inf)))
    torch.testing.assert_close(list(critic.model.parameters()), before, rtol=0, atol=0)


def test_the_critic_learns_ten_times_faster_unless_configured() -> None:
    for config, expected in (
        (configure(learning_rate=2e-4), 2e-3),
        (configure(critic_learning_rate=3e-5), 3e-5),
    ):
        rate = Critic(tiny(), config, World()).optimizer.param_groups[0]["lr"]
        assert rate == pytest.approx(expected)
