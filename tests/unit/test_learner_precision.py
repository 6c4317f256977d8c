"""What lower precision changes: bfloat16 against float64, and the chunked head in float32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from leeway.learner import head
from leeway.learner.attention import use_packed_attention
from leeway.learner.batch import PackedBatch, build_batch, collate
from leeway.learner.config import LearnerConfig
from leeway.learner.model import Network
from leeway.learner.objective.presets import PRESETS
from leeway.learner.sharding import local
from leeway.learner.trainer import Trainer
from leeway.replay.schema import Group, GroupId, Trajectory, Turn

V = 64

torch.set_num_threads(1)


def tiny(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config)


def random_batch() -> PackedBatch:
    """A group of six trajectories of 2 turns, half of which won. Ratios are about e^0.3, and none
    is so near to the clip that rounding moves it across."""
    rng = np.random.default_rng(6)

    def trajectory(i: int) -> Trajectory:
        first, second = (int(n) for n in rng.integers(1, 9, 2))
        turns = (Turn(3, first, 4, "search"), Turn(7 + first, second, 0, "answer"))
        num = first + second
        return Trajectory(
            trajectory_id=f"t{i}",
            token_ids=rng.integers(0, V, 7 + num).astype(np.int32),
            turns=turns,
            logprobs=(-np.log(V) + 0.3 * rng.standard_normal(num)).astype(np.float32),
            versions=np.zeros(num, np.int32),
            reward=float(i % 2),
            stop_reason="answer",
            scores={},
            duration_s=1.0,
        )

    members = tuple(trajectory(i) for i in range(6))
    return build_batch(
        [Group(group_id=GroupId("g"), question_id="q", worker_id="w", trajectories=members)]
    )


@dataclass(frozen=True)
class Seen:
    """One step, in float64 whatever it was made in."""

    lp_T: Tensor
    value_T: Tensor | None
    loss: float
    gradient: Tensor
    critic_gradient: Tensor | None


def observe(name: str, precision: str, model: LlamaForCausalLM) -> Seen:
    # A bound that never binds: gradients as they are.
    config = LearnerConfig(objective=name, warmup_steps=0, max_grad_norm=1e9, precision=precision)  # type: ignore[arg-type]
    trainer, batch = Trainer(model, config), random_batch()
    lp_T, _ = trainer.measure(batch)
    seen: list[Tensor] = []
    optimizers = [trainer.optimizer]
    value_T = None
    if trainer.critic is not None:
        torch.manual_seed(1)
        weight = trainer.critic.model.head.weight
        local(weight.data).copy_(0.1 * torch.randn(weight.shape))
        value_T = trainer.critic.values(batch).double()
        optimizers.append(trainer.critic.optimizer)
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.register_step_pre_hook(
            lambda *_, of=parameters: seen.append(torch.cat([local(p.grad).flatten() for p in of]))
        )
    loss = trainer.train_step(batch, 0).loss
    assert {gradient.dtype for gradient in seen} == {trainer.parameters[0].dtype}
    critic_gradient = seen[1].double() if len(seen) > 1 else None
    return Seen(lp_T.double(), value_T, loss, seen[0].double(), critic_gradient)


def cosine(a: Tensor | None, b: Tensor | None) -> float:
    assert a is not None and b is not None
    return torch.nn.functional.cosine_similarity(a, b, dim=0).item()


# Rounding moves one token across the edge of m2po's mask; test_objective_pinned.py has its numbers.
@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"m2po"}))
def test_bfloat16_steps_where_float64_does(name: str) -> None:
    """Measured: log-probs within 0.011, losses 2e-3, cosines above 0.9999."""
    exact, half = observe(name, "float32", tiny().double()), observe(name, "bfloat16", tiny())
    torch.testing.assert_close(half.lp_T, exact.lp_T, rtol=0, atol=0.05)
    assert half.lp_T.sub(exact.lp_T).abs().max() > 1e-4, "bfloat16 was not used"
    assert half.loss == pytest.approx(exact.loss, abs=3e-3)
    assert cosine(half.gradient, exact.gradient) > 0.999
    assert half.gradient.norm().item() == pytest.approx(exact.gradient.norm().item(), rel=0.02)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_float32_steps_where_float64_does(name: str) -> None:
    """Measured: log-probs within 7e-7, losses 1e-7, cosines above 1 - 2e-13."""
    exact, single = observe(name, "float32", tiny().double()), observe(name, "float32", tiny())
    torch.testing.assert_close(single.lp_T, exact.lp_T, rtol=0, atol=1e-5)
    assert single.loss == pytest.approx(exact.loss, abs=2e-6)
    torch.testing.assert_close(single.gradient, exact.gradient, rtol=1e-3, atol=1e-5)


def test_the_critic_of_bfloat16_learns_as_that_of_float64() -> None:
    """Measured: values within 0.007, the cosine above 0.9999."""
    exact, half = (
        observe("so-ppo", "float32", tiny().double()),
        observe("so-ppo", "bfloat16", tiny()),
    )
    assert exact.value_T is not None and half.value_T is not None
    torch.testing.assert_close(half.value_T, exact.value_T, rtol=0, atol=0.02)
    assert exact.value_T.abs().max() > 0.2
    assert cosine(half.critic_gradient, exact.critic_gradient) > 0.999


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk_tokens", [3, 12, 10_000])
def test_the_chunked_head_equals_the_plain_one_in_float32(
    tied: bool, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CPU_CHUNK_BYTES", 4 * V * chunk_tokens)
    monkeypatch.setattr(head, "CACHE_BYTES", 4 * V * 2)
    model, batch = tiny(tied), random_batch()
    micro_batch = collate(batch, range(6))
    advantage_S = torch.linspace(-1, 1, batch.num_tokens)

    trajectories = micro_batch.id_P.split(micro_batch.starts_R1.diff().tolist())
    logits_PV = torch.cat([model(ids[None]).logits[0] for ids in trajectories])
    logits_SV = logits_PV[micro_batch.predictor_S]
    log_p_SV = logits_SV.log_softmax(-1)
    plain_S = log_p_SV.gather(-1, micro_batch.target_S[:, None]).squeeze(-1)
    plain = (advantage_S * plain_S.exp()).sum()
    expected = torch.autograd.grad(plain, list(model.parameters()))

    def loss_of(lp_C: Tensor, chunk: slice) -> Tensor:
        return (advantage_S[chunk] * lp_C.exp()).sum()

    use_packed_attention(model)
    network = Network(model)
    found = network(micro_batch, loss_of)
    found.loss.backward()
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.lp_S, plain_S.detach(), **close)
    entropy_S = -(log_p_SV.exp() * log_p_SV).sum(-1).detach()
    torch.testing.assert_close(found.entropy_S, entropy_S, **close)
    torch.testing.assert_close(found.loss.detach(), plain.detach(), **close)
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected), **close)
    torch.testing.assert_close(network(micro_batch).lp_S, plain_S.detach(), **close)
