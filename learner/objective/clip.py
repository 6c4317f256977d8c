"""What a ratio does to a token's advantage: surrogates, and the tokens a clip silences.

Letters: `T` trained tokens; `w_T` importance ratio, `a_T` advantage, `lp_T` log-prob under the
policy being trained. Every surrogate returns the term to be MAXIMISED, one per token, before
reduce weights.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_tokens(w_T: Tensor, a_T: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """[T] bool: (A > 0 and w > 1 + eps_high) or (A < 0 and w < 1 - eps_low).

    The clipped surrogate has no gradient there. With eps 0.2: w 1.3, A 1 -> True; w 1.3, A -1 ->
    False.
    """
    return ((a_T > 0) & (w_T > 1 + eps_high)) | ((a_T < 0) & (w_T < 1 - eps_low))


def clipped_surrogate(
    w_T: Tensor, a_T: Tensor, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> Tensor:
    """[T] min(w A, clip(w, 1 - eps_low, 1 + eps_high) A), PPO (arXiv 1707.06347).

    With `dual_clip` = c > 1, a negative advantage costs at most c |A|: max(that, c A) (arXiv
    1912.09729). eps 0.2: (w 1.5, A 1) -> 1.2; (w 0.5, A -1) -> -0.8; (w 5, A -1) -> -5, with dual
    clip 3 -> -3.
    """
    # The sign of A decides which bound can bind, so one clamp says it: half the backward pass of
    # the minimum of two products.
    is_negative_T = a_T < 0
    low_T = torch.full_like(a_T, -torch.inf).masked_fill_(is_negative_T, 1 - eps_low)
    high_T = torch.full_like(a_T, 1 + eps_high).masked_fill_(is_negative_T, torch.inf)
    term_T = w_T.clamp(low_T, high_T) * a_T
    if dual_clip is None:
        return term_T
    return torch.where(is_negative_T, torch.maximum(term_T, dual_clip * a_T), term_T)


def truncated_weight(w_T: Tensor, max_weight: float) -> Tensor:
    """[T] min(w, max_weight), detached: truncated importance sampling."""
    return w_T.detach().clamp(max=max_weight)


def cispo_weight(w_T: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """[T] clip(w, 1 - eps_low, 1 + eps_high), detached: every token keeps a gradient
    (MiniMax-M1)."""
    return w_T.detach().clamp(1 - eps_low, 1 + eps_high)


def topr_weight(w_T: Tensor, a_T: Tensor) -> Tensor:
    """[T] 1 where A >= 0, w clipped to [0, 1] where A < 0, detached (TOPR, arXiv 2503.14286)."""
    return torch.where(a_T < 0, w_T.detach().clamp(0, 1), torch.ones_like(w_T))


def vespo_weight(w_T: Tensor, a_T: Tensor) -> Tensor:
    """[T] w^k exp(lam (1 - w)), detached; (k, lam) = (2, 3) where A >= 0, (3, 2) where A < 0.

    w 1 -> 1 for both; w 0.5, A 1 -> 0.25 exp(1.5) = 1.1204.
    """
    w_T = w_T.detach()
    k_T = torch.where(a_T < 0, 3.0, 2.0)
    lam_T = torch.where(a_T < 0, 2.0, 3.0)
    return torch.exp(k_T * w_T.log() + lam_T * (1 - w_T))


def second_moment_mask(d_T: Tensor, a_T: Tensor, max_second_moment: float) -> Tensor:
    """[T] bool, the tokens M2PO masks: True carries no gradient.

    Among tokens that move away from the sampler (A > 0 and d > 0, or A < 0 and d < 0) the largest
    |d| are masked until the mean d^2 of the rest is at most `max_second_moment`.
    A = 1, d = [0.1, 0.2, 0.5], limit 0.04: means of the smallest 1, 2, 3 are 0.01, 0.025, 0.1 ->
    [False, False, True].
    """
    candidate_T = ((a_T > 0) & (d_T > 0)) | ((a_T < 0) & (d_T < 0))
    index_C = candidate_T.nonzero().squeeze(-1)
    square_C, order_C = d_T.detach()[index_C].square().sort()
    rank_C = torch.arange(1, len(square_C) + 1, device=d_T.device)
    # The running mean of an ascending sequence never falls, so the kept ones are a prefix.
    excess_C = square_C.cumsum(0) / rank_C > max_second_moment
    mask_T = torch.zeros_like(candidate_T)
    mask_T[index_C[order_C[excess_C]]] = True
    return mask_T
