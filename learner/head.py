"""Log-probs, entropy and the loss over them, without a T x V tensor.

A trajectory's loss depends on no token outside it (numbers of the whole batch come in as
constants). So the head works through the batch in chunks of whole trajectories: logits once,
log-probs, loss, and at once the gradient of logits, hidden states and head. Logits are never
computed twice, as they are where the backward pass comes later; only a trajectory longer than a
chunk costs that.

Letters: `S` trained tokens of a micro-batch, `C` those of a chunk, `H` hidden width, `V`
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES: Final = 512 << 20
"""Size of one chunk of logits: 65,536 tokens of float32 at a vocabulary of 2048, 883 at 152,000.

Much smaller chunks are slow: each reads and writes the whole V x H gradient of the head."""

CPU_CHUNK_BYTES: Final = 192 << 20
"""The same on a CPU, which is as fast from 128 MiB on; of float32, because its half-precision
products are summed up in a float32 buffer of that size."""

CACHE_BYTES: Final = 1 << 20
"""Logits that a thread of a CPU takes through log-softmax, exp and entropy at a time: written to
memory between, they cost three passes over a chunk, and three times its size."""

CPU_WORDS: Final = 8192
"""Rows of the head's gradient for which a CPU holds a half-precision product."""

LossOf = Callable[[Tensor, slice], Tensor]
"""Scalar loss of the tokens in a slice of the micro-batch, from their log-probs; summed over slices
of whole trajectories it is the loss of the micro-batch."""


class HeadLoss(NamedTuple):
    """What `head_loss` returns. Only the loss carries a gradient."""

    loss: Tensor
    lp_S: Tensor
    entropy_S: Tensor


@dataclass(frozen=True)
class Head:
    """softmax(hidden W^T + bias)."""

    weight_VH: Tensor
    bias_V: Tensor | None = None

    def logits(self, hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
        """[C, V]; `weight_VH` is this head's in the precision of the hidden states."""
        logits_CV = hidden_CH @ weight_VH.T
        return logits_CV if self.bias_V is None else logits_CV + self.bias_V.to(logits_CV.dtype)

    def chunk_tokens(self, dtype: torch.dtype) -> int:
        """Rows of logits in a chunk."""
        if self.weight_VH.is_cuda:
            return max(1, CHUNK_BYTES // (dtype.itemsize * self.weight_VH.shape[0]))
        return max(1, CPU_CHUNK_BYTES // (max(4, dtype.itemsize) * self.weight_VH.shape[0]))


@torch.no_grad()
def head_logprobs(
    hidden_SH: Tensor, head: Head, target_S: Tensor, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-prob [S] of each target and entropy [S] of what it was drawn from; no gradient."""
    weight_VH = head.weight_VH.to(hidden_SH.dtype)
    size = head.chunk_tokens(hidden_SH.dtype) if chunk_tokens is None else chunk_tokens
    lp_S = hidden_SH.new_empty(len(hidden_SH), dtype=_exact(hidden_SH.dtype))
    entropy_S = torch.empty_like(lp_S)
    for start in range(0, len(hidden_SH), size):
        chunk = slice(start, start + size)
        logits_CV = head.logits(hidden_SH[chunk], weight_VH)
        lp_S[chunk], entropy_S[chunk] = _softmax(logits_CV, target_S[chunk])[:2]
    return lp_S, entropy_S


def head_loss(
    hidden_SH: Tensor,
    head: Head,
    target_S: Tensor,
    loss_of: LossOf,
    sizes: Sequence[int],
    chunk_tokens: int | None = None,
) -> HeadLoss:
    """The loss over the log-probs of `target_S`, with gradients to hidden states, weight and bias.

    `sizes` are the tokens of each trajectory, in order; they sum to S. `chunk_tokens` logit rows
    are held at a time, those of one trajectory at least.
    """
    assert sum(sizes) == len(target_S), f"{sum(sizes)} tokens in {len(target_S)} targets"
    size = head.chunk_tokens(hidden_SH.dtype) if chunk_tokens is None else chunk_tokens
    apply: Any = _HeadLoss.apply
    return HeadLoss(
        *apply(hidden_SH, head.weight_VH, head.bias_V, target_S, loss_of, tuple(sizes), size)
    )


class _HeadLoss(torch.autograd.Function):
    """d log p(y) / dz = onehot(y) - softmax(z); gradients are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_S: Tensor,
        loss_of: LossOf,
        sizes: tuple[int, ...],
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = _Work(hidden_SH, Head(weight_VH, bias_V), target_S)
        for unit in units(sizes, chunk_tokens):
            if unit.stop - unit.start <= chunk_tokens:
                work.at_once(unit, loss_of)
            else:
                work.in_two_passes(unit, loss_of, chunk_tokens)
        ctx.gradients = (work.grad_hidden_SH, work.grad_weight_VH, work.grad_bias_V)
        ctx.mark_non_differentiable(work.lp_S, work.entropy_S)
        return work.loss, work.lp_S, work.entropy_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Handed out once and in place: a second V x H tensor is what this file avoids.
        assert ctx.gradients is not None, "the gradient of a head_loss can be taken once"
        gradients, ctx.gradients = ctx.gradients, None
        return (*(g if g is None else g.mul_(grads[0]) for g in gradients), *[None] * 4)


class _Work:
    """The forward pass over one micro-batch: what is summed, and the steps of a chunk."""

    def __init__(self, hidden_SH: Tensor, head: Head, target_S: Tensor) -> None:
        self._hidden_SH = hidden_SH
        self._head = head
        self._target_S = target_S
        self._weight_VH = head.weight_VH.to(hidden_SH.dtype)
        exact = _exact(hidden_SH.dtype)
        self.lp_S = hidden_SH.new_empty(len(hidden_SH), dtype=exact)
        self.entropy_S = torch.empty_like(self.lp_S)
        self.loss = hidden_SH.new_zeros((), dtype=exact)
        self.grad_hidden_SH = torch.empty_like(hidden_SH)
        # Summed over chunks in float32 at least, whatever the weights are.
        self.grad_weight_VH = torch.zeros_like(head.weight_VH, dtype=_exact(head.weight_VH.dtype))
        self.grad_bias_V = None
        if head.bias_V is not None:
            self.grad_bias_V = torch.zeros_like(head.bias_V, dtype=_exact(head.bias_V.dtype))

    def at_once(self, chunk: slice, loss_of: LossOf) -> None:
        """Logits, log-probs, loss and gradients of whole trajectories."""
        logits_CV = self._head.logits(self._hidden_SH[chunk], self._weight_VH)
        self.lp_S[chunk], self.entropy_S[chunk], rest = _softmax(logits_CV, self._target_S[chunk])
        g_C = self._lose(chunk, loss_of)
        self._add_gradients(chunk, _logit_gradient(rest, self._target_S[chunk], g_C))

    def in_two_passes(self, unit: slice, loss_of: LossOf, chunk_tokens: int) -> None:
        """A trajectory longer than a chunk: its loss first, then its logits again."""
        chunks = list(_slices(unit, chunk_tokens))
        for chunk in chunks:
            logits_CV = self._head.logits(self._hidden_SH[chunk], self._weight_VH)
            target_C = self._target_S[chunk]
            self.lp_S[chunk], self.entropy_S[chunk] = _softmax(logits_CV, target_C)[:2]
        g = self._lose(unit, loss_of)
        for chunk in chunks:
            logits_CV = self._head.logits(self._hidden_SH[chunk], self._weight_VH)
            rest = _softmax(logits_CV, self._target_S[chunk])[2]
            g_C = g[chunk.start - unit.start : chunk.stop - unit.start]
            self._add_gradients(chunk, _logit_gradient(rest, self._target_S[chunk], g_C))

    def _lose(self, tokens: slice, loss_of: LossOf) -> Tensor:
        """Add the loss of `tokens`; returns its gradient in their log-probs."""
        with torch.enable_grad():
            lp_C = self.lp_S[tokens].detach().requires_grad_()
            loss = loss_of(lp_C, tokens)
        self.loss += loss.detach()
        if not loss.requires_grad:
            return torch.zeros_like(lp_C)
        return torch.autograd.grad(loss, lp_C)[0]

    def _add_gradients(self, chunk: slice, dlogits_CV: Tensor) -> None:
        dlogits_CV = dlogits_CV.to(self._weight_VH.dtype)
        hidden_CH = self._hidden_SH[chunk]
        if self.grad_bias_V is not None:
            self.grad_bias_V += dlogits_CV.sum(0, dtype=self.grad_bias_V.dtype)
        self.grad_hidden_SH[chunk] = dlogits_CV @ self._weight_VH
        if dlogits_CV.is_cuda and dlogits_CV.dtype != self.grad_weight_VH.dtype:
            # Half-precision factors summed up in float32, without a half-precision product between.
            torch.addmm(
                self.grad_weight_VH,
                dlogits_CV.T,
                hidden_CH,
                out_dtype=self.grad_weight_VH.dtype,
                out=self.grad_weight_VH,
            )
        elif dlogits_CV.dtype == self.grad_weight_VH.dtype:
            self.grad_weight_VH.addmm_(dlogits_CV.T, hidden_CH)
        else:
            for words in _slices(slice(0, dlogits_CV.shape[1]), CPU_WORDS):
                self.grad_weight_VH[words] += dlogits_CV[:, words].T @ hidden_CH


def units(sizes: Sequence[int], chunk_tokens: int) -> Iterator[slice]:
    """Consecutive trajectories that fit a chunk together; a longer one stands alone.

    sizes [3, 2, 6, 1], 5 tokens -> 0:5, 5:11, 11:12
    """
    start = stop = 0
    for size in sizes:
        if stop > start and stop + size - start > chunk_tokens:
            yield slice(start, stop)
            start = stop
        stop += size
    if stop > start:
        yield slice(start, stop)


def _slices(unit: slice, size: int) -> Iterator[slice]:
    for start in range(unit.start, unit.stop, size):
        yield slice(start, min(start + size, unit.stop))


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _softmax(logits_CV: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Log-prob [C] of each target, entropy [C], and what `_logit_gradient` needs of them."""
    if logits_CV.is_cuda and logits_CV.dtype != torch.float64:
        lp_C, entropy_C, norm_C = _fused()[0](logits_CV, target_C)
        return lp_C, entropy_C, (logits_CV, norm_C)
    lp_C = logits_CV.new_empty(len(logits_CV), dtype=_exact(logits_CV.dtype))
    entropy_C = torch.empty_like(lp_C)
    for rows in _slices(slice(0, len(logits_CV)), _cached_rows(logits_CV)):
        lp_RV = logits_CV[rows].log_softmax(-1, dtype=lp_C.dtype)
        p_RV = lp_RV.exp()
        lp_C[rows] = lp_RV.gather(-1, target_C[rows, None]).squeeze(-1)
        entropy_C[rows] = -(p_RV[:, None] @ lp_RV[:, :, None]).flatten()
        logits_CV[rows] = p_RV
    return lp_C, entropy_C, (logits_CV, lp_C)


def _cached_rows(logits_CV: Tensor) -> int:
    """Rows that stay in a processor's cache from one pass over them to the next."""
    return torch.get_num_threads() * max(1, CACHE_BYTES // (logits_CV.shape[-1] * 4))


def _logit_gradient(rest: tuple[Tensor, Tensor], target_C: Tensor, g_C: Tensor) -> Tensor:
    """[C, V] g (onehot(y) - softmax(z)); overwrites what `_softmax` kept."""
    if rest[0].is_cuda and rest[0].dtype != torch.float64:
        logits_CV, norm_C = rest
        return _fused()[1](logits_CV, norm_C, target_C, g_C)
    p_CV, lp_C = rest
    dlogits_CV = p_CV.mul_(-g_C[:, None].to(p_CV.dtype))
    # 1 - p from the log-prob: in half precision the difference of the two has no digits left.
    target_gradient_C = (-g_C * torch.expm1(lp_C)).to(p_CV.dtype)
    return dlogits_CV.scatter_(-1, target_C[:, None], target_gradient_C[:, None])


@cache
def _fused() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two passes over [C, V] as one kernel each: on a GPU memory traffic is what they cost."""
    return (
        torch.compile(_softmax_pass, dynamic=True),
        torch.compile(_gradient_pass, dynamic=True),
    )


def _softmax_pass(logits_CV: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z_CV = logits_CV.float()
    norm_C = z_CV.logsumexp(-1)
    lp_C = z_CV.gather(-1, target_C[:, None]).squeeze(-1) - norm_C
    entropy_C = norm_C - ((z_CV - norm_C[:, None]).exp() * z_CV).sum(-1)
    return lp_C, entropy_C, norm_C


def _gradient_pass(logits_CV: Tensor, norm_C: Tensor, target_C: Tensor, g_C: Tensor) -> Tensor:
    p_CV = (logits_CV.float() - norm_C[:, None]).exp()
    is_target_CV = torch.arange(logits_CV.shape[-1], device=g_C.device) == target_C[:, None]
    return logits_CV.copy_(g_C[:, None] * (is_target_CV.float() - p_CV))
