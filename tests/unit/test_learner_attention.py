"""Packed trajectories do not see each other, in every family of models that is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from leeway.learner.attention import (
    NAME,
    _attend_padded,
    _attend_rows,
    _band,
    hidden_states,
    use_packed_attention,
)
from leeway.learner.batch import MicroBatch
from leeway.learner.model import Network
from leeway.replay.errors import ConfigurationError

V = 64
SHAPE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
WINDOW: dict[str, Any] = {"sliding_window": 4, "head_dim": 8}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    # Biases of queries, keys and values; tied as the small ones are.
    "qwen2.5": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen2, sliding": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "smollm2": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SHAPE,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        )
    ),
    "mistral, sliding": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE, **WINDOW, layer_types=["sliding_attention", "full_attention"]
        )
    ),
}  # fmt: skip
SEQUENCES = ([5, 9, 2, 7, 1, 3, 3, 8], [8, 4], [6, 2, 11, 60, 7])


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def pack(*sequences: list[int]) -> MicroBatch:
    """Every token behind the first of a sequence is trained."""
    lengths = [len(ids) for ids in sequences]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    position_P = torch.cat([torch.arange(n) for n in lengths])
    id_P = torch.tensor([token for ids in sequences for token in ids])
    predictor_S = position_P < torch.tensor(lengths).repeat_interleave(torch.tensor(lengths)) - 1
    predictor_S = predictor_S.nonzero().squeeze(-1)
    sizes = tuple(n - 1 for n in lengths)
    return MicroBatch(
        id_P, position_P, starts.int(), predictor_S, id_P[predictor_S + 1],
        torch.arange(sum(sizes)), max(lengths), sizes,
    )  # fmt: skip


def total(lp_C: Tensor, _: slice) -> Tensor:
    return lp_C.sum()


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_gradients_are_those_of_plain_transformers(name: str) -> None:
    plain, model = build(name).double(), build(name).double()
    use_packed_attention(model)
    expected = []
    for ids in SEQUENCES:
        log_p = plain(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected.append(log_p.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1))
    lp_S = torch.cat(expected)
    gradients = torch.autograd.grad(lp_S.sum(), list(plain.parameters()))

    found = Network(model)(pack(*SEQUENCES), total)
    found.loss.backward()
    torch.testing.assert_close(found.lp_S, lp_S.detach(), rtol=1e-9, atol=1e-9)
    packed = [p.grad for p in model.parameters()]
    # Gemma norms in float32 whatever the weights are.
    torch.testing.assert_close(packed, list(gradients), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_what_stands_before_and_behind_changes_nothing(name: str) -> None:
    """In float32, forward and gradient of the second of three."""
    model = build(name)
    use_packed_attention(model)
    middle = SEQUENCES[0]

    def of_middle(*others: list[int]) -> tuple[Tensor, list[Tensor | None]]:
        micro_batch = pack(others[0], middle, *others[1:])
        first = len(others[0]) - 1
        inside = slice(first, first + len(middle) - 1)
        weight_S = torch.zeros(len(micro_batch.target_S))
        weight_S[inside] = 1.0
        model.zero_grad()
        found = Network(model)(micro_batch, lambda lp_C, chunk: (weight_S[chunk] * lp_C).sum())
        found.loss.backward()
        return found.lp_S[inside], [p.grad for p in model.parameters()]

    lp_S, gradients = of_middle([1, 2, 3], [4, 5, 6, 7])
    for others in (([9, 8, 7], [60, 1, 2, 3]), ([9] * 20, [1, 2]), ([3, 3], [4, 4], [5] * 7)):
        torch.testing.assert_close(
            of_middle(*others), (lp_S, gradients), rtol=1e-4, atol=1e-5
        )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, V - 1), min_size=2, max_size=9), min_size=1, max_size=5))
def test_any_pack_gives_the_log_probs_of_each_alone(sequences: list[list[int]]) -> None:
    model = build("gemma3").double()
    use_packed_attention(model)
    network = Network(model)
    together = network(pack(*sequences)).lp_S
    alone = torch.cat([network(pack(ids)).lp_S for ids in sequences])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


def test_a_plain_row_is_a_sequence_of_its_own() -> None:
    plain, model = build("llama").double(), build("llama").double()
    use_packed_attention(model)
    rows = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    torch.testing.assert_close(model(input_ids=rows).logits, plain(input_ids=rows).logits)


def test_the_band_of_a_window_of_two() -> None:
    band = _band(3, 2, torch.device("cpu")).int()
    assert band.tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_a_window_as_long_as_the_row_is_plain_causal_attention() -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)
    full = _attend_rows(query, key, value, None, None)
    torch.testing.assert_close(_attend_rows(query, key, value, None, 5), full)
    assert not torch.allclose(_attend_rows(query, key, value, None, 4), full)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("num_key_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", [[5], [1, 4, 2], [3, 3], [2, 6, 1, 1]])
def test_attention_to_all_trajectories_at_once_is_that_to_each_alone(
    lengths: list[int], num_key_heads: int, window: int | None
) -> None:
    torch.manual_seed(0)
    heads = (4, num_key_heads, num_key_heads)
    packed = [
        torch.randn(1, n, sum(lengths), 8, dtype=torch.float64, requires_grad=True) for n in heads
    ]
    weights = torch.randn(1, sum(lengths), 4, 8, dtype=torch.float64)

    def with_gradients(output: Tensor) -> tuple[Tensor, ...]:
        return output, *torch.autograd.grad((weights * output).sum(), packed)

    parts = zip(*(x.split(lengths, 2) for x in packed), strict=True)
    rows = [_attend_rows(q, k, v, None, window) for q, k, v in parts]
    expected = with_gradients(torch.cat(rows, 2).transpose(1, 2))
    starts_R1 = torch.tensor([0, *lengths]).cumsum(0).int()
    query, key, value = packed
    found = _attend_padded(query, key, value, starts_R1, max(lengths), None, window)
    torch.testing.assert_close(with_gradients(found), expected, rtol=1e-12, atol=1e-12)


def test_the_attention_is_set_once_and_is_not_saved(tmp_path: Any) -> None:
    model = build("llama")
    use_packed_attention(model)
    use_packed_attention(model)
    assert model.config._attn_implementation == NAME
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()


def test_a_model_that_caps_its_attention_scores_is_refused() -> None:
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, attn_logit_softcapping=50.0))
    with pytest.raises(ConfigurationError, match="caps its attention scores"):
        use_packed_attention(model)


def test_a_recurrent_model_is_refused() -> None:
    torch.manual_seed(0)
    model = FalconMambaForCausalLM(
        FalconMambaConfig(vocab_size=V, hidden_size=16, state_size=4, num_hidden_layers=1)
    )
    with pytest.raises(ConfigurationError, match="packed"):
        use_packed_attention(model)


def test_a_layer_of_another_kind_is_refused_by_name() -> None:
    model = build("qwen3")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ConfigurationError, match="chunked_attention"):
        use_packed_attention(model)


def test_a_model_that_ignores_the_lengths_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    base: Any = model.base_model
    forward = base.forward

    def forget(**arguments: Any) -> Any:
        kept = {"input_ids", "position_ids", "use_cache"}
        return forward(**{name: value for name, value in arguments.items() if name in kept})

    monkeypatch.setattr(base, "forward", forget)
    with pytest.raises(ConfigurationError, match="see the trajectory packed in front"):
        use_packed_attention(model)


def test_hidden_states_have_one_row_for_each_token() -> None:
    model, micro_batch = build("llama"), pack(*SEQUENCES)
    use_packed_attention(model)
    states = hidden_states(
        model.base_model, micro_batch.id_P, micro_batch.position_P,
        micro_batch.starts_R1, micro_batch.longest,
    )  # fmt: skip
    assert states.shape == (15, 32)
