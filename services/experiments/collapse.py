"""When a run counts as collapsed. The rule, on held-out scores alone:

    the best score so far, the one before training included, is at least `min_best`, and
    `num_evaluations` evaluations in a row lie below `share` of it

The run collapsed at the step of the first of these. At the end of a run fewer in a row are enough,
because nothing comes that could say otherwise. A run that is stopped early is stopped at the last.

    share 0.5, num_evaluations 2
    steps   0     8     16    24    32
    scores  0.30  0.80  0.35  0.30  ...     best 0.80; 0.35 and 0.30 lie below 0.40: step 16
            0.30  0.80  0.35  0.60          recovered: none
            0.30  0.80  0.35                the end of the run: step 16
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from pydantic import Field

from leeway.replay.config import FrozenModel


class CollapseRule(FrozenModel):
    """Keys of the `[collapse]` table of a sweep."""

    share: float = Field(default=0.5, gt=0, lt=1)
    """A score below this share of the best so far is a fall."""
    num_evaluations: int = Field(default=2, ge=1)
    """So many falls in a row are a collapse."""
    min_best: float = Field(default=0.05, ge=0)
    """A run whose best score is below this has nothing to lose: it cannot collapse."""
    stop_early: bool = True
    """End a collapsed run there. Its row stays, with the score it fell to."""

    @property
    def sentence(self) -> str:
        """For the report."""
        return (
            f"A run has collapsed at the first of {self.num_evaluations} held-out evaluations in a "
            f"row below {self.share:.0%} of the best one before them (at the end of a run, fewer "
            f"in a row), where that best is at least {self.min_best:g}."
        )


class Evaluated(msgspec.Struct, frozen=True):
    """One held-out evaluation."""

    step: int
    """Optimizer steps before it; 0 is before training."""
    wall_s: float
    """Seconds since training began, evaluations included."""
    score: float
    """Exact match, played greedily, 0 to 1."""


def collapse_step(
    evaluations: Sequence[Evaluated], rule: CollapseRule, *, is_over: bool
) -> int | None:
    """The step at which the run collapsed; None if it did not. `is_over`: none will follow."""
    best, fallen = 0.0, list[Evaluated]()
    for one in evaluations:
        if best >= max(rule.min_best, 1e-9) and one.score < rule.share * best:
            fallen.append(one)
            if len(fallen) >= rule.num_evaluations:
                return fallen[0].step
        else:
            fallen.clear()
            best = max(best, one.score)
    return fallen[0].step if fallen and is_over else None
