"""Chance and priorities: which group goes, and which is next, as every replay buffer keeps them.

Orders are worked out from what selection.py says of its random numbers: one seed and one order of
calls give one order of groups, whichever store is asked, and whatever came back in between.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from leeway.replay.store import Lease, Replay
from tests.contract.replay_calls import (
    SOON_S,
    Timed,
    drawn,
    evicted_one_by_one,
    places,
    put,
    timed_stores,
    train,
    v,
)


@pytest.fixture(params=["memory", "redis"])
async def timed(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Timed]:
    async with timed_stores(None if request.param == "memory" else redis_url) as stores:
        yield stores


def variate(seed: int, arrival: int, turn: int) -> float:
    """-log(u), u of the first 52 bits of a hash; `turn` counts how often the group came back."""
    digest = hashlib.sha1(f"{seed}:{arrival}:{turn}".encode()).digest()
    return -math.log(((int.from_bytes(digest[:7], "big") >> 4) + 1) / 2**52)


# --- uniform eviction ----------------------------------------------------------------------------


async def test_uniform_eviction_takes_each_of_three_groups_about_as_often(build_replay):
    first: Counter[int] = Counter()
    for seed in range(30):
        limits = {"max_groups": 3, "evict_by": "uniform", "seed": seed}
        replay = build_replay(staleness_policy="drop", **limits)
        slots = [await put(replay) for _ in range(3)]
        await replay.admit(1, v(0), SOON_S)
        (place,) = set(range(3)) - set(places(await replay.group_ids(), slots))
        first[place] += 1
    # Ten each on the average, with a standard deviation of 2.6.
    assert all(4 <= first[place] <= 17 for place in range(3))


@pytest.mark.parametrize("seed", [0, 1])
async def test_uniform_eviction_goes_by_the_seed_and_the_negative_arrival(build_replay, seed):
    limits = {"max_groups": 8, "evict_by": "uniform", "seed": seed}
    replay = build_replay(staleness_policy="drop", **limits)
    slots = [await put(replay) for _ in range(8)]
    expected = sorted(range(8), key=lambda place: variate(seed, -(place + 1), 0))
    assert await evicted_one_by_one(replay, slots) == expected
    assert expected != sorted(expected)


async def test_chance_evicts_others_first_than_it_draws(build_replay):
    """With the numbers of the draw, the groups that are to be trained next would make room."""
    limits = {"max_groups": 8, "draw_by": "uniform", "evict_by": "uniform", "groups_per_step": 1}
    replay, twin = (build_replay(staleness_policy="drop", max_staleness=19, **limits) for _ in "12")
    slots = [await put(replay) for _ in range(8)]
    wanted = [place for _ in range(8) for place in drawn(await train(replay), slots)]
    slots = [await put(twin) for _ in range(8)]
    assert await evicted_one_by_one(twin, slots) != wanted


@pytest.mark.parametrize("seed", [0, 1])
async def test_uniform_eviction_of_what_was_trained_goes_by_its_second_turn(build_replay, seed):
    limits = {"max_groups": 6, "evict_by": "uniform", "seed": seed, "max_draws": 2}
    replay = build_replay(groups_per_step=6, max_staleness=9, **limits)
    slots = [await put(replay) for _ in range(6)]
    await train(replay)
    expected = sorted(range(6), key=lambda place: variate(seed, -(place + 1), 1))
    assert await evicted_one_by_one(replay, slots, version=1) == expected


async def test_uniform_eviction_forgets_how_long_a_group_has_stayed(build_replay):
    """Each eviction takes one of four: one that stays for forty comes once in 100,000. Where a
    newcomer did not begin at the score of the last one evicted, old groups would stay for ever."""
    replay = build_replay(staleness_policy="drop", max_groups=4, evict_by="uniform")
    slots = [await put(replay) for _ in range(70)]
    assert min(places(await replay.group_ids(), slots)) > 70 - 4 - 40


# --- priorities and eviction ---------------------------------------------------------------------

LATER = (3.0, 1.0, 2.0)
"""Priorities that are set when all three groups are in: they leave in the order 1, 2, 0."""


async def prioritise(replay: Replay) -> None:
    named = {str(i): p for i, p in zip(await replay.group_ids(), LATER, strict=True)}
    assert await replay.update_priorities(named) == 3


async def test_a_priority_that_was_set_decides_who_makes_room(build_replay):
    limits = {"max_groups": 3, "evict_by": "prioritised"}
    replay = build_replay(staleness_policy="drop", **limits)
    slots = [await put(replay) for _ in range(3)]
    await prioritise(replay)
    assert await evicted_one_by_one(replay, slots) == [1, 2, 0]


async def test_a_priority_set_for_what_was_trained_decides_who_makes_room(build_replay):
    limits = {"max_groups": 3, "evict_by": "prioritised", "max_draws": 2}
    replay = build_replay(groups_per_step=3, max_staleness=9, **limits)
    slots = [await put(replay) for _ in range(3)]
    await train(replay)
    await prioritise(replay)
    assert await evicted_one_by_one(replay, slots, version=1) == [1, 2, 0]


async def test_a_priority_set_during_a_lease_counts_when_the_group_is_back(build_replay):
    limits = {"max_groups": 3, "evict_by": "prioritised", "groups_per_step": 3}
    replay = build_replay(staleness_policy="drop", **limits)
    slots = [await put(replay) for _ in range(3)]
    lease = await replay.draw(SOON_S)
    await prioritise(replay)
    await replay.release(lease)
    assert await evicted_one_by_one(replay, slots) == [1, 2, 0]


@pytest.mark.parametrize(("evict_by", "order"), [("fifo", [0, 1, 2]), ("lifo", [2, 1, 0])])
async def test_priorities_do_not_move_another_order_of_eviction(build_replay, evict_by, order):
    limits = {"max_groups": 3, "evict_by": evict_by, "draw_by": "prioritised"}
    replay = build_replay(staleness_policy="drop", **limits)
    slots = [await put(replay) for _ in range(3)]
    await prioritise(replay)
    assert await evicted_one_by_one(replay, slots) == order


@pytest.mark.parametrize("times", [1, 2])
async def test_priorities_sent_twice_after_a_lost_reply_draw_as_once(build_replay, times):
    limits = {"draw_by": "prioritised", "groups_per_step": 1, "max_staleness": 19}
    replay = build_replay(**limits, seed=4)
    slots = [await put(replay) for _ in range(6)]
    named = {slot.slot_id: 1.0 + place for place, slot in enumerate(slots)}
    for _ in range(times):
        assert await replay.update_priorities(named) == 6
    expected = sorted(range(6), key=lambda place: variate(4, place + 1, 0) / (1.0 + place))
    assert [drawn(await replay.draw(SOON_S), slots)[0] for _ in slots] == expected


# --- what came back ------------------------------------------------------------------------------


def order_by_chance(seed: int, num_groups: int, num_back: int) -> list[int]:
    """Groups as they are drawn one at a time, where the first `num_back` come back at once and the
    others are kept: whatever comes in waits a new variate from the score that was taken last."""
    scores = {place: variate(seed, place + 1, 0) for place in range(num_groups)}
    turns: Counter[int] = Counter()
    order: list[int] = []
    for _ in range(num_back):
        first = min(scores, key=lambda place: scores[place])
        turns[first] += 1
        order.append(first)
        scores[first] += variate(seed, first + 1, turns[first])
    return order + sorted(scores, key=lambda place: scores[place])


async def come_back(replay: Replay, lease: Lease, way: str, timed: Timed) -> None:
    if way == "released":
        await replay.release(lease)
    elif way == "expired":
        timed.pass_s(60.0)
    elif way == "restored":
        await replay.restore_version(v(0))
    else:
        await replay.acknowledge(lease, v(lease.version + 1))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("draw_by", ["uniform", "prioritised"])
@pytest.mark.parametrize("way", ["released", "expired", "restored", "to be trained again"])
async def test_a_group_that_is_back_is_drawn_by_chance_anew(timed, way, draw_by, seed):
    # All priorities are equal, and scores twice as large stand in the same order.
    replay = timed.build(
        draw_by=draw_by,
        seed=seed,
        groups_per_step=1,
        max_staleness=19,
        max_draws=5 if way == "to be trained again" else 1,
        max_returns=5,
        lease_timeout_s=60.0,
    )
    slots = [await put(replay) for _ in range(5)]
    order: list[int] = []
    for _ in range(4):
        lease = await replay.draw(SOON_S)
        order += drawn(lease, slots)
        await come_back(replay, lease, way, timed)
    order += [place for _ in slots for place in drawn(await replay.draw(SOON_S), slots)]
    assert order == order_by_chance(seed, 5, num_back=4)
