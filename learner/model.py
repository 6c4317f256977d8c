"""The policy network: loading, and log-probs of the trained tokens of a micro-batch.

Letters: `P` tokens of a micro-batch, `S` its trained tokens, `H` hidden width.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from leeway.learner.attention import hidden_states
from leeway.learner.batch import MicroBatch
from leeway.learner.head import Head, HeadLoss, LossOf, head_logprobs, head_loss
from leeway.learner.sharding import weight_manifest
from leeway.replay.errors import ConfigurationError
from leeway.replay.model_files import danger_in

_LOGIT_CHANGES: Final = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def load_model(
    path: Path, device: torch.device | str = "cpu", *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A Hugging Face causal language model with float32 master weights, of safetensors files.

    `trust_remote_code` lets Python code that lies in `path` run.

    Raises ConfigurationError for a model that brings code without that or weights as pickle; for
    an architecture that changes its logits after the head, because log-probs are computed here from
    the head alone; and for one that engines would take no weights for: see `_check_text`,
    `_check_names`.
    """
    danger = danger_in(path, trusts_code=trust_remote_code)
    if danger is not None:
        raise ConfigurationError(f"the model in {path} {danger}")
    _check_text(path, trust_remote_code)
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, use_safetensors=True, trust_remote_code=trust_remote_code
    )
    for name in _LOGIT_CHANGES:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ConfigurationError(
                f"the model in {path} sets {name}, which log-probs here would leave out; "
                "use a model without it"
            )
    _check_names(path, model)
    return model.to(device)


def _check_text(path: Path, trust_remote_code: bool) -> None:
    """Raise ConfigurationError for a model that reads more than text, before it is loaded.

    Nothing trains its other parts, and engines know its weights by other names.
    """
    config: Any = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if config.get_text_config() is not config:
        raise ConfigurationError(
            f"the {config.model_type} model in {path} reads more than text; save its language "
            "model by itself, as docs/learner.md shows, and train that"
        )


def _check_names(path: Path, model: PreTrainedModel) -> None:
    """Raise ConfigurationError unless what will be published has the names of the model's files.

    Engines load those. Transformers stacks the experts of a mixture into one tensor, for example;
    each publish would be refused, the first one after all has started.
    """
    sent = {spec.name for spec in weight_manifest(model, torch.float32)}
    wrong = {n for n in sent ^ _names_in(path) if not n.endswith(".rotary_emb.inv_freq")}
    if getattr(model.config, "tie_word_embeddings", False):
        wrong.discard("lm_head.weight")
    if wrong:
        raise ConfigurationError(
            f"the {model.config.model_type} model in {path} has other names for its weights, such "
            f"as {min(wrong)}, in its files than in memory, so engines would refuse them; train a "
            "dense model like Qwen2, Qwen3, Llama or Gemma 3"
        )


def _names_in(path: Path) -> set[str]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        return set(json.loads(index.read_bytes())["weight_map"])
    with safe_open(path / "model.safetensors", "pt") as file:
        return set(file.keys())


class Network(nn.Module):
    """A causal language model as the learner runs it: micro-batches in, log-probs out."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, micro_batch: MicroBatch, loss_of: LossOf | None = None) -> HeadLoss:
        """Log-prob [S] of each trained token, entropy [S] of what it was drawn from, and the loss
        that `loss_of` makes of the log-probs; without one the loss is 0 and nothing has a gradient.

        The output layer belongs to the pass: its weights are whole only as long as it lasts.
        """
        hidden_SH = predictor_states(self.model.base_model, micro_batch)
        head = head_of(self.model)
        if loss_of is None:
            lp_S, entropy_S = head_logprobs(hidden_SH, head, micro_batch.target_S)
            return HeadLoss(lp_S.new_zeros(()), lp_S, entropy_S)
        return head_loss(hidden_SH, head, micro_batch.target_S, loss_of, micro_batch.sizes)


def head_of(model: PreTrainedModel) -> Head:
    """The output layer of a causal language model."""
    layer: Any = model.get_output_embeddings()
    return Head(layer.weight, getattr(layer, "bias", None))


def predictor_states(base: Any, micro_batch: MicroBatch) -> Tensor:
    """[S, H] last hidden states, by a network without its output layer, of the tokens that predict
    the trained ones."""
    hidden_PH = hidden_states(
        base,
        micro_batch.id_P,
        micro_batch.position_P,
        micro_batch.starts_R1,
        micro_batch.longest,
    )
    return hidden_PH.index_select(0, micro_batch.predictor_S)


def round_weights(folder: Path, dtype: str) -> None:
    """Write the weights of a Hugging Face folder anew, in `dtype`."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
    )
    model.save_pretrained(folder)
