"""Log-probs without a T x V tensor equal the plain ones."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from leeway.learner import head
from leeway.learner.attention import use_packed_attention
from leeway.learner.batch import MicroBatch, nothing
from leeway.learner.head import Head, head_logprobs, head_loss
from leeway.learner.model import Network, load_model
from leeway.learner.sharding import full_weights, weight_manifest
from leeway.replay.errors import ConfigurationError
from tests.unit.test_learner_attention import MODELS, SHAPE, WINDOW

LEARNER_PAGE = Path(__file__).parents[2] / "docs" / "learner.md"


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


@pytest.mark.parametrize("family", MODELS)
def test_what_is_published_has_the_names_of_the_files(family: str, tmp_path: Path) -> None:
    MODELS[family]().save_pretrained(tmp_path)
    model = load_model(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {name for name, _ in full_weights(model)} == names
    assert {spec.name for spec in weight_manifest(model, torch.bfloat16)} == names


def test_files_in_several_pieces_and_a_tied_head_that_is_saved_twice_are_taken(
    tmp_path: Path,
) -> None:
    tiny().save_pretrained(tmp_path / "pieces", max_shard_size="8KB")
    assert (tmp_path / "pieces" / "model.safetensors.index.json").exists()
    load_model(tmp_path / "pieces")
    tiny().save_pretrained(tmp_path / "twice")
    file = tmp_path / "twice" / "model.safetensors"
    weights = load_file(file)
    head = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": head}, file, {"format": "pt"})
    load_model(tmp_path / "twice")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (
            lambda: Qwen3MoeForCausalLM(
                Qwen3MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=16)
            ),
            r"model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight",
        ),
        (
            lambda: MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4)),
            r"model\.layers\.0\.block_sparse_moe\.experts\.0\.w1\.weight",
        ),
    ],
)
def test_a_mixture_of_experts_is_refused_because_engines_would_refuse_its_weights(
    model, name: str, tmp_path: Path
) -> None:
    model().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=f"such as {name}.*train a dense model"):
        load_model(tmp_path)


def test_weights_that_the_files_lack_are_not_made_up(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"model\.norm\.weight"):
        load_model(tmp_path)


def test_a_model_that_reads_images_is_refused_and_its_language_model_is_taken_out_as_documented(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=SHAPE | WINDOW, vision_config=vision, mm_tokens_per_image=4)
    )
    whole.bfloat16().save_pretrained(tmp_path / "whole")
    with pytest.raises(ConfigurationError, match=r"gemma3 .* reads more than text; save"):
        load_model(tmp_path / "whole")
    recipe = LEARNER_PAGE.read_text().split("```python\n")[1].split("```")[0]
    recipe = recipe.replace('"gemma-3-4b-it"', repr(str(tmp_path / "whole")))
    exec(recipe.replace('"gemma-3-4b-text"', repr(str(tmp_path / "text"))), {})
    text, ids = load_model(tmp_path / "text"), torch.tensor([SIX])
    # Of the same rounded weights; `.float()` would leave rounded frequencies in `whole`.
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    torch.testing.assert_close(text(input_ids=ids).logits, whole(input_ids=ids).logits)
    use_packed_attention(text)
