"""Networks of some ten thousand random weights, one of each kind that is decoded here, and what a
decoder of them must do."""

import random
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from leeway.actors.decoder import Decoder, Feed

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, tuple[type, dict[str, object]]] = {
    "llama": (LlamaConfig, {}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True, "head_dim": 32}),
    "llama-biased": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-scaled-rope": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-ungrouped": (LlamaConfig, {"num_key_value_heads": 4}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
}


def build_model(name: str = "llama", seed: int = 0, **changes: object) -> Any:
    kind, more = CONFIGS[name]
    sizes = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**{**sizes, **more, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases are zero at the start, norms one
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def oracle(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-probs [L, V] behind every token, by transformers."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def random_rows(vocabulary: int = 97) -> list[list[int]]:
    return [random.Random(n).choices(range(vocabulary), k=n) for n in (5, 17, 60)]


def check_log_probs(model: Any, decoder: Decoder) -> None:
    """Prompts of 79 tokens, then single tokens: each as transformers has it."""
    rows, slots = random_rows(), (2, 0, 3)
    prompts = [Feed(s, 0, row[:-1]) for s, row in zip(slots, rows, strict=True)]
    singles = [Feed(s, len(row) - 1, row[-1:]) for s, row in zip(slots, rows, strict=True)]
    for place, feeds in ((-2, prompts), (-1, singles)):
        expected = torch.stack([oracle(model, row)[place] for row in rows])
        found = decoder.logits(feeds).log_softmax(-1)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def check_mixed_rows(model: Any, decoder: Decoder) -> None:
    """A whole prompt, one more token and the rest of a prompt go through together."""
    rows = random_rows()
    decoder.logits([Feed(1, 0, rows[1][:-1]), Feed(2, 0, rows[2][:20])])
    logits = decoder.logits(
        [Feed(0, 0, rows[0]), Feed(1, len(rows[1]) - 1, rows[1][-1:]), Feed(2, 20, rows[2][20:])]
    )
    expected = torch.stack([oracle(model, row)[-1] for row in rows])
    torch.testing.assert_close(logits.log_softmax(-1), expected, atol=1e-4, rtol=0)
