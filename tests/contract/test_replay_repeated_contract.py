"""Calls that come twice, late or out of order: a reply was lost, and the caller asked again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from leeway.replay.errors import WaitTimeout
from leeway.replay.store import Replay, ReplayStats
from leeway.replay.synthetic import build_group
from tests.contract.replay_calls import (
    FULL_HOUR_S,
    SOON_S,
    Timed,
    drawn,
    put,
    timed_stores,
    train,
    v,
)


@pytest.fixture(params=["memory", "redis"])
async def timed(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Timed]:
    async with timed_stores(None if request.param == "memory" else redis_url) as stores:
        yield stores


async def counters(replay: Replay) -> ReplayStats:
    """Without the ages of what is held, which grow meanwhile."""
    return msgspec.structs.replace(await replay.stats(), slots=(), leases=())


# --- twice at once -------------------------------------------------------------------------------


async def test_a_release_sent_twice_counts_one_return(timed):
    replay = timed.build(max_returns=1)
    slots = [await put(replay), await put(replay)]
    lease = await replay.draw(SOON_S)
    await replay.release(lease)
    once = await counters(replay)
    await replay.release(lease)
    assert await counters(replay) == once
    # Twice would be more than max_returns, and the groups dropped.
    assert sorted(drawn(await train(replay), slots)) == [0, 1]


async def test_a_release_sent_twice_takes_its_samples_back_once(timed):
    """Twice would make inserts - samples 4 with two groups inserted, and hold back for ever."""
    replay = timed.build(limiter="queue", queue_size=3, max_staleness=3)
    await put(replay), await put(replay)
    lease = await replay.draw(SOON_S)
    for _ in range(2):
        await replay.release(lease)
    with pytest.raises(WaitTimeout, match="2 groups inserted and 1 being played, 0 sampled"):
        while True:
            await replay.admit(1, v(0), SOON_S)


async def test_a_release_that_comes_late_leaves_the_next_lease_alone(timed):
    replay = timed.build()
    await put(replay), await put(replay)
    first = await replay.draw(SOON_S)
    await replay.release(first)
    second = await replay.draw(SOON_S)
    await replay.release(first)
    assert (await replay.stats()).num_leased == 2
    await replay.acknowledge(second, v(1))
    assert (await replay.stats()).num_trained == 2


async def test_a_drop_sent_twice_frees_one_slot_and_counts_one(timed):
    replay = timed.build()
    slots = await replay.admit(4, v(0), SOON_S)
    timed.pass_s(8.0)
    await replay.drop(slots[0], "retriever")
    once = await counters(replay)
    await replay.drop(slots[0], "retriever")
    assert await counters(replay) == once
    assert (once.num_slots, once.dropped, once.play_s) == (3, {"retriever": 1}, 8.0)


async def test_priorities_sent_twice_say_twice_how_many_are_stored(timed):
    replay = timed.build(draw_by="prioritised")
    slots = [await put(replay), await put(replay)]
    named = {slots[0].slot_id: 2.0, slots[1].slot_id: 0.0, "nobody": 1.0}
    once = await replay.update_priorities(named), await counters(replay)
    assert (await replay.update_priorities(named), await counters(replay)) == once
    assert once[0] == 2


async def test_a_restore_sent_twice_returns_and_drops_once(timed):
    replay = timed.build(max_returns=1, max_staleness=3)
    kept = [await put(replay), await put(replay)]
    (lost,) = await replay.admit(1, v(0), SOON_S)
    await replay.add(lost, build_group(lost, version=2))
    (held,) = await replay.admit(1, v(0), SOON_S)
    await replay.draw(SOON_S)
    assert await replay.restore_version(v(1)) == 1
    once = await counters(replay)
    assert (once.learner_version, once.dropped) == (1, {"lost-version": 1})
    assert await replay.restore_version(v(1)) == 0
    assert await counters(replay) == once
    # The groups came back once, and the slot that was held may still be filled.
    await replay.add(held, build_group(held, version=1))
    assert sorted(drawn(await train(replay), kept)) == [0, 1]
    assert (await replay.stats()).dropped == {"lost-version": 1}


# --- late ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("later_s", [FULL_HOUR_S - 1.0, FULL_HOUR_S + 1.0, FULL_HOUR_S + 3599.0])
async def test_a_group_added_in_this_hour_or_the_one_before_is_known_when_it_comes_again(
    timed, later_s
):
    replay = timed.build(groups_per_step=1)
    slot = await put(replay)
    await train(replay)
    timed.pass_s(later_s)
    await replay.add(slot, build_group(slot))
    stats = await replay.stats()
    assert (stats.num_added, stats.num_ready, stats.num_bytes) == (1, 0, 0)


async def test_groups_of_both_hours_are_known(timed):
    replay = timed.build(groups_per_step=1)
    slots = [await put(replay)]
    await train(replay)
    timed.pass_s(FULL_HOUR_S)
    slots.append(await put(replay, 1))
    await train(replay)
    for slot in slots:
        await replay.add(slot, build_group(slot))
    stats = await replay.stats()
    assert (stats.num_added, stats.num_ready) == (2, 0)


async def test_an_acknowledgement_of_an_hour_ago_may_come_again(timed):
    replay = timed.build(groups_per_step=1)
    await put(replay)
    lease = await train(replay)
    timed.pass_s(3599.0)
    await put(replay, 1)
    await train(replay)
    await replay.acknowledge(lease, v(1))
    stats = await replay.stats()
    assert (stats.learner_version, stats.num_trained) == (2, 2)


# --- out of order --------------------------------------------------------------------------------


async def test_an_acknowledgement_of_an_older_version_does_not_move_the_learner_back(timed):
    replay = timed.build(max_staleness=3)
    for _ in range(6):
        await put(replay)
    first, second = await replay.draw(SOON_S), await replay.draw(SOON_S)
    await replay.acknowledge(second, v(2))
    await replay.acknowledge(first, v(1))
    stats = await replay.stats()
    assert (stats.learner_version, stats.num_trained, stats.num_leased) == (2, 4, 0)
    assert (await replay.draw(SOON_S)).version == 2
