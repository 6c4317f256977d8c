"""`leeway bench lookahead`: runs whose figures are known without it."""

from __future__ import annotations

import pytest

from leeway.replay.errors import ConfigurationError
from leeway.services.bench.lookahead import Load, Outcome, of_options, play, run

STEADY = Load("steady", groups_per_step=2, in_flight=8, step_s=10.0, play_s=4.0, spread=0.0)


def test_a_full_window_makes_every_group_as_old_as_it_may_be():
    assert play(STEADY, 3, "full", 30, 0) == Outcome(0.0, 3.0, 3, 0.1)


def test_an_adaptive_lookahead_trains_what_was_admitted_in_the_step_before():
    outcome = play(STEADY, 3, "adaptive", 90, 0)
    assert (outcome.idle, outcome.steps_per_s) == (0.0, pytest.approx(0.1))
    # A group more than a step is let in: every other group is the one that was left before.
    assert 1.0 <= outcome.staleness <= 1.5


def test_nothing_is_held_back_where_rollouts_are_slower():
    slow = Load("slow", groups_per_step=2, in_flight=2, step_s=1.0, play_s=10.0, spread=0.0)
    full, adaptive = (play(slow, 4, kind, 60, 0) for kind in ("full", "adaptive"))
    # Two groups at once: the learner waits nine of ten seconds for each pair.
    assert full == adaptive
    assert full.idle == pytest.approx(0.9)


def test_engines_that_rest_make_groups_late():
    resting = Load(
        "rest",
        groups_per_step=2,
        in_flight=2,
        step_s=1.0,
        play_s=10.0,
        spread=0.0,
        rest_every_s=100.0,
        rest_s=50.0,
    )
    # Five rounds of plays in each 100 s: 10 to 50, and one over the rest.
    assert play(resting, 4, "full", 60, 0).steps_per_s == pytest.approx(5 / 100)


def test_figures_of_ones_own_take_the_place_of_the_cases():
    load = of_options(Load("as given"), play_s=4.0, step_s=None)
    assert load is not None and (load.play_s, load.step_s) == (4.0, 10.0)
    assert of_options(Load("as given"), play_s=None) is None
    result = run(quick=True, load=load, bounds=(0, 2))
    assert [row[:2] for row in result.rows] == [("as given", "0"), ("as given", "2")]
    # On-policy: the learner waits for the slowest of a step, whatever the lookahead.
    assert result.keys["staleness_full/0/0"] == result.keys["staleness_adaptive/0/0"] == 0
    assert result.keys["idle_full/0/0"] == result.keys["idle_adaptive/0/0"] > 0.3
    assert result.keys["staleness_adaptive/0/2"] <= result.keys["staleness_full/0/2"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"play_s": 0.0}, "must be positive, not 16, 64, 10 and 0"),
        ({"groups_per_step": 0}, "must be positive, not 0, 64"),
        ({"step_s": float("nan")}, "must be positive, not 16, 64, nan and 10"),
        ({"step_s": float("inf")}, "must be positive, not 16, 64, inf and 10"),
        ({"spread": -1.0}, "spread must be between 0 and 5, not -1"),
    ],
)
def test_numbers_that_no_run_has_are_refused(values, words):
    with pytest.raises(ConfigurationError, match=words):
        Load("wrong", **values)


def test_a_bound_below_zero_is_refused():
    with pytest.raises(ConfigurationError, match="max_staleness must be 0 or more, not -1"):
        run(quick=True, bounds=(-1,))
