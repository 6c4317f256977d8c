"""A model as large as those that are trained, with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch


def large_model(base: Path, folder: Path) -> Path:
    """1.3 billion weights in bfloat16 with the tokenizer of `base`, in `folder`/model; made on the
    GPU."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = folder / "model"
    shutil.copytree(base, model, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    known = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config = Qwen2Config(
        vocab_size=known["vocab_size"],
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("cuda"):
        network: Any = Qwen2ForCausalLM(config)
        network.to(torch.bfloat16).save_pretrained(model)
        del network
    torch.cuda.empty_cache()
    return model
