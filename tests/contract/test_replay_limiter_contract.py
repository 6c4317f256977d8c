"""What exactly meets a limiter's bound goes on, and one more is held back, in every buffer."""

from __future__ import annotations

import pytest

from leeway.replay.errors import WaitTimeout
from tests.contract.replay_calls import SOON_S, put, train, v

FOUR_AROUND_TWO = {
    "limiter": "sample-to-insert",
    "min_size": 2,
    "error_buffer": 4,
    "max_draws": 9,
    "max_staleness": 9,
}
"""inserts - samples from 2 - 4 = -2 to 2 + 4 = 6."""


@pytest.mark.parametrize("at_once", [1, 6])
async def test_the_sixth_insert_meets_a_bound_of_6_and_the_seventh_is_held_back(
    build_replay, at_once
):
    replay = build_replay(**FOUR_AROUND_TWO)
    for _ in range(6 // at_once):
        assert len(await replay.admit(at_once, v(0), SOON_S)) == at_once
    with pytest.raises(WaitTimeout, match=r"\(limiter\).*at most 6 ahead"):
        await replay.admit(1, v(0), SOON_S)


async def test_of_more_than_the_bound_lets_in_as_many_come_in_as_meet_it(build_replay):
    assert len(await build_replay(**FOUR_AROUND_TWO).admit(9, v(0), SOON_S)) == 6


async def test_the_second_step_meets_a_bound_of_minus_2_and_the_third_is_held_back(build_replay):
    replay = build_replay(**FOUR_AROUND_TWO)
    await put(replay), await put(replay)
    await train(replay)  # 2 - 2 = 0
    await train(replay)  # 2 - 4 = -2
    with pytest.raises(WaitTimeout, match="2 exist, 2 were inserted, 4 sampled"):
        await replay.draw(SOON_S)
    # 3 - 6 = -3 is not enough either.
    await put(replay, 2)
    with pytest.raises(WaitTimeout, match="3 were inserted, 4 sampled"):
        await replay.draw(SOON_S)
    await put(replay, 2)
    await train(replay)  # 4 - 6 = -2


async def test_a_queue_lets_nothing_be_drawn_twice(build_replay):
    replay = build_replay(limiter="queue", queue_size=2, max_draws=2, max_staleness=9)
    await put(replay), await put(replay)
    await train(replay)  # 2 - 2 = 0
    with pytest.raises(WaitTimeout, match='limiter "queue"'):
        await replay.draw(SOON_S)


async def test_a_bound_that_rounding_misses_by_a_hair_is_met(build_replay):
    """In doubles 1.2 / 0.1 is 11.999999999999998."""
    limits = {"samples_per_insert": 0.1, "min_size": 2, "error_buffer": 1.0, "groups_per_step": 1}
    replay = build_replay(limiter="sample-to-insert", staleness_policy="drop", **limits)
    assert len(await replay.admit(20, v(0), SOON_S)) == 12
    with pytest.raises(WaitTimeout, match="limiter"):
        await replay.admit(1, v(0), SOON_S)


async def test_a_step_that_rounding_misses_by_a_hair_is_drawn(build_replay):
    """10 x 0.1 - 2 is -1, and 4 x 0.1 - 1.4 is -0.9999999999999999."""
    limits = {"samples_per_insert": 0.1, "min_size": 4, "error_buffer": 1.4, "groups_per_step": 1}
    replay = build_replay(
        limiter="sample-to-insert", staleness_policy="drop", max_staleness=9, max_draws=2, **limits
    )
    for _ in range(10):
        await put(replay)
    await train(replay), await train(replay)
    with pytest.raises(WaitTimeout, match="10 were inserted, 2 sampled"):
        await replay.draw(SOON_S)
