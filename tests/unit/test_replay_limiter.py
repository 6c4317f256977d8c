"""Limiters by hand, and what is refused because it could wait for ever."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from leeway.replay.config import ReplayConfig
from leeway.replay.limiter import Limiter, limiter_of


@pytest.mark.parametrize(
    ("size", "inserts", "samples", "room"),
    [(0, 0, 0, 4), (3, 3, 0, 1), (4, 4, 0, 0), (2, 6, 4, 2), (0, 4, 0, 2)],
)
def test_a_queue_of_4_with_2_free(size, inserts, samples, room):
    # The last: nothing is left of 4 inserts, and below min_size inserting is free.
    assert Limiter(2, 1.0, 0.0, 4.0).room(size, inserts, samples) == room


@pytest.mark.parametrize(
    ("n", "size", "inserts", "samples", "may"),
    [(2, 2, 2, 0, True), (2, 1, 2, 0, False), (2, 5, 5, 4, False), (1, 5, 5, 4, True)],
)
def test_a_queue_is_sampled_down_to_nothing_and_no_further(n, size, inserts, samples, may):
    assert Limiter(2, 1.0, 0.0, 4.0).may_sample(n, size, inserts, samples) == may


def test_numbers_of_sample_to_insert():
    config = ReplayConfig(
        groups_per_step=2,
        limiter="sample-to-insert",
        min_size=10,
        samples_per_insert=3,
        error_buffer=12,
        max_draws=3,
    )
    assert limiter_of(config) == (10, 3.0, 18.0, 42.0)


def test_fewer_groups_than_a_step_are_inserted_freely():
    config = ReplayConfig(groups_per_step=8, limiter="queue", queue_size=8)
    assert limiter_of(config) == (8, 1.0, 0.0, 8.0)


def test_without_a_limiter_nothing_is_held_back():
    limiter = limiter_of(ReplayConfig())
    assert limiter.room(10**6, 10**6, 0) == math.inf
    assert limiter.may_sample(16, 0, 0, 10**6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"limiter": "queue", "queue_size": 3, "groups_per_step": 4},
            "queue_size = 3 must be at least groups_per_step = 4",
        ),
        (
            {"limiter": "sample-to-insert", "error_buffer": 2, "groups_per_step": 4},
            "error_buffer = 2 leaves a window of 4 .* at least 2.5",
        ),
        (
            {
                "limiter": "sample-to-insert",
                "samples_per_insert": 6,
                "max_draws": 6,
                "error_buffer": 5,
                "groups_per_step": 1,
            },
            "error_buffer = 5 leaves a window of 10 .* at least 6",
        ),
        (
            {"limiter": "sample-to-insert", "samples_per_insert": 2},
            "samples_per_insert = 2 .* max_draws = 1",
        ),
        (
            {"limiter": "sample-to-insert", "samples_per_insert": 0.5},
            'samples_per_insert = 0.5 leaves groups untrained.*"pace"',
        ),
        (
            {"limiter": "min-size", "min_size": 50, "max_groups": 40},
            "only when 50 groups exist, and max_groups = 40",
        ),
        (
            {"limiter": "min-size", "min_size": 9, "groups_per_step": 4, "max_staleness": 1},
            "only when 9 groups exist, and the version window .* = 8",
        ),
        (
            {
                "staleness_policy": "exact",
                "groups_per_step": 2,
                "max_staleness": 1,
                "limiter": "queue",
                "queue_size": 2,
            },
            'lets 2 groups wait, and staleness_policy = "exact" draws only when .* = 4 do',
        ),
        (
            {
                "groups_per_step": 2,
                "max_staleness": 1,
                "max_draws": 2,
                "limiter": "sample-to-insert",
                "samples_per_insert": 1.5,
                "min_size": 4,
                "error_buffer": 1.75,
            },
            "only when 5 groups exist, and the version window .* = 4",
        ),
        (
            {"staleness_policy": "exact", "draw_by": "lifo"},
            'it needs draw_by = "fifo" and max_draws = 1',
        ),
    ],
)
def test_settings_that_could_wait_for_ever_are_refused_with_the_numbers(settings, words):
    with pytest.raises(ValidationError, match=words):
        ReplayConfig.model_validate(settings)


@given(
    st.integers(1, 6),
    st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 4.0]),
    st.integers(1, 12),
    st.floats(0.5, 20),
    st.integers(0, 400),
)
@settings(max_examples=300)
def test_a_limiter_that_is_accepted_never_stops_both_sides(step, ratio, min_size, buffer, choices):
    """Greedy or random, one side can always move: groups stay until they are evicted."""
    try:
        config = ReplayConfig(
            staleness_policy="drop",
            groups_per_step=step,
            limiter="sample-to-insert",
            samples_per_insert=ratio,
            min_size=min_size,
            error_buffer=buffer,
            max_draws=4,
        )
    except ValidationError:
        return
    limiter = limiter_of(config)
    inserts = samples = 0
    for turn in range(200):
        can_insert = limiter.room(inserts, inserts, samples) >= 1
        can_sample = limiter.may_sample(step, inserts, inserts, samples)
        assert can_insert or can_sample
        wants_insert = (choices >> (turn % 9)) & 1
        if can_insert and (wants_insert or not can_sample):
            inserts += 1
        else:
            samples += step
