"""A run small enough for a test: two layers of random weights, a few questions, real processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

TINY = """
name = "tiny"
model = "model"

[policy]
backend = "torch"
max_model_len = 256

[search]
corpus = "corpus.jsonl"
max_turns = 2
max_turn_tokens = 8
max_observation_tokens = 64

[data]
train = "train.jsonl"
held_out = "held_out.jsonl"

[rollout]
group_size = 2
max_groups_in_flight = 4

[replay]
groups_per_step = 2
max_staleness = 1

[learner]
num_steps = 3

[eval]
num_questions = 4
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes a folder that holds tiny.toml, its model, its corpus and its questions."""
    template = tmp_path_factory.mktemp("template")
    _write_model(template / "model")
    (template / "tiny.toml").write_text(TINY)
    _write_lines(
        template / "corpus.jsonl",
        [{"id": n, "contents": f'"Place {n}"\nPlace {n} lies in the north.'} for n in range(50)],
    )
    for name, first, count in (("train", 0, 40), ("held_out", 100, 6)):
        _write_lines(
            template / f"{name}.jsonl",
            [
                {
                    "id": f"q{n}",
                    "question": f"Where does place {n} lie?",
                    "golden_answers": ["north"],
                }
                for n in range(first, first + count)
            ],
        )

    def make() -> Path:
        folder = tmp_path_factory.mktemp("run")
        shutil.copytree(template, folder, dirs_exist_ok=True)
        return folder

    return make


def _write_lines(path: Path, lines: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _write_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from leeway.actors.config import model_dir

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir("bundled") / name, folder)
