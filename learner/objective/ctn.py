"""Clipping-triggered normalization: a step is shortened by what its clip removed.

C = sum over clipped tokens of weight_t w_t A_t grad log pi_t, a vector of the size of the
gradient; its norm is global over ranks and micro-batches. Source: arXiv 2511.20718 Eq. 7-8 for the
gradient form, a second-hand note for the penalty form.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ctn_divisor(bias_norm: float, c: float, raw: bool) -> float:
    """What the gradient is divided by: max(1, ||C|| / c), or ||C|| itself when `raw`.

    c = 1: ||C|| 4 -> 4; ||C|| 0.25 -> 1, raw 0.25; c = 2, ||C|| 4 -> 2. Nothing clipped (||C|| 0)
    -> 1.
    """
    if bias_norm == 0:
        return 1.0
    return bias_norm if raw else max(1.0, bias_norm / c)


def bias_coefficient(w_T: Tensor, a_T: Tensor, weight_T: Tensor, clipped_T: Tensor) -> Tensor:
    """[T] the factor of grad log pi_t in C: weight w A where clipped, else 0; detached."""
    return torch.where(clipped_T, weight_T * w_T * a_T, 0.0).detach()


def ctn_penalty(kl_T: Tensor, weight_T: Tensor, clip_fraction: float, strength: float) -> Tensor:
    """Scalar strength * clip_fraction * (weighted sum of the k3 KL), to be added to the loss.

    `clip_fraction` is a number of the whole batch and carries no gradient.
    strength 2, fraction 0.25, KL [0.1, 0.3] at weights 1/2 -> 0.1.
    """
    return strength * clip_fraction * (weight_T * kl_T).sum()
