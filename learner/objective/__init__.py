"""Objectives: ratio, clip, ctn, advantage and reduce as small pure functions; presets as data."""

from leeway.learner.objective.loss import BatchTerms, Tokens, batch_terms, clipped, loss
from leeway.learner.objective.presets import PRESETS, Objective, resolve

__all__ = [
    "PRESETS",
    "BatchTerms",
    "Objective",
    "Tokens",
    "batch_terms",
    "clipped",
    "loss",
    "resolve",
]
