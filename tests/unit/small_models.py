"""Networks of some ten thousand random weights, one of each kind that is decoded here."""

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
