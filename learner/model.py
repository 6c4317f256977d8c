"""The policy network: loading, and log-probs of the trained tokens of a micro-batch.

Letters: `R` rows and `L` padded tokens of a micro-batch, `S` its trained tokens, `H` hidden width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from leeway.learner.batch import MicroBatch
from leeway.learner.head import Head, HeadLoss, LossOf, head_logprobs, head_loss
from leeway.replay.errors import ConfigurationError

_LOGIT_CHANGES: Final = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def load_model(path: Path, device: torch.device | str = "cpu") -> PreTrainedModel:
    """A Hugging Face causal language model with float32 master weights.

    Raises ConfigurationError for an architecture that changes its logits after the head, because
    log-probs are computed here from the head alone.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name in _LOGIT_CHANGES:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ConfigurationError(
                f"the model in {path} sets {name}, which log-probs here would leave out; "
                "use a model without it"
            )
    return model.to(device)


def logprobs(
    model: PreTrainedModel, micro_batch: MicroBatch, precision: str = "float32"
) -> tuple[Tensor, Tensor]:
    """Log-prob [S] of each trained token and entropy [S] of what it was drawn from; no gradient.

    `precision` bfloat16 runs the network under autocast; log-softmax is float32 at least.
    """
    with torch.no_grad():
        hidden_SH = predictor_states(model.base_model, micro_batch, precision)
        return head_logprobs(hidden_SH, head_of(model), micro_batch.target_S)


def logprob_loss(
    model: PreTrainedModel, micro_batch: MicroBatch, loss_of: LossOf, precision: str = "float32"
) -> HeadLoss:
    """The loss that `loss_of` makes of the trained tokens' log-probs; see `head_loss`."""
    hidden_SH = predictor_states(model.base_model, micro_batch, precision)
    return head_loss(hidden_SH, head_of(model), micro_batch.target_S, loss_of, micro_batch.sizes)


def head_of(model: PreTrainedModel) -> Head:
    """The output layer of a causal language model."""
    layer: Any = model.get_output_embeddings()
    return Head(layer.weight, getattr(layer, "bias", None))


def predictor_states(base: Any, micro_batch: MicroBatch, precision: str = "float32") -> Tensor:
    """[S, H] last hidden states, by a network without its output layer, of the positions that
    predict the trained tokens."""
    device = micro_batch.input_ids_RL.device
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        # No attention mask: padding stands right of every token that is read, where causal
        # attention cannot see it, positions count from the left, and attention without a mask is
        # faster.
        hidden_RLH = base(input_ids=micro_batch.input_ids_RL, use_cache=False).last_hidden_state
        hidden_SH = hidden_RLH.flatten(0, 1)[micro_batch.predictor_S]
    return hidden_SH.bfloat16() if precision == "bfloat16" else hidden_SH
