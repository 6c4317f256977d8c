"""Gradients as lists of tensors: measured over all ranks, scaled, and put aside."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from leeway.learner.sharding import local
from leeway.learner.world import World


def take_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Detach the gradients from their parameters; zeros where a parameter has none."""
    taken = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken


def global_norm(gradients: Sequence[Tensor], world: World) -> float:
    """Euclidean norm of all gradients together, over the slices of all ranks."""
    of_rank = torch.nn.utils.get_total_norm([local(g) for g in gradients])
    if world.size == 1:
        return of_rank.item()
    return world.all_reduce_sum(of_rank.double().square()).sqrt().item()


def scale_to(norm: float, max_norm: float) -> float:
    """Factor that brings a gradient of `norm` down to `max_norm`: norm 4, max 1 -> 0.25."""
    return min(1.0, max_norm / (norm + 1e-12))


def give_back(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], scale: float
) -> None:
    """Put gradients, times `scale`, where the optimizer takes them from."""
    torch._foreach_mul_([local(g) for g in gradients], scale)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
