"""Log-probs without a T x V tensor equal the plain ones."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from leeway.learner import head
from leeway.learner.attention import use_packed_attention
from leeway.learner.batch import MicroBatch, nothing
from leeway.learner.head import Head, head_logprobs, head_loss
from leeway.learner.model import Network, load_model
from leeway.replay.errors import ConfigurationError


def tiny(tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


SIX, FOUR = [5, 9, 2, 7, 1, 3], [8, 4, 6, 2]


def packed() -> MicroBatch:
    """Lengths 6 and 4; trained tokens are the last and the one behind it of each."""
    return MicroBatch(
        id_P=torch.tensor([*SIX, *FOUR]),
        position_P=torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 3]),
        starts_R1=torch.tensor([0, 6, 10], dtype=torch.int32),
        predictor_S=torch.tensor([4, 5, 8, 9]),
        target_S=torch.tensor([3, 11, 2, 12]),
        token_S=torch.arange(4),
        longest=6,
        sizes=(2, 2),
    )


def plain(model: LlamaForCausalLM, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Each trajectory by itself, with the attention that the model comes with."""
    logits = [model(input_ids=torch.tensor([ids])).logits[0, -2:] for ids in (SIX, FOUR)]
    log_p = torch.cat(logits).log_softmax(-1)
    lp_S = log_p.gather(-1, micro_batch.target_S[:, None]).squeeze(-1)
    return lp_S, -(log_p.exp() * log_p).sum(-1)


COEFFICIENT_S = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)


def of_coefficients(lp_C: Tensor, chunk: slice) -> Tensor:
    return (COEFFICIENT_S[chunk].to(lp_C) * lp_C.exp()).sum()


@pytest.mark.parametrize("tied", [True, False])
def test_log_probs_loss_and_gradient_equal_the_plain_path_of_each_alone(tied: bool) -> None:
    reference, micro_batch = tiny(tied).double(), packed()
    lp_S, entropy_S = plain(reference, micro_batch)
    loss = (COEFFICIENT_S * lp_S.exp()).sum()
    expected = torch.autograd.grad(loss, list(reference.parameters()))

    model = tiny(tied).double()
    use_packed_attention(model)
    result = Network(model)(micro_batch, of_coefficients)
    result.loss.backward()
    found = [p.grad for p in model.parameters()]
    torch.testing.assert_close(found, list(expected), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        (result.loss.detach(), result.lp_S, result.entropy_S),
        (loss.detach(), lp_S.detach(), entropy_S.detach()),
        rtol=1e-9, atol=1e-12,
    )  # fmt: skip
    read = Network(model)(micro_batch)
    torch.testing.assert_close(read[1:], (result.lp_S, result.entropy_S))
    assert read.loss == 0 and not read.loss.requires_grad


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_chunks_of_the_head_do_not_change_values_or_gradients(chunk_tokens: int) -> None:
    """Trajectories of 2, 4 and 1 tokens: 3 rows at a time make the second one go in two passes."""
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    target_S = torch.randint(11, (7,))

    def loss_of(lp_C: Tensor, chunk: slice) -> Tensor:
        assert chunk in (slice(0, 2), slice(2, 6), slice(6, 7), slice(0, 7))
        bounds = [0, 2, 6, 7]
        parts = [
            lp_C[a - chunk.start : b - chunk.start].sum().exp()
            for a, b in itertools.pairwise(bounds)
            if chunk.start <= a < chunk.stop
        ]
        return torch.stack(parts).sum()

    plain_S = (hidden @ weight.T + bias).log_softmax(-1)[torch.arange(7), target_S]
    expected = torch.autograd.grad(3 * loss_of(plain_S, slice(0, 7)), (hidden, weight, bias))
    result = head_loss(hidden, Head(weight, bias), target_S, loss_of, (2, 4, 1), chunk_tokens)
    found = torch.autograd.grad(3 * result.loss, (hidden, weight, bias))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    lp_S, _ = head_logprobs(hidden, Head(weight, bias), target_S, chunk_tokens)
    torch.testing.assert_close(lp_S, plain_S.detach())


@torch.no_grad()
def test_what_a_gpu_fuses_equals_what_a_cpu_does() -> None:
    torch.manual_seed(0)
    logits_CV, target_C = torch.randn(5, 11), torch.randint(11, (5,))
    g_C = torch.randn(5)
    lp_C, entropy_C, rest = head._softmax(logits_CV.clone(), target_C)
    fused_lp_C, fused_entropy_C, norm_C = head._softmax_pass(logits_CV, target_C)
    torch.testing.assert_close((fused_lp_C, fused_entropy_C), (lp_C, entropy_C))
    expected_CV = head._logit_gradient(rest, target_C, g_C)
    torch.testing.assert_close(head._gradient_pass(logits_CV, norm_C, target_C, g_C), expected_CV)


def test_only_the_loss_carries_a_gradient() -> None:
    model = tiny()
    use_packed_attention(model)
    result = Network(model)(packed(), of_coefficients)
    assert result.loss.requires_grad
    assert not result.lp_S.requires_grad and not result.entropy_S.requires_grad


def test_a_micro_batch_of_nothing_has_a_gradient_of_zero() -> None:
    model = tiny()
    use_packed_attention(model)
    found = Network(model)(nothing(), of_coefficients)
    found.loss.backward()
    assert found.lp_S.shape == (0,)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_model_that_changes_its_logits_is_refused(tmp_path: Path) -> None:
    model = tiny()
    model.config.final_logit_softcapping = 30.0
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="final_logit_softcapping"):
        load_model(tmp_path)
