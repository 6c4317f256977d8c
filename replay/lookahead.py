"""How far ahead of the learner groups are admitted, when that follows the need: pure arithmetic.

A window that is always full makes every group wait in the buffer until it is as old as
`max_staleness` allows, although the learner would have found enough to train with fewer. So each
draw tells how many groups it needed: of those that were outstanding (played or ready) all but the
ones that it left ready. Where the most that any of the last draws needed is less than what is
admitted, only so many are admitted from then on, and what is trained is that much younger.

A draw that finds too few has as many more admitted, a quarter of a step at least, and at once: they
may be late, and they may be lost, with a worker that holds its slots until they expire. While it
goes on waiting, a quarter of a step is added every five seconds. One that waited for a group that
was due adds as much when it is granted, and counting begins anew: rollouts went on meanwhile, so
what it left ready says nothing, and a learner that stragglers hold up should have the more to go on
with behind them.

The unit is a group. One step's are always admitted, so a step can always be drawn. A new buffer
begins with five steps' at most, what a bound of 4 would admit: where the bound is high, a window
filled at once would be trained for many steps before any of this could tell.

    window of 80 groups, 16 a step; a step ends with 64 outstanding and 56 of them ready
    -> its draw leaves 40 ready, so it needed 64 - 40 = 24: its 16 and the 8 being played
    -> if no draw of 8 needed more, 24 and a quarter of a step are admitted: 28
    -> 5 draws may still take what was admitted before; the 8 behind them are looked at

Outstanding groups are counted when a step ends and before that opens the window: those that are
admitted between there and the next draw were no help to it.

The first draw that comes up short after a cut shows that 8 draws were too few to see the need, such
as that of an evaluation now and then: from then on twice as many are looked at, up to 128.
lua/rule.lua is the same arithmetic; tests/integration/test_replay_lua_rule.py compares them.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

NUM_DRAWS: Final = 8
"""Draws that are looked at before fewer groups are admitted."""
MOST_DOUBLINGS: Final = 4
MORE_EVERY_S: Final = 5.0
FIRST_STEPS: Final = 5
"""Steps whose groups a new buffer admits."""


class Lookahead(msgspec.Struct, frozen=True):
    """What a buffer remembers of its draws."""

    admitted: int = -1
    """Groups that may be outstanding, as far as the window allows; -1 before the first draw."""
    most_needed: int = 0
    """Most groups that one of `num_draws` needed."""
    num_draws: int = 0
    """Looked at so far. Below 0: so many come first that may draw what was admitted before the last
    cut."""
    num_doublings: int = 0
    """Of the draws to look at."""
    was_cut: bool = False
    """Since the last draw that came up short."""

    def most_outstanding(self, step: int, window: int) -> int:
        """Groups that may be played and ready together, of this window.

        16 a step: 28 -> 28 of a window of 80 or 400, and 16 of one of 16. Before the first draw 80
        of either.
        """
        admitted = FIRST_STEPS * step if self.admitted < 0 else self.admitted
        return max(step, min(admitted, window))

    def short_of(self, num_missing: int, step: int, window: int) -> Lookahead:
        """When a draw is first tried and finds that many too few; 0 when it still waits.

        16 a step, 28 admitted: 6 missing -> 34, 1 missing -> 32. Behind a cut 16 draws are looked
        at then. The first draw of all finds none, which says nothing.
        """
        admitted = self.most_outstanding(step, window)
        if self.admitted < 0:
            return Lookahead(admitted)
        more = max(_reserve(step), num_missing)
        doubled = min(MOST_DOUBLINGS, self.num_doublings + self.was_cut)
        return Lookahead(min(window, admitted + more), num_doublings=doubled)

    def after_draw(
        self, num_left: int, num_outstanding: int, was_blocked: bool, step: int, window: int
    ) -> Lookahead:
        """Behind a draw that found `num_left` ready groups more than its step when it was first
        tried; `num_outstanding` were when the step before ended. `was_blocked`: it waited for
        groups that were due.

        16 a step of a window of 80, 64 outstanding. Left 48, then seven times 40: most needed 24,
        so 28 are admitted.
        """
        admitted = self.most_outstanding(step, window)
        if was_blocked:
            more = min(window, admitted + _reserve(step))
            return Lookahead(more, 0, 0, self.num_doublings, self.was_cut)
        needed = num_outstanding - num_left
        most = needed if self.num_draws <= 0 else max(self.most_needed, needed)
        num_draws = self.num_draws + 1
        if num_draws < NUM_DRAWS * 2**self.num_doublings:
            return Lookahead(admitted, most, num_draws, self.num_doublings, self.was_cut)
        wanted = max(step, most + _reserve(step))
        if wanted >= admitted:
            return Lookahead(admitted, 0, 0, self.num_doublings, self.was_cut)
        return Lookahead(wanted, 0, -math.ceil(admitted / step), self.num_doublings, True)


def _reserve(step: int) -> int:
    """Groups more than were needed, and least that are added."""
    return math.ceil(step / 4)
