"""The admission window and the draw, with numbers worked out by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.replay.schedule import admissible, drawable, is_engine_behind


@pytest.mark.parametrize(
    ("outstanding", "version", "expected"),
    [
        ({}, 5, 4),  # deadline 6: (6 - 5 + 1) * 2
        ({5: 3}, 5, 1),
        ({5: 4}, 5, 0),
        ({}, 4, 2),  # deadline 5: (5 - 5 + 1) * 2
        ({5: 3}, 4, 1),  # 2 by version 5, but 4 - 3 by version 6
        ({4: 2}, 5, 2),
        ({4: 2}, 4, 0),
        ({}, 3, 0),  # deadline 4 is past
        ({}, 6, 6),  # an engine ahead of the acknowledgement: deadline 7
        ({4: 5}, 5, 0),  # more than the rule allows, after limits were lowered
    ],
)
def test_admission_at_learner_5_step_2_staleness_1(outstanding, version, expected):
    assert admissible(outstanding, version, 5, max_staleness=1, groups_per_step=2) == expected


def test_on_policy_admits_exactly_one_step():
    assert admissible({}, 7, 7, max_staleness=0, groups_per_step=3) == 3
    assert admissible({7: 3}, 7, 7, max_staleness=0, groups_per_step=3) == 0


def test_64_versions_of_16_groups_admit_1040():
    assert admissible({}, 0, 0, max_staleness=64, groups_per_step=16) == 1040


@pytest.mark.parametrize(
    ("ready", "playing", "missing", "blocking"),
    [
        ({5: 2}, {}, 0, {}),
        ({5: 1}, {5: 3}, 1, {}),
        ({5: 2}, {4: 1}, 0, {4: 1}),  # deadline 5 is this step
        ({5: 2}, {5: 2}, 0, {}),  # the step at 6 takes them
        ({4: 1, 5: 1}, {4: 1}, 0, {4: 1}),
        ({4: 2}, {5: 2}, 0, {}),
        ({5: 3}, {3: 1}, 0, {}),  # overdue: it cannot be trained, so nobody waits for it
        ({3: 2, 5: 1}, {}, 1, {}),  # overdue ready groups do not count
        ({4: 3}, {4: 1}, 0, {}),  # too many for this step: waiting would not help
    ],
)
def test_draw_at_learner_5_step_2_staleness_1(ready, playing, missing, blocking):
    plan = drawable(ready, playing, 5, max_staleness=1, groups_per_step=2)
    assert (plan.missing, plan.blocking) == (missing, blocking)


@pytest.mark.parametrize(
    ("outstanding", "version", "expected"),
    [
        ({}, 5, 4),
        ({4: 2}, 5, 2),
        ({4: 2, 5: 2}, 5, 0),
        ({}, 4, 0),  # an engine behind; paced, it would be 2
        ({}, 6, 0),  # an engine ahead; paced, it would be 6
        ({3: 1, 4: 2}, 5, 1),  # what is overdue takes room until it is dropped
    ],
)
def test_exact_admission_at_learner_5_step_2_staleness_1(outstanding, version, expected):
    assert admissible(outstanding, version, 5, 1, 2, "exact") == expected


def test_an_engine_is_behind_below_the_bound_and_under_exact_at_any_other_version():
    behind = {
        policy: [a for a in (3, 4, 5, 6) if is_engine_behind(a, 5, 1, policy)]
        for policy in ("pace", "exact")
    }
    assert behind == {"pace": [3], "exact": [3, 4, 6]}


@pytest.mark.parametrize(
    ("ready", "playing", "missing", "blocking"),
    [
        ({4: 2, 5: 2}, {}, 0, {}),
        ({4: 2, 5: 1}, {5: 1}, 1, {5: 1}),
        ({4: 2, 5: 1}, {}, 1, {}),
        ({5: 4}, {}, 0, {}),  # the ramp: the learner began at 5
        ({3: 2, 5: 2}, {}, 2, {}),  # overdue groups do not count
        ({4: 6}, {}, 0, {}),  # too many to be trained in time, after limits were lowered
        ({4: 2, 5: 2}, {5: 1}, 0, {5: 1}),  # nothing may see the version of this step
    ],
)
def test_exact_draw_at_learner_5_step_2_staleness_1(ready, playing, missing, blocking):
    plan = drawable(ready, playing, 5, 1, 2, "exact")
    assert (plan.missing, plan.blocking) == (missing, blocking)


@pytest.mark.parametrize(("staleness", "step"), [(0, 3), (1, 2), (2, 2), (4, 1)])
def test_exact_lags_rise_to_the_bound_and_stay_there(staleness, step):
    ready: list[int] = []
    lags: list[set[int]] = []
    for learner in range(12):
        room = admissible(Counter(ready), learner, learner, staleness, step, "exact")
        ready = sorted([*ready, *[learner] * room])
        assert drawable(Counter(ready), {}, learner, staleness, step, "exact").is_ready
        drawn, ready = ready[:step], ready[step:]
        lags.append({learner - version for version in drawn})
    assert lags == [{min(learner, staleness)} for learner in range(12)]


counts = st.dictionaries(st.integers(0, 8), st.integers(1, 12), max_size=5)


@given(counts, st.integers(0, 8), st.integers(0, 8), st.integers(0, 4), st.integers(1, 6))
def test_exact_admits_what_pace_does_at_the_learners_version(
    outstanding, version, learner, staleness, step
):
    paced = admissible(outstanding, version, learner, staleness, step)
    exact = admissible(outstanding, version, learner, staleness, step, "exact")
    assert exact == (paced if version == learner else 0)


@given(counts, counts, st.integers(0, 8), st.integers(0, 4), st.integers(1, 6))
def test_an_exact_draw_goes_ahead_only_where_a_paced_one_does(
    ready, playing, learner, staleness, step
):
    if drawable(ready, playing, learner, staleness, step, "exact").is_ready:
        assert drawable(ready, playing, learner, staleness, step).is_ready


@given(counts, st.integers(0, 8), st.integers(0, 8), st.integers(0, 4), st.integers(1, 6))
def test_admission_fills_the_window_and_no_more(outstanding, version, learner, staleness, step):
    def fits(groups: dict[int, int]) -> bool:
        return all(
            sum(n for a, n in groups.items() if a + staleness <= d) <= (d - learner + 1) * step
            for d in range(version + staleness, 20)
        )

    n = admissible(outstanding, version, learner, staleness, step)
    if version + staleness < learner:
        assert n == 0
        return
    one_more = {**outstanding, version: outstanding.get(version, 0) + n + 1}
    assert not fits(one_more)
    if n:
        assert fits({**outstanding, version: outstanding.get(version, 0) + n})


@given(counts, counts, st.integers(0, 8), st.integers(0, 4), st.integers(1, 6))
def test_a_draw_that_goes_ahead_leaves_the_rest_in_time(ready, playing, learner, staleness, step):
    def due(groups: dict[int, int], d: int) -> int:
        return sum(n for a, n in groups.items() if learner <= a + staleness <= d)

    horizon = range(learner, 20)
    is_feasible = all(due(ready, d) + due(playing, d) <= (d - learner + 1) * step for d in horizon)
    plan = drawable(ready, playing, learner, staleness, step)
    if not is_feasible or not plan.is_ready:
        return
    for d in horizon:
        left = due(ready, d) - min(step, due(ready, d)) + due(playing, d)
        assert left <= (d - learner) * step
