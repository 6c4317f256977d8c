"""One objective applied to tokens: the pieces of this folder put together.

Letters: `T` trained tokens (of some whole trajectories, or of the batch); `lp_T` log-prob under the
policy being trained, `old_T` under the one its ratio is taken against, `a_T` advantage, `w_T`
ratio, `d_T` log-ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leeway.learner.objective import clip
from leeway.learner.objective.ctn import ctn_penalty
from leeway.learner.objective.presets import Objective
from leeway.learner.objective.ratio import Segments, importance_ratio, kl_k3, log_ratio


@dataclass(frozen=True)
class Tokens:
    """What an objective needs to know of its tokens besides their log-probs."""

    old_T: Tensor
    """[T] log-prob under the policy that ratios are taken against."""
    a_T: Tensor
    """[T] advantage."""
    weight_T: Tensor
    """[T] reduce weight, with denominators of the whole optimizer step."""
    segments: Segments
    correction_T: Tensor | None = None
    """[T] weight outside the clip; None where every token has 1."""

    def take(self, token_S: Tensor | slice) -> Tokens:
        """Those of `S` chosen tokens, which must make whole trajectories."""
        correction_T = self.correction_T
        return Tokens(
            self.old_T[token_S],
            self.a_T[token_S],
            self.weight_T[token_S],
            self.segments.take(token_S),
            None if correction_T is None else correction_T[token_S],
        )

    def to(self, device: torch.device) -> Tokens:
        """The same on another device."""
        correction_T = self.correction_T
        return Tokens(
            self.old_T.to(device),
            self.a_T.to(device),
            self.weight_T.to(device),
            self.segments.to(device),
            None if correction_T is None else correction_T.to(device),
        )

    @property
    def term_weight_T(self) -> Tensor:
        """[T] what a token's surrogate is multiplied by: reduce weight times correction."""
        return self.weight_T if self.correction_T is None else self.weight_T * self.correction_T


@dataclass(frozen=True)
class BatchTerms:
    """Numbers of the whole optimizer step that enter every token's loss; found by a first pass."""

    clip_fraction: float
    """Share of clipped tokens."""
    masked_T: Tensor
    """[T] bool, tokens without gradient."""

    def take(self, token_S: Tensor | slice) -> BatchTerms:
        """Those of `S` chosen tokens."""
        return BatchTerms(self.clip_fraction, self.masked_T[token_S])

    def to(self, device: torch.device) -> BatchTerms:
        """The same on another device."""
        return BatchTerms(self.clip_fraction, self.masked_T.to(device))


def clipped(objective: Objective, w_T: Tensor, a_T: Tensor) -> Tensor:
    """[T] bool; all False for an objective that does not clip."""
    if objective.eps_low is None or objective.eps_high is None:
        return torch.zeros_like(a_T, dtype=torch.bool)
    return clip.clipped_tokens(w_T, a_T, objective.eps_low, objective.eps_high)


def batch_terms(objective: Objective, lp_T: Tensor, tokens: Tokens) -> BatchTerms:
    """The numbers of the whole optimizer step, from the log-probs of all its tokens."""
    d_T = log_ratio(lp_T, tokens.old_T)
    w_T = importance_ratio(objective.ratio, d_T, tokens.segments)
    clip_fraction = clipped(objective, w_T, tokens.a_T).float().mean().item()
    masked_T = torch.zeros_like(tokens.a_T, dtype=torch.bool)
    if objective.surrogate == "second-moment":
        masked_T = clip.second_moment_mask(d_T, tokens.a_T, objective.max_second_moment)
    return BatchTerms(clip_fraction, masked_T)


def surrogate_term(
    objective: Objective, lp_T: Tensor, w_T: Tensor, a_T: Tensor, masked_T: Tensor | None
) -> Tensor:
    """[T] the term to be maximised, before weights."""
    kind = objective.surrogate
    eps_low = 0.0 if objective.eps_low is None else objective.eps_low
    eps_high = 0.0 if objective.eps_high is None else objective.eps_high
    if kind == "clip":
        return clip.clipped_surrogate(w_T, a_T, eps_low, eps_high, objective.dual_clip)
    if kind == "second-moment":
        assert masked_T is not None, "second-moment needs the mask of the first pass"
        return torch.where(masked_T, 0.0, w_T * a_T)
    if kind == "plain":
        return a_T * lp_T
    if kind == "truncate":
        return clip.truncated_weight(w_T, objective.max_weight) * a_T * lp_T
    if kind == "cispo":
        return clip.cispo_weight(w_T, eps_low, eps_high) * a_T * lp_T
    weigh = clip.topr_weight if kind == "topr" else clip.vespo_weight
    return weigh(w_T, a_T) * a_T * lp_T


def loss(
    objective: Objective, lp_T: Tensor, tokens: Tokens, terms: BatchTerms | None = None
) -> Tensor:
    """Scalar to be minimised: -sum of weight_T * correction_T * term_T, plus the penalty where the
    objective has one.

    Summed over any split into whole trajectories it is the loss of the optimizer step. `terms` (cut
    to these tokens) is needed where `objective.needs_first_pass`.
    """
    d_T = log_ratio(lp_T, tokens.old_T)
    w_T = importance_ratio(objective.ratio, d_T, tokens.segments)
    masked_T = None if terms is None else terms.masked_T
    term_T = surrogate_term(objective, lp_T, w_T, tokens.a_T, masked_T)
    total = -(tokens.term_weight_T * term_T).sum()
    if objective.ctn != "penalty":
        return total
    assert terms is not None, "the penalty needs the clip fraction of the first pass"
    return total + ctn_penalty(
        kl_k3(d_T), tokens.weight_T, terms.clip_fraction, objective.ctn_strength
    )
