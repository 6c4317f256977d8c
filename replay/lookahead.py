"""How far ahead of the learner groups are admitted, when that follows the need: pure arithmetic.

A window that is always full makes every group wait in the buffer until it is as old as
`max_staleness` allows, although the learner would have found enough to train with fewer. What was
left behind the emptiest of the last draws was never needed: so many groups fewer are admitted from
then on, and what is trained is that much younger. A draw that finds too little gives a step back.

The unit is a group. One step's are always admitted, so a step can always be drawn.

    window of 80 groups, 16 a step; the learner finds 64 ready each time, so 48 are left
    -> the least of 8 draws is 48, a quarter of a step is kept: 44 held back, 36 may be outstanding
    -> 5 draws may still take what was admitted before; the 8 behind them are looked at

A draw that comes up short while groups are held back shows that 8 draws were too few to see the
need, such as that of an evaluation now and then: from then on twice as many are looked at, up to
128. lua/rule.lua is the same arithmetic; tests/integration/test_replay_lua_rule.py compares them.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

NUM_DRAWS: Final = 8
"""Draws that are looked at before groups are held back."""
MOST_DOUBLINGS: Final = 4


class Lookahead(msgspec.Struct, frozen=True):
    """What a buffer remembers of its draws."""

    held_back: int = 0
    """Groups of the window that are not admitted."""
    least_left: int = 0
    """Fewest ready groups that one of `num_draws` left behind."""
    num_draws: int = 0
    """Looked at so far. Below 0: so many come first that may draw what was admitted before the last
    change."""
    num_doublings: int = 0
    """Of the draws to look at."""

    def most_outstanding(self, step: int, window: int) -> int:
        """Groups that may be played and ready together.

        80 of the window, 44 held back -> 36; never less than a step, also where limits are lower
        than they were.
        """
        return max(step, window - self.held_back)

    def after_draw(self, num_left: int, step: int, window: int) -> Lookahead:
        """Behind a draw that found `num_left` groups more than its step when it was first tried,
        below 0 if fewer.

        16 a step of a window of 80. Left 50, then seven times 48 -> 44 held back. Short, at 44 held
        back -> 28, and 16 draws are looked at.
        """
        held_back = min(self.held_back, window - step)
        if num_left < 0:
            doubled = min(MOST_DOUBLINGS, self.num_doublings + (held_back > 0))
            return Lookahead(max(0, held_back - step), 0, 0, doubled)
        least = min(self.least_left, num_left) if self.num_draws > 0 else num_left
        num_draws = self.num_draws + 1
        if num_draws < NUM_DRAWS * 2**self.num_doublings:
            return Lookahead(held_back, least, num_draws, self.num_doublings)
        outstanding = window - held_back
        surplus = min(least - math.ceil(step / 4), outstanding - step)
        if surplus <= 0:
            return Lookahead(held_back, 0, 0, self.num_doublings)
        num_steps = math.ceil(outstanding / step)
        return Lookahead(held_back + surplus, 0, -num_steps, self.num_doublings)
