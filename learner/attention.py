"""Attention over packed trajectories: several stand one behind the other in a row, and none sees
another.

Registered with transformers under NAME, so that every model whose attention goes through its
interface can be packed. On a GPU in half precision one kernel of variable lengths does a layer
(torch.nn.attention.varlen); otherwise, on a GPU, all trajectories at once, made as long as the
longest. On a CPU, or where that would be mostly padding, each trajectory is attended by itself.

Letters: `P` tokens of a pack, `R` its trajectories, `L` tokens of the longest, `A` attention heads,
`D` width of one.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from leeway.replay.errors import ConfigurationError

NAME: Final = "leeway_packed"
MAX_PADDED: Final = 4
"""Times the tokens of a pack that its trajectories may have when all are as long as the longest."""
MAX_HEAD_DIM: Final = 256
"""Of the kernel of variable lengths."""
_GROUPED_HEADS: Final = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
"""Torch 2.11 takes fewer heads of keys than of queries as they are, later ones if told."""
_KINDS: Final = {"full_attention", "sliding_attention"}
_REFUSED: Final = {
    "softcap": "caps its attention scores",
    "s_aux": "has attention sinks",
    "position_bias": "adds a bias to its attention scores",
}
"""Arguments of an attention that is not a softmax over scaled products alone."""


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make `model` attend over packs, and over plain rows without padding, from now on.

    Raises ConfigurationError for a model whose tokens would see other trajectories of their pack,
    or attend otherwise than they should.
    """
    config = model.config
    if config._attn_implementation == NAME:
        return
    kind = config.model_type
    if not model._can_set_attn_implementation():
        raise ConfigurationError(
            f"the attention of {kind} models cannot be replaced, so trajectories cannot be packed; "
            "train a model like Qwen2, Qwen3, Llama or Gemma 3"
        )
    others = set(getattr(config, "layer_types", None) or ()) - _KINDS
    if others or getattr(config, "attention_chunk_size", None):
        raise ConfigurationError(
            f"this {kind} model has layers of {', '.join(sorted(others)) or 'chunked attention'}, "
            "which cannot be packed; train one whose layers attend fully or in a sliding window"
        )
    model.set_attn_implementation(NAME)
    _check_separation(model)


@torch.no_grad()
def _check_separation(model: PreTrainedModel) -> None:
    """A sequence must not change with the one packed in front of it: [1, 2, 3, 4] and [5, 6, 7],
    against [3, 3, 3, 3] and [5, 6, 7]."""
    device, was_training = model.device, model.training
    model.eval()
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [3, 3, 3, 3, 5, 6, 7]], device=device)
    ids %= model.config.vocab_size
    position_P = torch.tensor([0, 1, 2, 3, 0, 1, 2], device=device)
    starts_R1 = torch.tensor([0, 4, 7], dtype=torch.int32, device=device)
    one, other = (hidden_states(model.base_model, row, position_P, starts_R1, 4)[4:] for row in ids)
    model.train(was_training)
    # Not bit by bit: matrix products may sum in another order beside other numbers.
    if not torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(one.abs().max())):
        raise ConfigurationError(
            f"tokens of this {model.config.model_type} model see the trajectory packed in front of "
            "theirs; train a model whose layers are attention alone"
        )


def hidden_states(
    base: Any, id_P: Tensor, position_P: Tensor, starts_R1: Tensor, longest: int
) -> Tensor:
    """[P, H] last hidden states of a pack, by a network without its output layer.

    Trajectory r stands at `starts_R1[r]` (int32) up to `starts_R1[r + 1]`; none has more than
    `longest` tokens.
    """
    output = base(
        input_ids=id_P[None],
        position_ids=position_P[None],
        use_cache=False,
        cu_seq_lens_q=starts_R1,
        cu_seq_lens_k=starts_R1,
        max_length_q=longest,
        max_length_k=longest,
    )
    return output.last_hidden_state[0]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: `query` [rows, A, P, D] to [rows, P, A, D].

    Without lengths each row is a sequence of its own.
    """
    assert attention_mask is None, "packed attention takes lengths, not a mask"
    _check_arguments(module, dropout, sliding_window, others)
    if cu_seq_lens_q is None:
        output = _attend_rows(query, key, value, scaling, sliding_window)
        return output.transpose(1, 2).contiguous(), None
    if _has_kernel(query, value):
        assert max_length_q is not None, "a pack comes with the length of its longest trajectory"
        return _attend_at_once(
            query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window
        ), None
    if query.is_cuda and max_length_q is not None:
        num_padded = (len(cu_seq_lens_q) - 1) * max_length_q
        if num_padded <= MAX_PADDED * query.shape[2]:
            return _attend_padded(
                query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window
            ), None
    # On a GPU this waits for the device, once a layer.
    lengths: list[int] = cu_seq_lens_q.diff().tolist()
    parts = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    outputs = [_attend_rows(q, k, v, scaling, sliding_window) for q, k, v in parts]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _check_arguments(
    module: Any, dropout: float, sliding_window: int | None, others: dict[str, Any]
) -> None:
    for name, what in _REFUSED.items():
        if others.get(name) is not None:
            raise ConfigurationError(f"this model {what}, which packed attention leaves out")
    if dropout:
        raise ConfigurationError("attention dropout makes ratios meaningless; set it to 0")
    kinds: Any = getattr(module.config, "layer_types", None) or ()
    # The index is looked at last: code compiled for a layer would not serve the next one.
    is_sliding = "sliding_attention" in kinds and kinds[module.layer_idx] == "sliding_attention"
    if is_sliding and sliding_window is None:
        raise ConfigurationError(
            "this model does not tell its attention how wide its sliding window is, "
            "so it cannot be packed"
        )


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and dim == value.shape[-1]
        and dim % 8 == 0
        and dim <= MAX_HEAD_DIM
    )


def _attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_R1: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """[1, P, A, D] by the kernel of variable lengths."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    kernel: Any = varlen_attn
    output: Tensor = kernel(
        query,
        key,
        value,
        starts_R1,
        starts_R1,
        longest,
        longest,
        scale=scaling,
        # Tokens that a token sees to its left; itself is one of a sliding window.
        window_size=(-1 if window is None else window - 1, 0),
        **_GROUPED_HEADS,
    )
    return output[None]


def _attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_R1: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """[1, P, A, D] by one call, where a call for each trajectory would be some hundred kernels.

    What stands behind a trajectory's end is some token of the pack. No token sees it, since all see
    only what is to their left, and what comes out there is dropped.
    """
    num_heads, num_tokens = query.shape[1:3]
    start_R, end_R = starts_R1[:-1].long(), starts_R1[1:].long()
    token_P = torch.arange(num_tokens, device=query.device)
    token_RL = (start_R[:, None] + token_P[:longest]).clamp(max=num_tokens - 1)
    row_P = torch.searchsorted(end_R, token_P, right=True)
    place_P = row_P * longest + token_P - start_R[row_P]

    def padded(x: Tensor) -> Tensor:
        x = x[0].index_select(1, token_RL.flatten()).unflatten(1, token_RL.shape)
        # Heads that share keys get their own: the fast kernel of float32 knows no groups.
        return x.repeat_interleave(num_heads // len(x), 0).transpose(0, 1)

    output = _attend_rows(padded(query), padded(key), padded(value), scaling, window)
    return output.transpose(1, 2).flatten(0, 1).index_select(0, place_P)[None]


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """[rows, A, P, D]: causal attention within each row."""
    length = query.shape[2]
    is_cut = window is not None and length > window
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_band(length, window, query.device) if is_cut and window else None,
        is_causal=not is_cut,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[length, length] bool, who sees whom. 3 tokens, window 2 -> [[1, 0, 0], [1, 1, 0], [0, 1,
    1]]."""
    place = torch.arange(length, device=device)
    behind = place[:, None] - place
    return (behind >= 0) & (behind < window)


AttentionInterface.register(NAME, attend)
