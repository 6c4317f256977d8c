"""The gap between the policy that sampled a token and the one its ratio is taken against.

With `old` = proximal, the learner's own log-probs at the start of the step, the ratio corrects for
what the step itself does, and the weight exp(proximal - behaviour) for all that lies before it:
staleness, and the engine's other arithmetic. It stands outside the clip (arXiv 2505.24298).
"""

from __future__ import annotations

import torch
from torch import Tensor

from leeway.learner.objective.kinds import Correction
from leeway.learner.objective.ratio import log_ratio


def correction_weight(
    kind: Correction, proximal_T: Tensor, behaviour_T: Tensor, bound: float
) -> Tensor:
    """[T] none: 1. truncate: min(w, bound). mask: w within [1 / bound, bound], else 0.

    w = exp(proximal - behaviour) = [0.25, 1.5, 4], bound 2: truncate [0.25, 1.5, 2], mask
    [0, 1.5, 0].
    """
    if kind == "none":
        return torch.ones_like(proximal_T)
    w_T = log_ratio(proximal_T, behaviour_T).exp()
    if kind == "truncate":
        return w_T.clamp(max=bound)
    return torch.where((w_T >= 1 / bound) & (w_T <= bound), w_T, 0.0)
