"""How many groups are held back, with numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from leeway.replay.config import ReplayConfig
from leeway.replay.lookahead import Lookahead

STEP, WINDOW = 16, 80


def after(
    *left: int, start: Lookahead | None = None, outstanding: int = 64, was_blocked: bool = False
) -> Lookahead:
    """Behind draws that left so many groups; below 0, so many were missing."""
    lookahead = Lookahead(0) if start is None else start
    for num_left in left:
        if num_left < 0:
            lookahead = lookahead.short_of(-num_left, STEP, WINDOW)
        else:
            lookahead = lookahead.after_draw(num_left, outstanding, was_blocked, STEP, WINDOW)
    return lookahead


def test_what_no_draw_needed_is_held_back_but_for_a_quarter_of_a_step():
    assert after(48, *[40] * 6) == Lookahead(0, 24, 7)
    held_back = after(48, *[40] * 7)
    assert held_back == Lookahead(80 - 28, num_draws=-5)
    assert held_back.held(STEP, WINDOW) == 52


def test_the_neediest_of_eight_draws_counts():
    assert after(*[40] * 7, 9).held_back == 80 - (64 - 9 + 4)
    assert after(9, *[40] * 7).held_back == 80 - (64 - 9 + 4)
    start = after(*[40] * 7)
    assert after(2, start=start, outstanding=78) == Lookahead(0)
    assert after(3, start=start, outstanding=78).held_back == 1


def test_draws_that_may_take_what_was_admitted_before_do_not_count():
    held_back = after(*[40] * 8)
    # Five steps of 80 groups may still be there; behind them 8 draws need 22.
    then = after(*[0] * 5, *[6] * 8, start=held_back, outstanding=28)
    assert then == Lookahead(80 - 26, num_draws=-2)
    assert after(*[0] * 6, *[6] * 7, start=held_back, outstanding=28) == Lookahead(52)


def test_a_step_is_always_admitted():
    lookahead = after(*[64] * 8)
    assert lookahead == Lookahead(64, num_draws=-5)
    assert lookahead.held(STEP, WINDOW) == WINDOW - STEP


def test_a_short_draw_gives_back_what_it_lacked_and_more_draws_are_looked_at():
    lookahead = after(*[40] * 8, -6)
    assert lookahead == Lookahead(52 - 6, num_doublings=1)
    assert after(*[10] * 15, start=lookahead, outstanding=34) == Lookahead(46, 24, 15, 1)
    assert after(*[10] * 16, start=lookahead, outstanding=34).held_back == 52
    assert after(-1, start=lookahead).held_back == 46 - 4, "a quarter of a step at least"
    assert after(-16, -16, -16, start=lookahead) == Lookahead(0, num_doublings=4)
    assert after(-1, start=Lookahead(20, num_doublings=4)) == Lookahead(16, num_doublings=4)


def test_a_draw_that_waited_for_a_group_that_was_due_gives_back_and_counts_anew():
    seven = after(*[40] * 7)
    blocked = after(40, start=seven, was_blocked=True)
    assert blocked == Lookahead(0)
    assert after(*[40] * 7, start=blocked) == seven
    assert after(40, start=Lookahead(52, num_draws=-5), was_blocked=True) == Lookahead(48)


def test_fewer_are_never_held_back_but_for_a_short_draw():
    # More is there than is admitted: it came before limits were lowered.
    assert after(*[48] * 8, start=Lookahead(70), outstanding=80) == Lookahead(64)


def test_a_new_buffer_admits_five_steps_at_most():
    new = Lookahead()
    assert [new.held(16, window) for window in (16, 80, 112)] == [0, 0, 32]
    # The first draw finds nothing ready, which is nobody's fault.
    assert new.short_of(16, 16, 112) == Lookahead(16)
    assert new.short_of(16, 16, 80) == Lookahead(0)


def test_a_short_draw_with_nothing_held_back_is_nobodys_fault():
    assert after(*[48] * 7, -16) == Lookahead(0)


def test_lower_limits_leave_a_step():
    assert Lookahead(44).held(STEP, 32) == 16
    assert Lookahead(44).after_draw(0, 16, False, STEP, 32).held_back == 16


@given(
    st.lists(st.tuples(st.integers(-20, 100), st.integers(0, 100), st.booleans()), max_size=300),
    st.integers(1, 9),
    st.integers(0, 40),
)
def test_it_stays_between_a_step_and_the_window(draws, step, more):
    lookahead, window = Lookahead(), step + more
    for num_left, num_outstanding, was_blocked in draws:
        before = lookahead.held(step, window)
        if num_left < 0:
            lookahead = lookahead.short_of(-num_left, step, window)
            assert lookahead.held_back <= max(0, before + num_left)
        else:
            lookahead = lookahead.after_draw(num_left, num_outstanding, was_blocked, step, window)
            assert was_blocked or lookahead.held_back >= before
        assert 0 <= lookahead.held_back <= more
        assert lookahead.held(step, window) == lookahead.held_back


@pytest.mark.parametrize(
    "other",
    [
        {"staleness_policy": "drop"},
        {"staleness_policy": "exact"},
        {"limiter": "queue"},
        {"max_draws": 2},
    ],
)
def test_it_is_refused_beside_what_decides_the_same(other):
    with pytest.raises(ValidationError, match=r'lookahead = "adaptive" .* needs staleness_policy'):
        ReplayConfig.model_validate({"lookahead": "adaptive", **other})
    assert not ReplayConfig.model_validate(other).is_adaptive


def test_it_is_what_a_run_has_unless_it_says_otherwise():
    assert ReplayConfig().is_adaptive
    assert not ReplayConfig(lookahead="full").is_adaptive
