"""Gradients as lists of tensors: summed over ranks in flat buckets, measured, and put aside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from leeway.learner.world import World

BUCKET_BYTES: Final = 64 << 20
"""Gradients are summed over ranks in flat pieces of about this size."""


def take_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Detach the gradients from their parameters; zeros where a parameter has none."""
    taken = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken


def sum_over_ranks(gradients: Sequence[Tensor], world: World) -> None:
    """Add gradients over ranks, in place. Weights are global already, so nothing is averaged."""
    if world.size == 1:
        return
    for bucket in _buckets(gradients):
        flat = world.all_reduce_sum(torch.cat([g.flatten() for g in bucket]))
        for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def global_norm(gradients: Sequence[Tensor]) -> float:
    """Euclidean norm of all gradients together."""
    return torch.nn.utils.get_total_norm(gradients).item()


def scale_to(norm: float, max_norm: float) -> float:
    """Factor that brings a gradient of `norm` down to `max_norm`: norm 4, max 1 -> 0.25."""
    return min(1.0, max_norm / (norm + 1e-12))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        bucket.append(gradient)
        size += gradient.nbytes
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
