"""How far ahead of the learner groups are admitted, when that follows the need: pure arithmetic.

A window that is always full makes every group wait in the buffer until it is as old as
`max_staleness` allows, although the learner would have found enough to train with fewer. So each
draw tells how many groups it needed: of those that were outstanding (played or ready) all but the
ones that it left ready. Where the most that any of the last draws needed is less than what is
admitted, only so many are admitted from then on, and what is trained is that much younger. A draw
that finds too few gives as many back, a quarter of a step at least. So does one that waited for a
group that was due, and counting begins anew: rollouts went on meanwhile, so what it left ready says
nothing, and a learner that stragglers hold up should have the more to go on with behind them.

The unit is a group. One step's are always admitted, so a step can always be drawn.

    window of 80 groups, 16 a step; a step ends with 64 outstanding and 56 of them ready
    -> its draw leaves 40 ready, so it needed 64 - 40 = 24: its 16 and the 8 being played
    -> if no draw of 8 needed more, 24 and a quarter of a step, 28, may be outstanding: 52 held back
    -> 5 draws may still take what was admitted before; the 8 behind them are looked at

Outstanding groups are counted when a step ends and before that opens the window: those that are
admitted between there and the next draw were no help to it.

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
    most_needed: int = 0
    """Most groups that one of `num_draws` needed."""
    num_draws: int = 0
    """Looked at so far. Below 0: so many come first that may draw what was admitted before the last
    change."""
    num_doublings: int = 0
    """Of the draws to look at."""

    def most_outstanding(self, step: int, window: int) -> int:
        """Groups that may be played and ready together.

        80 of the window, 52 held back -> 28; never less than a step, also where limits are lower
        than they were.
        """
        return max(step, window - self.held_back)

    def after_draw(
        self, num_left: int, num_outstanding: int, was_blocked: bool, step: int, window: int
    ) -> Lookahead:
        """Behind a draw that found `num_left` ready groups more than its step when it was first
        tried, below 0 if fewer; `num_outstanding` were when the step before ended. `was_blocked`:
        it waited for groups that were due.

        16 a step of a window of 80, 64 outstanding. Left 48, then seven times 40: most needed 24,
        so 80 - 28 = 52 are held back. Six short then -> 46, and 16 draws are looked at.
        """
        held_back, reserve = min(self.held_back, window - step), math.ceil(step / 4)
        if num_left < 0:
            doubled = min(MOST_DOUBLINGS, self.num_doublings + (held_back > 0))
            given_back = max(reserve, -num_left)
            return Lookahead(max(0, held_back - given_back), num_doublings=doubled)
        if was_blocked:
            return Lookahead(max(0, held_back - reserve), num_doublings=self.num_doublings)
        needed = num_outstanding - num_left
        most = needed if self.num_draws <= 0 else max(self.most_needed, needed)
        num_draws = self.num_draws + 1
        if num_draws < NUM_DRAWS * 2**self.num_doublings:
            return Lookahead(held_back, most, num_draws, self.num_doublings)
        admitted = window - held_back
        wanted = max(step, most + reserve)
        if wanted >= admitted:
            return Lookahead(held_back, num_doublings=self.num_doublings)
        return Lookahead(window - wanted, 0, -math.ceil(admitted / step), self.num_doublings)
