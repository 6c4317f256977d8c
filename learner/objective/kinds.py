"""The names of an objective's parts. Imports nothing heavy, so that configurations are checked by
them."""

from __future__ import annotations

from typing import Literal

Ratio = Literal["none", "token", "turn", "turn-arithmetic", "sequence", "sequence-product"]
"""How log-ratios become importance ratios: ratio.py."""

Surrogate = Literal["clip", "plain", "truncate", "cispo", "topr", "vespo", "second-moment"]
"""What a ratio does to an advantage: clip.py."""

Ctn = Literal["none", "gradient", "penalty"]
"""Clipping-triggered normalization: ctn.py."""

CtnTarget = Literal["gradient", "learning-rate"]
"""What the `gradient` form divides."""

Advantage = Literal[
    "gae", "gae-turn", "group", "group-unscaled", "group-turn", "leave-one-out", "batch"
]
"""advantage.py."""

Reduce = Literal["token", "trajectory", "turn"]
"""What the loss is a mean over: reduce.py."""

Old = Literal["behaviour", "proximal"]
"""The policy that ratios are taken against: the one that sampled each token, or this learner's own
at the start of the update."""

Correction = Literal["none", "truncate", "mask"]
"""What becomes of exp(proximal - behaviour), outside the clip: correction.py."""

CRITIC_ADVANTAGES: frozenset[Advantage] = frozenset({"gae", "gae-turn"})
"""Advantages that need a critic."""
SIBLING_ADVANTAGES: frozenset[Advantage] = frozenset(
    {"group", "group-unscaled", "group-turn", "leave-one-out"}
)
"""Advantages that compare the trajectories of one group."""
