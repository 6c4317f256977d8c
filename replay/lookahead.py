"""How far ahead of the learner groups are admitted, when that follows the need: pure arithmetic.

A window that is always full makes every group wait in the buffer until it is as old as
`max_staleness` allows, although the learner would have found enough to train with fewer. What was
left behind the emptiest of the last draws was never needed: so many groups fewer than there were
are admitted from then on, and what is trained is that much younger. A draw that finds too little
gives a step back.

The unit is a group. One step's are always admitted, so a step can always be drawn.

    window of 80 groups, 16 a step; draws find 64 outstanding, all of them ready, so 48 are left
    -> the least of 8 draws is 48, a quarter of a step is kept: 64 - 44 = 20 may be outstanding
    -> 4 draws may still take what was admitted before; the 8 behind them are looked at

While a step trains, engines are a version behind the next draw, so a step of the window stays
empty: what was there counts, not what might have been.

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
    most_seen: int = 0
    """Most groups that one of them found outstanding: played and ready."""
    num_draws: int = 0
    """Looked at so far. Below 0: so many come first that may draw what was admitted before the last
    change."""
    num_doublings: int = 0
    """Of the draws to look at."""

    def most_outstanding(self, step: int, window: int) -> int:
        """Groups that may be played and ready together.

        80 of the window, 60 held back -> 20; never less than a step, also where limits are lower
        than they were.
        """
        return max(step, window - self.held_back)

    def after_draw(self, num_left: int, num_outstanding: int, step: int, window: int) -> Lookahead:
        """Behind a draw that found `num_left` ready groups more than its step when it was first
        tried, below 0 if fewer, and so many outstanding.

        16 a step of a window of 80, 64 outstanding. Left 50, then seven times 48 -> 20 may be
        outstanding, so 60 are held back. Short then -> 44, and 16 draws are looked at.
        """
        held_back = min(self.held_back, window - step)
        if num_left < 0:
            doubled = min(MOST_DOUBLINGS, self.num_doublings + (held_back > 0))
            return Lookahead(max(0, held_back - step), num_doublings=doubled)
        is_first = self.num_draws <= 0
        least = num_left if is_first else min(self.least_left, num_left)
        most = num_outstanding if is_first else max(self.most_seen, num_outstanding)
        num_draws = self.num_draws + 1
        if num_draws < NUM_DRAWS * 2**self.num_doublings:
            return Lookahead(held_back, least, most, num_draws, self.num_doublings)
        surplus = max(0, least - math.ceil(step / 4))
        wanted = window - max(step, most - surplus)
        if surplus == 0 or wanted <= held_back:
            return Lookahead(held_back, num_doublings=self.num_doublings)
        return Lookahead(wanted, 0, 0, -math.ceil(most / step), self.num_doublings)
