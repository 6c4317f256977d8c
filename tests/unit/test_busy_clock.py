"""Time with work, counted once however many pieces overlap."""

from __future__ import annotations

from leeway.actors.busy_clock import BusyClock


def test_overlapping_pieces_are_counted_once_and_gaps_not_at_all():
    now = [10.0]
    clock = BusyClock(lambda: now[0])
    for at, act in ((10, "begin"), (11, "begin"), (12, "end"), (15, "end"), (20, "begin")):
        now[0] = at
        getattr(clock, act)()
    now[0] = 22
    # From 10 to 15, and from 20 until now.
    assert (clock.busy_s, clock.up_s, clock.num_under_way) == (7, 12, 1)
