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
    lookahead = Lookahead(WINDOW) if start is None else start
    for num_left in left:
        if num_left < 0:
            lookahead = lookahead.short_of(-num_left, STEP, WINDOW)
        else:
            lookahead = lookahead.after_draw(num_left, outstanding, was_blocked, STEP, WINDOW)
    return lookahead


def test_what_draws_needed_and_a_quarter_of_a_step_is_admitted():
    assert after(48, *[40] * 6) == Lookahead(80, 24, 7)
    assert after(48, *[40] * 7) == Lookahead(28, num_draws=-5, was_cut=True)


def test_the_neediest_of_eight_draws_counts():
    assert after(*[40] * 7, 9).admitted == 64 - 9 + 4
    assert after(9, *[40] * 7).admitted == 64 - 9 + 4
    start = after(*[40] * 7)
    assert after(2, start=start, outstanding=78) == Lookahead(80)
    assert after(3, start=start, outstanding=78).admitted == 79


def test_draws_that_may_take_what_was_admitted_before_do_not_count():
    cut = after(*[40] * 8)
    # Five steps of 80 groups may still be there; behind them 8 draws need 22.
    then = after(*[0] * 5, *[6] * 8, start=cut, outstanding=28)
    assert then == Lookahead(26, num_draws=-2, was_cut=True)
    assert after(*[0] * 6, *[6] * 7, start=cut, outstanding=28) == Lookahead(28, was_cut=True)


def test_a_step_is_always_admitted():
    lookahead = after(*[64] * 8)
    assert lookahead == Lookahead(STEP, num_draws=-5, was_cut=True)
    assert [Lookahead(3).most_outstanding(STEP, window) for window in (STEP, 80)] == [STEP, STEP]


def test_a_short_draw_adds_what_it_lacked_and_behind_a_cut_more_draws_are_looked_at():
    lookahead = after(*[40] * 8, -6)
    assert lookahead == Lookahead(28 + 6, num_doublings=1)
    assert after(*[10] * 15, start=lookahead, outstanding=34) == Lookahead(34, 24, 15, 1)
    assert after(*[10] * 16, start=lookahead, outstanding=34).admitted == 28
    assert after(-1, start=lookahead).admitted == 34 + 4, "a quarter of a step at least"
    assert lookahead.short_of(0, STEP, WINDOW).admitted == 34 + 4, "as much while it waits"


def test_one_slow_while_doubles_once():
    cut = after(*[40] * 8)
    assert after(-16, -16, -16, -16, start=cut) == Lookahead(80, num_doublings=1)
    again = Lookahead(28, num_doublings=4, was_cut=True)
    assert after(-1, start=again) == Lookahead(32, num_doublings=4)


def test_a_draw_that_waited_for_a_group_that_was_due_adds_and_counts_anew():
    seven = after(*[40] * 7, start=Lookahead(60))
    blocked = after(40, start=seven, was_blocked=True)
    assert blocked == Lookahead(64)
    assert after(40, start=Lookahead(28, num_draws=-5), was_blocked=True) == Lookahead(32)
    assert after(40, start=Lookahead(79), was_blocked=True) == Lookahead(80)


def test_no_cut_adds():
    # More is there than is admitted: it came before limits were lowered.
    assert after(*[48] * 8, start=Lookahead(16), outstanding=80) == Lookahead(16)


def test_a_new_buffer_admits_five_steps_at_most():
    new = Lookahead()
    assert [new.most_outstanding(16, window) for window in (16, 80, 112)] == [16, 80, 80]
    # The first draw finds nothing ready, which is nobody's fault.
    assert new.short_of(16, 16, 112) == Lookahead(80)
    assert new.short_of(16, 16, 48) == Lookahead(48)


def test_a_higher_bound_admits_no_more_at_once_and_a_lower_one_no_more_than_it_allows():
    assert [Lookahead(28).most_outstanding(16, window) for window in (80, 400, 16)] == [28, 28, 16]


@given(
    st.lists(st.tuples(st.integers(-20, 100), st.integers(0, 100), st.booleans()), max_size=300),
    st.integers(1, 9),
    st.integers(0, 40),
)
def test_it_stays_between_a_step_and_the_window(draws, step, more):
    lookahead, window = Lookahead(), step + more
    for num_left, num_outstanding, was_blocked in draws:
        before, is_new = lookahead.most_outstanding(step, window), lookahead.admitted < 0
        if num_left < 0:
            lookahead = lookahead.short_of(-num_left, step, window)
            assert is_new or lookahead.admitted >= min(window, before - num_left)
        else:
            lookahead = lookahead.after_draw(num_left, num_outstanding, was_blocked, step, window)
            assert was_blocked or lookahead.admitted <= before
        assert step <= lookahead.admitted <= window
        assert lookahead.most_outstanding(step, window) == lookahead.admitted


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
