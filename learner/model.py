"""The policy network: loading, and log-probs of trained tokens without a T x V tensor.

Letters: `R` rows and `L` padded tokens of a micro-batch, `S` its trained tokens, `H` hidden width,
`V` vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from leeway.learner.batch import MicroBatch
from leeway.replay.errors import ConfigurationError

CHUNK_BYTES: Final = 512 << 20
"""Size of one chunk of float32 logits: 65,536 tokens at a vocabulary of 2048, 883 at 152,000.

Much smaller chunks are slow: each reads and writes the whole V x H gradient of the head."""

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
    """Log-prob [S] of each trained token, and the detached entropy [S] of what it was drawn from.

    `precision` bfloat16 runs the network under autocast; log-softmax is float32 at least.
    """
    head: Any = model.get_output_embeddings()
    device = micro_batch.input_ids_RL.device
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        # No attention mask: padding stands right of every token that is read, where causal
        # attention cannot see it, positions count from the left, and attention without a mask is
        # faster.
        hidden_RLH = model.base_model(
            input_ids=micro_batch.input_ids_RL, use_cache=False
        ).last_hidden_state
        hidden_SH = hidden_RLH.flatten(0, 1)[micro_batch.predictor_S]
        if precision == "bfloat16":
            hidden_SH = hidden_SH.bfloat16()
    return head_logprobs(hidden_SH, head.weight, getattr(head, "bias", None), micro_batch.target_S)


def head_logprobs(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    target_S: Tensor,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob [S] and entropy [S] under softmax(hidden W^T + bias), `chunk_tokens` logit rows at
    a time.

    Gradients flow to hidden states, weight and bias; logits are computed again in the backward
    pass.
    """
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_BYTES // (4 * weight_VH.shape[0]))
    apply: Any = _HeadLogprobs.apply
    return apply(hidden_SH, weight_VH, bias_V, target_S, chunk_tokens)


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    logits_CV = hidden_CH @ weight_VH.T
    return logits_CV if bias_V is None else logits_CV + bias_V


class _HeadLogprobs(torch.autograd.Function):
    """log p(y) = log_softmax(z)_y; d log p(y) / dz = onehot(y) - softmax(z).

    Memory traffic over V is what it costs, hence the fused softmax calls.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_S: Tensor,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_SH, weight_VH, bias_V, target_S)
        ctx.chunk_tokens = chunk_tokens
        weight = weight_VH.to(hidden_SH.dtype)
        exact = torch.promote_types(hidden_SH.dtype, torch.float32)
        lp, entropy = [], []
        for hidden_CH, target_C in zip(
            hidden_SH.split(chunk_tokens), target_S.split(chunk_tokens), strict=True
        ):
            lp_CV = _logits(hidden_CH, weight, bias_V).log_softmax(-1, dtype=exact)
            lp.append(lp_CV.gather(-1, target_C[:, None]).squeeze(-1))
            entropy.append(-(lp_CV.exp()[:, None] @ lp_CV[:, :, None]).flatten())
        entropy_S = torch.cat(entropy)
        ctx.mark_non_differentiable(entropy_S)
        return torch.cat(lp), entropy_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_SH, weight_VH, bias_V, target_S = ctx.saved_tensors
        weight = weight_VH.to(hidden_SH.dtype)
        g_S = grads[0].to(hidden_SH.dtype)
        grad_hidden = torch.empty_like(hidden_SH)
        grad_weight = torch.zeros_like(weight_VH)
        grad_bias = None if bias_V is None else torch.zeros_like(bias_V)
        for start in range(0, len(hidden_SH), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            g_C = g_S[chunk, None]
            p_CV = _logits(hidden_SH[chunk], weight, bias_V).to(weight.dtype).softmax(-1)
            dlogits_CV = p_CV.mul_(-g_C).scatter_add_(-1, target_S[chunk, None], g_C)
            if grad_bias is not None:
                grad_bias += dlogits_CV.sum(0)
            grad_hidden[chunk] = dlogits_CV @ weight
            grad_weight += dlogits_CV.T @ hidden_SH[chunk]
        return grad_hidden, grad_weight, grad_bias, None, None
