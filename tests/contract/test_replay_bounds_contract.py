"""Limiters, selection, byte budget and the drop policy, as every replay buffer keeps them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
import pytest

from leeway.replay.errors import DataError, WaitTimeout
from leeway.replay.schema import Group, PolicyVersion
from leeway.replay.store import Lease, Replay, Slot, Waiting
from leeway.replay.synthetic import build_group

SOON_S = 0.05
AMPLE_S = 5.0


def v(version: int) -> PolicyVersion:
    return PolicyVersion(version)


def with_rewards(group: Group, rewards: Sequence[float]) -> Group:
    pairs = zip(group.trajectories, rewards, strict=True)
    return msgspec.structs.replace(
        group, trajectories=tuple(msgspec.structs.replace(t, reward=r) for t, r in pairs)
    )


async def put(replay: Replay, version: int = 0, rewards: Sequence[float] = (0.0, 1.0)) -> Slot:
    """Admit one group at `version` and add it."""
    slot = (await replay.admit(1, v(version), SOON_S))[0]
    await replay.add(slot, with_rewards(build_group(slot, num_trajectories=len(rewards)), rewards))
    return slot


async def train(replay: Replay) -> Lease:
    lease = await replay.draw(SOON_S)
    await replay.acknowledge(lease, v(lease.version + 1))
    return lease


def order(lease: Lease, slots: Sequence[Slot]) -> list[int]:
    """Which of `slots` were drawn, by their place in the list."""
    places = {slot.slot_id: place for place, slot in enumerate(slots)}
    return [places[group.group_id] for group in lease.groups]


# --- limiters ------------------------------------------------------------------------------------


async def test_min_size_holds_the_first_draw_until_four_groups_exist(build_replay):
    replay = build_replay(limiter="min-size", min_size=4)
    for _ in range(3):
        await put(replay)
    with pytest.raises(WaitTimeout, match=r"draws when 4 groups exist.* 3 exist"):
        await replay.draw(SOON_S)
    waiting = asyncio.create_task(replay.draw(AMPLE_S))
    await put(replay)
    assert len((await waiting).groups) == 2


async def test_a_queue_of_three_refuses_the_fourth_until_a_step_is_drawn(build_replay):
    replay = build_replay(limiter="queue", queue_size=3)
    assert len(await replay.admit(9, v(0), SOON_S)) == 3
    with pytest.raises(WaitTimeout, match=r"limiter.*at most 3 ahead"):
        await replay.admit(1, v(0), SOON_S)


async def test_a_queue_is_bounded_by_its_size_whatever_the_size_that_others_wait_for(build_replay):
    replay = build_replay(limiter="queue", queue_size=3, min_size=9)
    assert len(await replay.admit(4, v(0), SOON_S)) == 3


async def test_a_waiting_admission_wakes_when_the_queue_is_drawn_from(build_replay):
    replay = build_replay(limiter="queue", queue_size=2)
    await put(replay), await put(replay)
    waiting = asyncio.create_task(replay.admit(9, v(0), AMPLE_S))
    await asyncio.sleep(SOON_S)
    await replay.draw(SOON_S)
    assert len(await waiting) == 2


async def test_a_group_handed_back_is_no_sample_and_one_that_failed_no_insert(build_replay):
    replay = build_replay(limiter="queue", queue_size=2)
    await put(replay), await put(replay)
    await replay.release(await replay.draw(SOON_S))
    with pytest.raises(WaitTimeout, match="limiter"):
        await replay.admit(1, v(0), SOON_S)
    await replay.draw(SOON_S)
    slot = (await replay.admit(1, v(0), SOON_S))[0]
    await replay.drop(slot, "failed")
    assert len(await replay.admit(9, v(0), SOON_S)) == 2


async def test_two_samples_per_insert_keep_the_distance_of_reverbs_inequalities(build_replay):
    # offset = 2 * 2 = 4, window 0 to 8: inserts * 2 - samples.
    replay = build_replay(
        limiter="sample-to-insert",
        samples_per_insert=2,
        min_size=2,
        error_buffer=4,
        max_draws=2,
        max_staleness=9,
    )
    # 4 groups are 8 ahead.
    slots = await replay.admit(9, v(0), SOON_S)
    assert len(slots) == 4
    for slot in slots:
        await replay.add(slot, build_group(slot))
    await train(replay)
    # 8 - 2 samples = 6: one more insert makes 8.
    assert len(await replay.admit(9, v(0), SOON_S)) == 1
    await train(replay), await train(replay), await train(replay)
    # 4 inserts, 8 samples: 0 ahead, and each of the four was trained twice.
    assert (await replay.stats()).num_ready == 0


async def play_ahead(replay: Replay, version: int) -> None:
    """As rollouts do that are much quicker than the learner: all that is admitted."""
    while True:
        try:
            slots = await replay.admit(9, v(version), SOON_S)
        except WaitTimeout:
            return
        for slot in slots:
            await replay.add(slot, build_group(slot, version=version))


@pytest.mark.parametrize(
    ("limits", "num_played"),
    [
        # Four steps ahead of the learner's version, one more for each of its eleven steps: as
        # many groups as may be trained once.
        ({}, 30),
        # 4 x inserts - samples is 14 at most: (14 + 22) / 4.
        (
            {
                "limiter": "sample-to-insert",
                "samples_per_insert": 4,
                "min_size": 2,
                "error_buffer": 6,
            },
            9,
        ),
    ],
)
async def test_only_a_limiter_saves_groups_where_one_may_be_trained_four_times(
    build_replay, limits, num_played
):
    replay = build_replay(max_draws=4, max_staleness=3, **limits)
    for version in range(11):
        await play_ahead(replay, version)
        await train(replay)
    await play_ahead(replay, 11)
    assert (await replay.stats()).num_added == num_played


async def test_what_a_restore_takes_away_was_no_insert(build_replay):
    replay = build_replay(limiter="queue", queue_size=2, max_staleness=3)
    for slot in await replay.admit(2, v(0), SOON_S):
        await replay.add(slot, build_group(slot, version=1))
    assert await replay.restore_version(v(0)) == 2
    assert len(await replay.admit(9, v(0), SOON_S)) == 2


# --- bytes ---------------------------------------------------------------------------------------


async def test_admission_ends_where_the_largest_group_would_not_fit(build_replay):
    replay = build_replay(max_bytes=2000)
    await put(replay)
    size = (await replay.stats()).num_bytes
    fitting = min(3, (2000 - size) // size)
    assert len(await replay.admit(9, v(0), SOON_S)) == fitting


async def test_a_full_budget_says_its_numbers_and_opens_after_training(build_replay):
    replay = build_replay(max_bytes=700, groups_per_step=1, max_staleness=9)
    await put(replay)
    size = (await replay.stats()).num_bytes
    assert 350 < size <= 700
    with pytest.raises(WaitTimeout, match=f"bytes.*{size} bytes are stored.*max_bytes is 700"):
        await replay.admit(1, v(0), SOON_S)
    waiting = asyncio.create_task(replay.admit(1, v(0), AMPLE_S))
    await train(replay)
    assert len(await waiting) == 1


async def test_a_small_group_that_came_in_makes_room_for_who_waits(build_replay):
    # Slots count as large as the largest group so far.
    replay = build_replay(max_bytes=9000, groups_per_step=1, max_staleness=30)
    large = (await replay.admit(1, v(0), SOON_S))[0]
    await replay.add(large, build_group(large, num_tokens=400))
    slots = await replay.admit(9, v(0), SOON_S)
    waiting = asyncio.create_task(replay.admit(1, v(0), AMPLE_S))
    await asyncio.sleep(SOON_S)
    for slot in slots:
        await replay.add(slot, build_group(slot, num_trajectories=1, num_tokens=8))
    assert len(await asyncio.wait_for(waiting, 1.0)) == 1


async def test_a_budget_below_a_step_says_so(build_replay):
    replay = build_replay(max_bytes=700)
    await put(replay)
    with pytest.raises(WaitTimeout, match=r"a step of such groups takes .* raise max_bytes"):
        await replay.admit(1, v(0), SOON_S)


# --- selection -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw_by", "first", "second"),
    [("fifo", [0, 1], [2, 3]), ("lifo", [5, 4], [3, 2]), ("freshest", [5, 3], [1, 4])],
)
async def test_draws_go_by_the_selector(build_replay, draw_by, first, second):
    replay = build_replay(draw_by=draw_by, max_staleness=9)
    await replay.restore_version(v(3))
    # fifo is the oldest version first: versions 0 0 1 1 2 2, put in another order for freshest.
    versions = {"freshest": (0, 2, 0, 3, 1, 3)}.get(draw_by, (0, 0, 1, 1, 2, 2))
    slots = [await put(replay, version) for version in versions]
    assert order(await train(replay), slots) == first
    assert order(await train(replay), slots) == second


async def test_pace_takes_what_can_wait_no_longer_before_what_the_selector_wants(build_replay):
    # Deadline 1: of four groups from version 0, two must be drawn at 0 and two at 1.
    replay = build_replay(draw_by="lifo", max_staleness=1)
    slots = [await put(replay) for _ in range(4)]
    assert sorted(order(await train(replay), slots)) == [0, 1]
    slots += [await put(replay, 1), await put(replay, 1)]
    assert sorted(order(await train(replay), slots)) == [2, 3]
    assert (await replay.stats()).dropped == {}


async def test_uniform_draws_differ_by_seed_and_repeat_with_it(build_replay):
    orders: list[list[int]] = []
    for seed in (1, 1, 2):
        replay = build_replay(draw_by="uniform", seed=seed, max_staleness=19)
        slots = [await put(replay) for _ in range(20)]
        orders.append([place for _ in range(5) for place in order(await train(replay), slots)])
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != sorted(orders[0])


async def test_prioritised_prefers_groups_whose_rewards_differ(build_replay):
    replay = build_replay(draw_by="prioritised", groups_per_step=8, max_staleness=19)
    slots = [await put(replay, rewards=(0, 1) if i % 2 else (1, 1)) for i in range(16)]
    assert all(place % 2 for place in order(await train(replay), slots))


async def test_priorities_can_be_set_and_unknown_groups_are_passed_over(build_replay):
    replay = build_replay(draw_by="prioritised", max_staleness=19)
    slots = [await put(replay) for _ in range(12)]
    wanted = {slots[3].slot_id: 1e9, slots[8].slot_id: 1e9}
    assert await replay.update_priorities({**wanted, "nobody": 1.0}) == 2
    assert sorted(order(await train(replay), slots)) == [3, 8]


@pytest.mark.parametrize("priority", [float("nan"), float("inf"), -1.0])
async def test_a_priority_that_is_no_finite_number_is_refused_and_changes_nothing(
    build_replay, priority
):
    replay = build_replay(draw_by="prioritised")
    slots = [await put(replay), await put(replay)]
    with pytest.raises(DataError, match="priority of group"):
        await replay.update_priorities({slots[0].slot_id: 1.0, slots[1].slot_id: priority})
    assert len((await train(replay)).groups) == 2


async def test_a_group_whose_priority_is_set_again_and_again_keeps_its_turn(build_replay):
    replay = build_replay(draw_by="prioritised", groups_per_step=1, max_staleness=60, seed=5)
    slots = [await put(replay) for _ in range(10)]
    drawn: list[int] = []
    for _ in range(50):
        ids = await replay.group_ids()
        await replay.update_priorities(dict.fromkeys(ids, 0.5))
        drawn += order(await train(replay), slots)
        slots.append(await put(replay, (await replay.stats()).learner_version))
    # Of ten equals each waits ten draws on the average; none waits for ever.
    assert max(place_in - place for place_in, place in enumerate(drawn)) < 50
    assert len(set(drawn[:40]) & set(range(10))) >= 8


# --- drop ----------------------------------------------------------------------------------------


async def test_drop_admits_beyond_the_window_and_drops_what_grew_too_old(build_replay):
    replay = build_replay(staleness_policy="drop", max_staleness=1)
    old = [await put(replay) for _ in range(7)]
    for _ in range(2):
        await train(replay)
    new = [await put(replay, 2), await put(replay, 2)]
    assert order(await replay.draw(SOON_S), [*old, *new]) == [7, 8]
    stats = await replay.stats()
    assert stats.dropped == {"overdue": 3}
    # 3 groups of 2 trajectories of 2 turns and 12 tokens.
    assert stats.dropped_turns == {"overdue": {2: 6}}
    assert stats.dropped_tokens == {"overdue": {16: 6}}


async def test_drop_goes_by_the_tokens_and_not_by_the_admission(build_replay):
    replay = build_replay(staleness_policy="drop", max_staleness=1)
    await replay.restore_version(v(1))
    for slot in await replay.admit(2, v(0), SOON_S):
        await replay.add(slot, build_group(slot, version=1))
    await put(replay, 1), await put(replay, 1)
    await train(replay)
    assert [group.oldest_version for group in (await train(replay)).groups] == [1, 1]


@pytest.mark.parametrize(("evict_by", "kept"), [("fifo", [2, 3, 4]), ("lifo", [0, 1, 4])])
async def test_a_full_buffer_evicts_by_its_selector(build_replay, evict_by, kept):
    replay = build_replay(staleness_policy="drop", max_groups=3, evict_by=evict_by)
    slots = [await put(replay) for _ in range(5)]
    left = await replay.group_ids()
    assert [slots.index(slot) for slot in slots if slot.slot_id in left] == kept
    assert (await replay.stats()).dropped == {"evicted": 2}


async def test_eviction_by_priority_takes_the_lowest_and_of_equals_the_oldest(build_replay):
    replay = build_replay(staleness_policy="drop", max_groups=3, evict_by="prioritised")
    slots = [await put(replay, rewards=r) for r in ((0, 1), (1, 1), (0, 0), (0, 1), (0, 1))]
    left = await replay.group_ids()
    assert [slots.index(slot) for slot in slots if slot.slot_id in left] == [0, 3, 4]


async def test_eviction_makes_room_in_bytes(build_replay):
    replay = build_replay(staleness_policy="drop", max_bytes=1500)
    slots = [await put(replay) for _ in range(6)]
    stats = await replay.stats()
    assert stats.num_bytes <= 1500
    assert (await replay.group_ids())[-1] == slots[-1].slot_id
    assert stats.dropped["evicted"] == 6 - stats.num_ready


async def test_what_was_trained_makes_room_for_what_was_not(build_replay):
    replay = build_replay(max_draws=2, max_staleness=4, max_groups=2)
    await put(replay), await put(replay)
    await train(replay)
    slots = [await put(replay, 1), await put(replay, 1)]
    assert sorted(await replay.group_ids()) == sorted(slot.slot_id for slot in slots)
    assert (await replay.stats()).dropped == {}


@pytest.mark.parametrize(("evict_by", "kept"), [("fifo", 1), ("lifo", 0), ("prioritised", 0)])
async def test_of_those_that_were_trained_the_selector_says_which_makes_room(
    build_replay, evict_by, kept
):
    replay = build_replay(max_draws=2, max_staleness=4, max_groups=2, evict_by=evict_by)
    # The second group's rewards are equal, so its priority is the lowest.
    slots = [await put(replay, rewards=(0, 1)), await put(replay, rewards=(1, 1))]
    await train(replay)
    new = await put(replay, 1)
    assert set(await replay.group_ids()) == {slots[kept].slot_id, new.slot_id}


async def test_nothing_is_evicted_where_it_would_not_make_room(build_replay):
    replay = build_replay(staleness_policy="drop", max_bytes=2000)
    slots = await replay.admit(9, v(0), SOON_S)
    await replay.add(slots[0], build_group(slots[0]))
    with pytest.raises(WaitTimeout, match="bytes"):
        await replay.admit(1, v(0), SOON_S)
    assert (await replay.stats()).dropped == {}


async def test_a_draw_that_no_budget_can_hold_says_so(build_replay):
    replay = build_replay(staleness_policy="drop", groups_per_step=3, max_bytes=1000)
    for _ in range(6):
        await put(replay)
    with pytest.raises(
        WaitTimeout, match=r"a step of groups of up to \d+ bytes .* raise max_bytes"
    ):
        await replay.draw(SOON_S)


async def test_leased_groups_are_never_evicted(build_replay):
    replay = build_replay(staleness_policy="drop", max_groups=2)
    await put(replay), await put(replay)
    lease = await replay.draw(SOON_S)
    with pytest.raises(WaitTimeout, match="capacity"):
        await replay.admit(1, v(0), SOON_S)
    await replay.acknowledge(lease, v(1))


# --- who waits -----------------------------------------------------------------------------------


async def test_waits_are_seen_while_they_last(build_replay):
    replay = build_replay()
    learner = asyncio.create_task(replay.draw(AMPLE_S))
    await replay.pause_admission(True)
    rollout = asyncio.create_task(replay.admit(1, v(0), AMPLE_S))
    await asyncio.sleep(0.2)
    waits = {(wait.side, wait.reason): wait for wait in (await replay.stats()).waits}
    assert set(waits) == {("learner", "missing"), ("rollout", "paused")}
    assert all(isinstance(w, Waiting) and 0.1 < w.since_s < AMPLE_S for w in waits.values())
    await replay.pause_admission(False)
    for slot in [*await rollout, *await replay.admit(1, v(0), SOON_S)]:
        await replay.add(slot, build_group(slot))
    await learner
    assert (await replay.stats()).waits == ()


async def test_held_slots_and_leases_are_seen_with_their_ages(build_replay):
    replay = build_replay(slot_timeout_s=50, lease_timeout_s=70)
    await put(replay), await put(replay)
    slot = (await replay.admit(1, v(0), SOON_S))[0]
    lease = await replay.draw(SOON_S)
    await asyncio.sleep(0.05)
    stats = await replay.stats()
    assert [held.id for held in stats.slots] == [slot.slot_id]
    assert 49 < stats.slots[0].expires_in_s < 50 and stats.slots[0].since_s > 0.04
    assert [(held.id, held.num_groups) for held in stats.leases] == [(lease.lease_id, 2)]
    assert 69 < stats.leases[0].expires_in_s < 70


async def test_seconds_of_playing_and_training_are_summed(build_replay):
    replay = build_replay()
    started_s = time.monotonic()
    slots = await replay.admit(2, v(0), SOON_S)
    await asyncio.sleep(0.1)
    for slot in slots:
        await replay.add(slot, build_group(slot))
    added_s = time.monotonic()
    lease = await replay.draw(SOON_S)
    await asyncio.sleep(0.1)
    await replay.acknowledge(lease, v(1))
    trained_s = time.monotonic()
    stats = await replay.stats()
    # Milliseconds are counted whole, so each of the two slots may gain one.
    assert 0.2 <= stats.play_s <= 2 * (added_s - started_s) + 0.01
    assert 0.1 <= stats.train_s <= trained_s - added_s + 0.01
