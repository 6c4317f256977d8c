"""How many groups are held back, with numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from leeway.replay.config import ReplayConfig
from leeway.replay.lookahead import Lookahead

STEP, WINDOW = 16, 80


def after(*left: int, start: Lookahead | None = None) -> Lookahead:
    """Behind draws that left so many groups."""
    lookahead = Lookahead() if start is None else start
    for num_left in left:
        lookahead = lookahead.after_draw(num_left, STEP, WINDOW)
    return lookahead


def test_what_no_draw_needed_is_held_back_but_for_a_quarter_of_a_step():
    assert after(50, *[48] * 6) == Lookahead(0, 48, 7)
    held_back = after(50, *[48] * 7)
    assert held_back == Lookahead(48 - 4, 0, -5)
    assert held_back.most_outstanding(STEP, WINDOW) == 36


def test_the_emptiest_of_eight_draws_counts():
    assert after(*[48] * 7, 9).held_back == 9 - 4
    assert after(*[48] * 7, 3) == Lookahead()
    assert after(3, *[48] * 7) == Lookahead()


def test_draws_that_may_take_what_was_admitted_before_do_not_count():
    held_back = after(*[48] * 8)
    # Five steps of 80 groups are still there; behind them 8 draws leave 6 at least.
    assert after(*[0] * 5, *[6] * 8, start=held_back).held_back == 44 + 2
    assert after(*[0] * 6, *[6] * 7, start=held_back) == Lookahead(44)


def test_a_step_is_always_admitted():
    lookahead = after(*[64] * 8)
    assert lookahead.held_back == 60
    for _ in range(5):
        lookahead = after(*[64] * 20, start=lookahead)
    assert lookahead.held_back == 64
    assert lookahead.most_outstanding(STEP, WINDOW) == STEP


def test_a_short_draw_gives_a_step_back_and_more_draws_are_looked_at():
    lookahead = after(*[48] * 8, -1)
    assert lookahead == Lookahead(44 - 16, 0, 0, 1)
    assert after(*[20] * 15, start=lookahead) == Lookahead(28, 20, 15, 1)
    assert after(*[20] * 16, start=lookahead).held_back == 28 + 16
    assert after(-1, -1, -1, start=lookahead) == Lookahead(0, 0, 0, 3)
    assert after(*[-1] * 9, start=Lookahead(70)).num_doublings == 4


def test_a_short_draw_with_nothing_held_back_is_nobodys_fault():
    assert after(*[48] * 7, -16) == Lookahead()


def test_lower_limits_leave_a_step():
    assert Lookahead(44).most_outstanding(STEP, 32) == STEP
    assert Lookahead(44).after_draw(0, STEP, 32).held_back == 16


@given(st.lists(st.integers(-20, 100), max_size=300), st.integers(1, 9), st.integers(0, 40))
def test_it_stays_between_a_step_and_the_window(left, step, more):
    lookahead, window = Lookahead(), step + more
    for num_left in left:
        before, lookahead = lookahead, lookahead.after_draw(num_left, step, window)
        assert 0 <= lookahead.held_back <= more
        assert step <= lookahead.most_outstanding(step, window) <= window
        assert num_left >= 0 or lookahead.held_back == max(0, before.held_back - step)
        assert num_left < 0 or lookahead.held_back >= before.held_back


@pytest.mark.parametrize(
    "other", [{"staleness_policy": "drop"}, {"limiter": "queue"}, {"staleness_policy": "exact"}]
)
def test_it_is_refused_beside_what_decides_the_same(other):
    with pytest.raises(ValidationError, match=r'lookahead = "adaptive" .* needs staleness_policy'):
        ReplayConfig.model_validate({"lookahead": "adaptive", **other})
