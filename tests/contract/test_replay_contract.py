"""What every replay buffer does. Each test is one rule of store.py."""

from __future__ import annotations

import asyncio
import time

import msgspec
import numpy as np
import pytest

from leeway.replay import memory_store, redis_store
from leeway.replay.errors import (
    DataError,
    LeaseExpired,
    SlotExpired,
    StalenessViolation,
    WaitTimeout,
)
from leeway.replay.schema import Group, PolicyVersion
from leeway.replay.store import Lease, Replay, Slot
from leeway.replay.synthetic import build_group

SOON_S = 0.05
"""Deadline of a wait that is expected to fail."""
AMPLE_S = 5.0
"""Deadline of a wait that is expected to succeed."""


def v(version: int) -> PolicyVersion:
    return PolicyVersion(version)


async def fill(replay: Replay, n: int, version: int = 0) -> list[Slot]:
    """Admit exactly `n` groups at `version` and add them."""
    slots = await replay.admit(n, v(version), SOON_S)
    assert len(slots) == n
    for slot in slots:
        await replay.add(slot, build_group(slot))
    return slots


async def train(replay: Replay) -> Lease:
    """One step: draw, acknowledge as the next version."""
    lease = await replay.draw(SOON_S)
    await replay.acknowledge(lease, v(lease.version + 1))
    return lease


def ids(lease: Lease) -> set[str]:
    return {group.group_id for group in lease.groups}


# --- admission ---------------------------------------------------------------------------------


async def test_window_admits_two_steps_of_two_at_staleness_one(build_replay):
    replay = build_replay()
    assert len(await replay.admit(9, v(0), SOON_S)) == 4


async def test_window_refuses_the_fifth_and_says_its_numbers(build_replay):
    replay = build_replay()
    await replay.admit(4, v(0), SOON_S)
    with pytest.raises(WaitTimeout, match=r"\(window\).*4 groups from version 0.*by version 1"):
        await replay.admit(1, v(0), SOON_S)


@pytest.mark.parametrize("timeout_s", [0.0, SOON_S])
async def test_no_slots_cannot_be_asked_for(build_replay, timeout_s):
    with pytest.raises(DataError, match="n of at least 1, not 0"):
        await build_replay().admit(0, v(0), timeout_s)


async def test_older_engine_has_a_smaller_window(build_replay):
    replay = build_replay()
    await fill(replay, 2)
    await train(replay)
    # Learner at 1. Version 0 has deadline 1, so one step of 2; version 1 has deadline 2, so 4.
    assert len(await replay.admit(9, v(0), SOON_S)) == 2
    assert len(await replay.admit(9, v(1), SOON_S)) == 2


async def test_on_policy_admits_one_step_and_the_next_after_training(build_replay):
    replay = build_replay(max_staleness=0)
    await fill(replay, 2)
    with pytest.raises(WaitTimeout, match="window"):
        await replay.admit(1, v(0), SOON_S)
    await train(replay)
    assert len(await replay.admit(9, v(1), SOON_S)) == 2


async def test_engine_behind_is_refused_by_name(build_replay):
    replay = build_replay(max_staleness=0)
    await fill(replay, 2)
    await train(replay)
    with pytest.raises(WaitTimeout, match=r"engine-behind.*version 0.*learner is at 1"):
        await replay.admit(1, v(0), SOON_S)


async def test_capacity_counts_slots_buffered_and_leased(build_replay):
    replay = build_replay(max_groups=4, max_staleness=3)
    await fill(replay, 3)
    await replay.draw(SOON_S)
    assert len(await replay.admit(9, v(0), SOON_S)) == 1
    with pytest.raises(WaitTimeout, match=r"capacity.*4 of max_groups 4"):
        await replay.admit(1, v(0), SOON_S)


async def test_admission_with_a_lease_in_hand_counts_the_step_as_taken(build_replay):
    replay = build_replay()
    await fill(replay, 2)
    lease = await replay.draw(SOON_S)
    # The step at 0 is taken; only the one at 1 is left before the deadline of version 0.
    assert len(await replay.admit(9, v(0), SOON_S)) == 2
    await replay.acknowledge(lease, v(1))


async def slow_learner(build_replay) -> Replay:
    """Nine draws of 2 from a window of 8; each step ends with 6 ready, and the next draw leaves 4.
    So 6 - 4 are needed, and half a group makes 3. The learner is at 9, 4 groups are ready."""
    replay = build_replay(max_staleness=3, lookahead="adaptive", max_groups=20)
    await fill(replay, 8)
    for version in range(9):
        lease = await replay.draw(SOON_S)
        if 0 < version < 8:
            await fill(replay, 2, version)
        await replay.acknowledge(lease, v(version + 1))
    assert (await replay.stats()).num_held_back == 5
    return replay


async def test_an_adaptive_lookahead_admits_what_draws_have_needed(build_replay):
    replay = await slow_learner(build_replay)
    with pytest.raises(WaitTimeout, match=r"\(lookahead\): 2 groups .*holds 5 of the window's"):
        await replay.admit(1, v(9), SOON_S)
    waiting = asyncio.create_task(replay.admit(9, v(9), AMPLE_S))
    await asyncio.sleep(SOON_S)
    assert not waiting.done(), "4 are outstanding"
    # Who waits hears of the draw, and need not wait for its end.
    lease = await replay.draw(SOON_S)
    assert len(await waiting) == 1
    await replay.acknowledge(lease, v(10))


async def test_what_a_draw_lacks_may_be_admitted_at_once(build_replay):
    replay = await slow_learner(build_replay)
    await train(replay)
    await train(replay)
    # A worker takes all slots and dies; until they expire, nobody fills them.
    await replay.admit(3, v(11), SOON_S)
    waiting = asyncio.create_task(replay.admit(2, v(11), AMPLE_S))
    drawing = asyncio.create_task(replay.draw(AMPLE_S))
    slots = await waiting
    assert len(slots) == 2
    assert (await replay.stats()).num_held_back == 3
    for slot in slots:
        await replay.add(slot, build_group(slot))
    assert ids(await drawing) == {slot.slot_id for slot in slots}
    assert (await replay.stats()).num_held_back == 3, "given back once"


async def test_a_draw_that_is_handed_back_tells_nothing_new(build_replay):
    replay = build_replay(max_staleness=8, lookahead="adaptive", max_groups=20)
    await fill(replay, 10)
    await train(replay)
    held_back = (await replay.stats()).num_held_back
    for _ in range(12):
        await replay.release(await replay.draw(SOON_S))
    assert (await replay.stats()).num_held_back == held_back


async def test_a_full_lookahead_holds_nothing_back(build_replay):
    replay = build_replay(max_staleness=3, max_groups=20, lookahead="full")
    await fill(replay, 8)
    for version in range(12):
        await train(replay)
        await fill(replay, 2, version + 1)
    assert (await replay.stats()).num_held_back == 0


async def test_waiting_admission_is_granted_when_the_learner_trains(build_replay):
    replay = build_replay(max_groups=2)
    await fill(replay, 2)
    waiting = asyncio.create_task(replay.admit(1, v(0), AMPLE_S))
    await asyncio.sleep(SOON_S)
    await train(replay)
    assert len(await waiting) == 1


async def test_waiting_admission_follows_its_version_source(build_replay):
    replay = build_replay(max_staleness=0)
    engine = {"version": v(0)}

    async def oldest_version() -> PolicyVersion:
        return engine["version"]

    await fill(replay, 2)
    waiting = asyncio.create_task(replay.admit(1, oldest_version, AMPLE_S))
    await train(replay)
    await asyncio.sleep(SOON_S)
    assert not waiting.done()  # the learner is at 1, the engines still at 0
    engine["version"] = v(1)
    assert (await waiting)[0].version == 1


async def test_no_living_engine_is_refused_by_name(build_replay):
    async def nobody() -> None:
        return None

    with pytest.raises(WaitTimeout, match=r"engine-behind.*no engine lives"):
        await build_replay().admit(1, nobody, SOON_S)


async def test_waiting_admission_wakes_when_a_slot_is_dropped(build_replay):
    replay = build_replay()
    slots = await replay.admit(4, v(0), SOON_S)
    waiting = asyncio.create_task(replay.admit(1, v(0), AMPLE_S))
    await asyncio.sleep(SOON_S)
    await replay.drop(slots[0], "retriever")
    started = time.monotonic()
    assert len(await waiting) == 1
    assert time.monotonic() - started < 1.0


async def test_waiting_admission_wakes_when_a_slot_expires(build_replay):
    replay = build_replay(slot_timeout_s=0.2)
    await replay.admit(4, v(0), SOON_S)
    started = time.monotonic()
    assert len(await replay.admit(4, v(0), AMPLE_S)) == 4
    assert 0.1 < time.monotonic() - started < 1.0


async def test_many_workers_share_the_window(build_replay):
    replay = build_replay(max_staleness=3)
    tries = [replay.admit(1, v(0), SOON_S) for _ in range(20)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(result, list) for result in results) == 8
    assert sum(isinstance(result, WaitTimeout) for result in results) == 12


async def test_pause_refuses_admission_and_resume_grants_it(build_replay):
    replay = build_replay()
    await replay.pause_admission(True)
    with pytest.raises(WaitTimeout, match="paused"):
        await replay.admit(1, v(0), SOON_S)
    assert (await replay.stats()).admission_paused
    waiting = asyncio.create_task(replay.admit(1, v(0), AMPLE_S))
    await asyncio.sleep(SOON_S)
    await replay.pause_admission(False)
    assert len(await waiting) == 1


async def test_pause_tells_waiting_callers_at_once(build_replay):
    replay = build_replay()
    await replay.admit(4, v(0), SOON_S)
    waiting = asyncio.create_task(replay.admit(1, v(0), AMPLE_S))
    await asyncio.sleep(SOON_S)
    started = time.monotonic()
    await replay.pause_admission(True)
    with pytest.raises(WaitTimeout, match="paused"):
        await waiting
    assert time.monotonic() - started < 1.0


# --- slots -------------------------------------------------------------------------------------


async def test_drop_gives_the_slot_back_and_counts_the_reason_once(build_replay):
    replay = build_replay()
    slots = await replay.admit(4, v(0), SOON_S)
    await replay.drop(slots[0], "retriever")
    await replay.drop(slots[0], "retriever")
    stats = await replay.stats()
    assert (stats.num_slots, stats.dropped, stats.outstanding) == (3, {"retriever": 1}, {0: 3})
    assert len(await replay.admit(9, v(0), SOON_S)) == 1


async def test_expired_slot_is_freed_counted_and_refused(build_replay):
    replay = build_replay(slot_timeout_s=0.1)
    slot = (await replay.admit(1, v(0), SOON_S))[0]
    await asyncio.sleep(0.15)
    with pytest.raises(SlotExpired, match="slot_timeout_s"):
        await replay.add(slot, build_group(slot))
    stats = await replay.stats()
    assert (stats.num_slots, stats.num_slots_expired, stats.outstanding) == (0, 1, {})


async def test_add_is_idempotent_by_group_id(build_replay):
    replay = build_replay()
    slot = (await replay.admit(1, v(0), SOON_S))[0]
    await replay.add(slot, build_group(slot))
    await replay.add(slot, build_group(slot))
    stats = await replay.stats()
    assert (stats.num_ready, stats.num_added) == (1, 1)


async def test_add_after_training_does_not_bring_the_group_back(build_replay):
    replay = build_replay()
    slots = await fill(replay, 2)
    await train(replay)
    await replay.add(slots[0], build_group(slots[0]))
    assert (await replay.stats()).num_ready == 0


async def test_drop_after_add_changes_nothing(build_replay):
    replay = build_replay()
    slots = await fill(replay, 1)
    await replay.drop(slots[0], "late")
    stats = await replay.stats()
    assert (stats.num_ready, stats.dropped) == (1, {})


async def test_group_comes_back_as_it_was_added(build_replay):
    replay = build_replay(groups_per_step=1)
    slot = (await replay.admit(1, v(0), SOON_S))[0]
    group = build_group(slot, num_trajectories=3, num_tokens=40)
    await replay.add(slot, group)
    drawn = (await replay.draw(SOON_S)).groups[0]
    assert (drawn.group_id, drawn.question_id) == (group.group_id, group.question_id)
    for got, sent in zip(drawn.trajectories, group.trajectories, strict=True):
        np.testing.assert_array_equal(got.token_ids, sent.token_ids)
        np.testing.assert_array_equal(got.logprobs, sent.logprobs)
        np.testing.assert_array_equal(got.versions, sent.versions)
        assert (got.turns, got.scores, got.reward) == (sent.turns, sent.scores, sent.reward)


def with_logprob(group: Group, value: float) -> Group:
    first = group.trajectories[0]
    logprobs = first.logprobs.copy()
    logprobs[2] = value
    changed = msgspec.structs.replace(first, logprobs=logprobs)
    return msgspec.structs.replace(group, trajectories=(changed, *group.trajectories[1:]))


async def test_non_finite_logprob_is_refused_and_the_slot_kept(build_replay):
    replay = build_replay()
    slot = (await replay.admit(1, v(0), SOON_S))[0]
    with pytest.raises(DataError, match="log-prob of generated token 2 is nan"):
        await replay.add(slot, with_logprob(build_group(slot), float("nan")))
    assert (await replay.stats()).num_slots == 1


async def test_group_under_another_id_is_refused(build_replay):
    replay = build_replay()
    first, second = await replay.admit(2, v(0), SOON_S)
    with pytest.raises(DataError, match="ids must agree"):
        await replay.add(first, build_group(second))


async def test_tokens_older_than_the_slot_are_refused(build_replay):
    replay = build_replay()
    slot = (await replay.admit(1, v(1), SOON_S))[0]
    with pytest.raises(DataError, match="tokens of version 0, older than version 1"):
        await replay.add(slot, build_group(slot, version=0))


# --- drawing -----------------------------------------------------------------------------------


async def test_draw_takes_the_earliest_deadlines_first(build_replay):
    replay = build_replay(max_staleness=3)
    late = await fill(replay, 2, version=1)
    early = await fill(replay, 2, version=0)
    assert ids(await replay.draw(SOON_S)) == {slot.slot_id for slot in early}
    assert ids(await replay.draw(SOON_S)) == {slot.slot_id for slot in late}


async def test_draw_waits_for_a_full_step_and_names_the_slots(build_replay):
    replay = build_replay()
    await fill(replay, 1)
    playing = (await replay.admit(1, v(0), SOON_S))[0]
    with pytest.raises(WaitTimeout, match=f"1 are ready.*being played.*{playing.slot_id}"):
        await replay.draw(SOON_S)


async def test_draw_from_an_idle_buffer_says_that_nobody_plays(build_replay):
    with pytest.raises(WaitTimeout, match="0 are ready and none is being played"):
        await build_replay().draw(SOON_S)


async def test_draw_wakes_when_the_step_is_full(build_replay):
    replay = build_replay()
    waiting = asyncio.create_task(replay.draw(AMPLE_S))
    await asyncio.sleep(SOON_S)
    slots = await fill(replay, 2)
    assert ids(await waiting) == {slot.slot_id for slot in slots}


async def slow_slot_scene(replay: Replay) -> Slot:
    """Learner at 1; one group from version 0 (deadline 1) is still played, two from 1 are ready."""
    await fill(replay, 2)
    slow = (await replay.admit(1, v(0), SOON_S))[0]
    await train(replay)
    await fill(replay, 2, version=1)
    return slow


async def test_slow_slot_is_waited_for_rather_than_overtaken_past_its_deadline(build_replay):
    replay = build_replay()
    slow = await slow_slot_scene(replay)
    with pytest.raises(
        WaitTimeout, match=f"1 group from version 0 .*must be in this step.*{slow.slot_id}"
    ):
        await replay.draw(SOON_S)
    waiting = asyncio.create_task(replay.draw(AMPLE_S))
    await asyncio.sleep(SOON_S)
    await replay.add(slow, build_group(slow))
    assert slow.slot_id in ids(await waiting)


async def test_lease_says_how_long_its_draw_waited_and_for_what(build_replay):
    replay = build_replay()
    slow = await slow_slot_scene(replay)
    with pytest.raises(WaitTimeout) as timeout:
        await replay.draw(SOON_S)
    assert set(timeout.value.waited_s) == {"blocked"}
    waiting = asyncio.create_task(replay.draw(AMPLE_S))
    await asyncio.sleep(SOON_S)
    await replay.add(slow, build_group(slow))
    lease = await waiting
    assert set(lease.waited_s) == {"blocked"}
    assert SOON_S / 2 < lease.waited_s["blocked"] < AMPLE_S
    await replay.acknowledge(lease, v(2))
    with pytest.raises(WaitTimeout) as timeout:
        await replay.draw(SOON_S)
    assert set(timeout.value.waited_s) == {"missing"}
    await fill(replay, 2, version=2)
    assert (await replay.draw(SOON_S)).waited_s == {}


async def test_slow_slot_no_longer_blocks_once_dropped(build_replay):
    replay = build_replay()
    slow = await slow_slot_scene(replay)
    await replay.drop(slow, "retriever")
    assert len((await replay.draw(SOON_S)).groups) == 2


async def test_slow_slot_no_longer_blocks_once_expired(build_replay):
    replay = build_replay(slot_timeout_s=0.3)
    slow = await slow_slot_scene(replay)
    started = time.monotonic()
    assert slow.slot_id not in ids(await replay.draw(AMPLE_S))
    assert time.monotonic() - started < 1.0


async def test_slow_slot_is_overtaken_while_a_later_step_can_take_it(build_replay):
    replay = build_replay()
    await replay.admit(1, v(0), SOON_S)
    await fill(replay, 2)
    assert len((await replay.draw(SOON_S)).groups) == 2


async def test_draws_with_leases_in_hand_are_for_the_versions_after(build_replay):
    replay = build_replay()
    await fill(replay, 4)
    first, second = await replay.draw(SOON_S), await replay.draw(SOON_S)
    assert (first.version, second.version) == (0, 1)
    assert not ids(first) & ids(second)


async def test_staleness_is_asserted_on_the_tokens_that_are_drawn(build_replay, monkeypatch):
    for store in (memory_store, redis_store):
        monkeypatch.setattr(store, "check_fills", lambda *_: None)
    replay = build_replay(max_staleness=0)
    await fill(replay, 2)
    await train(replay)
    for slot in await replay.admit(2, v(1), SOON_S):
        await replay.add(slot, build_group(slot, version=0))  # tagged wrongly, past the first check
    with pytest.raises(StalenessViolation, match="trained at 1: staleness 1 > max_staleness 0"):
        await replay.draw(SOON_S)


async def test_overdue_groups_are_dropped_and_counted_never_drawn(build_replay):
    replay = build_replay()
    await fill(replay, 2)
    await replay.restore_version(v(2))
    fresh = await fill(replay, 2, version=2)
    assert ids(await replay.draw(SOON_S)) == {slot.slot_id for slot in fresh}
    assert (await replay.stats()).dropped == {"overdue": 2}


# --- exact staleness ---------------------------------------------------------------------------


def lags(lease: Lease) -> list[int]:
    return [lease.version - group.oldest_version for group in lease.groups]


async def exact_steps(replay: Replay, num_steps: int) -> list[list[int]]:
    """Fill the window at the learner's version, train, and so on; the lags of each draw."""
    seen: list[list[int]] = []
    for _ in range(num_steps):
        learner = (await replay.stats()).learner_version
        for slot in await replay.admit(99, learner, SOON_S):
            await replay.add(slot, build_group(slot))
        seen.append(lags(await train(replay)))
    return seen


async def test_exact_lags_are_0_then_1_ever_after_at_staleness_one(build_replay):
    assert await exact_steps(build_replay(staleness_policy="exact"), 5) == [[0, 0], *[[1, 1]] * 4]


async def test_exact_lags_rise_to_three_and_stay_there(build_replay):
    replay = build_replay(staleness_policy="exact", max_staleness=3, groups_per_step=1)
    assert await exact_steps(replay, 7) == [[0], [1], [2], [3], [3], [3], [3]]


async def test_exact_at_staleness_0_is_on_policy(build_replay):
    replay = build_replay(staleness_policy="exact", max_staleness=0)
    assert await exact_steps(replay, 3) == [[0, 0]] * 3


async def test_exact_admits_four_at_the_start_and_refuses_the_fifth(build_replay):
    replay = build_replay(staleness_policy="exact")
    assert len(await replay.admit(9, v(0), SOON_S)) == 4
    with pytest.raises(
        WaitTimeout, match=r"\(window\).*= 4 groups, and 4 groups from version 0 are outstanding"
    ):
        await replay.admit(1, v(0), SOON_S)


async def test_exact_admits_one_step_more_at_the_new_version_after_each_step(build_replay):
    replay = build_replay(staleness_policy="exact")
    await exact_steps(replay, 1)
    assert [slot.version for slot in await replay.admit(9, v(1), SOON_S)] == [1, 1]


async def test_exact_refuses_an_engine_at_another_version_by_name(build_replay):
    replay = build_replay(staleness_policy="exact")
    await exact_steps(replay, 1)
    for version in (0, 2):
        words = rf"engine-behind.*at version {version} and the learner at 1, .*while they are equal"
        with pytest.raises(WaitTimeout, match=words):
            await replay.admit(1, v(version), SOON_S)


async def test_exact_draw_waits_for_the_whole_window_and_says_what_is_missing(build_replay):
    replay = build_replay(staleness_policy="exact")
    slots = await replay.admit(4, v(0), SOON_S)
    for slot in slots[:3]:
        await replay.add(slot, build_group(slot))
    with pytest.raises(
        WaitTimeout,
        match="wants all 4 groups of the window ready, 3 are, 1 group from version 0 are being "
        f"played .slots {slots[3].slot_id}",
    ):
        await replay.draw(SOON_S)
    waiting = asyncio.create_task(replay.draw(AMPLE_S))
    await asyncio.sleep(SOON_S)
    await replay.add(slots[3], build_group(slots[3]))
    assert ids(await waiting) == {slot.slot_id for slot in slots[:2]}


async def test_exact_draw_says_that_nobody_plays(build_replay):
    replay = build_replay(staleness_policy="exact")
    await fill(replay, 3)
    with pytest.raises(WaitTimeout, match="window ready, 3 are and none is being played"):
        await replay.draw(SOON_S)


async def test_exact_draw_goes_ahead_when_another_group_took_the_place_of_a_dropped_one(
    build_replay,
):
    replay = build_replay(staleness_policy="exact")
    dropped = (await replay.admit(1, v(0), SOON_S))[0]
    await fill(replay, 3)
    await replay.drop(dropped, "retriever")
    waiting = asyncio.create_task(replay.draw(AMPLE_S))
    await fill(replay, 1)
    assert lags(await waiting) == [0, 0]


async def test_exact_with_a_lease_in_hand_neither_admits_nor_draws(build_replay):
    replay = build_replay(staleness_policy="exact")
    await exact_steps(replay, 2)
    await fill(replay, 2, version=2)
    lease = await replay.draw(SOON_S)
    with pytest.raises(WaitTimeout, match="window ready, 2 are and none is being played"):
        await replay.draw(SOON_S)
    with pytest.raises(WaitTimeout, match=r"\(window\).*the learner trains at version 2"):
        await replay.admit(1, v(2), SOON_S)
    with pytest.raises(WaitTimeout, match="engine-behind"):  # published, not yet acknowledged
        await replay.admit(1, v(3), SOON_S)
    await replay.acknowledge(lease, v(3))
    assert len(await replay.admit(9, v(3), SOON_S)) == 2


async def test_exact_admits_nothing_during_a_step_even_where_there_is_room(build_replay):
    replay = build_replay(staleness_policy="exact")
    await fill(replay, 4)
    await replay.restore_version(v(1))
    lease = await replay.draw(SOON_S)
    with pytest.raises(WaitTimeout, match="0 are"):
        await replay.draw(SOON_S)  # for version 2, where the 2 others are overdue
    with pytest.raises(WaitTimeout, match=r"\(window\).*the learner trains at version 1"):
        await replay.admit(1, v(1), SOON_S)
    await replay.acknowledge(lease, v(2))
    assert len(await replay.admit(9, v(2), SOON_S)) == 4


async def test_exact_drops_a_buffered_group_that_is_not_of_its_slots_version(
    build_replay, monkeypatch
):
    for store in (memory_store, redis_store):
        monkeypatch.setattr(store, "check_fills", lambda *_: None)  # as if added under pace
    replay = build_replay(staleness_policy="exact")
    slot = (await replay.admit(1, v(0), SOON_S))[0]
    await replay.add(slot, build_group(slot, version=1))
    await fill(replay, 3)
    with pytest.raises(WaitTimeout, match="window ready, 3 are"):
        await replay.draw(SOON_S)
    assert (await replay.stats()).dropped == {"mixed-versions": 1}
    assert await exact_steps(replay, 2) == [[0, 0], [1, 1]]


async def test_exact_refuses_a_group_that_saw_weights_change(build_replay):
    replay = build_replay(staleness_policy="exact")
    slot = (await replay.admit(1, v(0), SOON_S))[0]
    with pytest.raises(DataError, match="tokens of version 1, newer than version 0"):
        await replay.add(slot, build_group(slot, version=1))
    assert (await replay.stats()).num_slots == 1


async def test_exact_asserts_one_version_per_group_on_the_tokens_that_are_drawn(
    build_replay, monkeypatch
):
    for store in (memory_store, redis_store):
        monkeypatch.setattr(store, "check_fills", lambda *_: None)
    replay = build_replay(staleness_policy="exact")
    await replay.restore_version(v(1))
    for slot in await replay.admit(4, v(1), SOON_S):
        old, new = build_group(slot, version=0), build_group(slot, version=1)
        mixed = msgspec.structs.replace(new, trajectories=old.trajectories + new.trajectories)
        await replay.add(slot, mixed)
    with pytest.raises(StalenessViolation, match="versions 0 to 1; under exact"):
        await replay.draw(SOON_S)


async def test_exact_restored_at_the_same_version_has_no_ramp(build_replay):
    replay = build_replay(staleness_policy="exact")
    await exact_steps(replay, 2)
    await fill(replay, 2, version=2)
    await replay.draw(SOON_S)
    assert await replay.restore_version(v(2)) == 0
    assert lags(await train(replay)) == [1, 1]
    assert await exact_steps(replay, 2) == [[1, 1]] * 2


async def test_exact_restored_behind_refills_the_window_and_begins_the_ramp_anew(build_replay):
    replay = build_replay(staleness_policy="exact", max_staleness=2)
    await exact_steps(replay, 5)
    await fill(replay, 2, version=5)
    # 2 groups each from 3, 4 and 5. Back at 4, those from 5 go and 2 from 4 take their place.
    assert await replay.restore_version(v(4)) == 2
    assert await exact_steps(replay, 5) == [[1, 1], [1, 1], [2, 2], [2, 2], [2, 2]]


async def test_exact_restored_far_ahead_drops_what_is_overdue_and_fills_again(build_replay):
    replay = build_replay(staleness_policy="exact")
    await exact_steps(replay, 3)
    await fill(replay, 2, version=3)
    await replay.restore_version(v(6))
    with pytest.raises(WaitTimeout, match="window ready, 0 are"):
        await replay.draw(SOON_S)
    assert (await replay.stats()).dropped == {"overdue": 4}
    assert await exact_steps(replay, 3) == [[0, 0], [1, 1], [1, 1]]


async def test_exact_slot_held_across_a_restore_is_waited_for_and_its_end_makes_room(build_replay):
    replay = build_replay(staleness_policy="exact")
    await exact_steps(replay, 2)
    held, other = await replay.admit(2, v(2), SOON_S)
    await replay.add(other, build_group(other))
    await replay.restore_version(v(2))
    with pytest.raises(WaitTimeout, match="3 are, 1 group from version 2 are being played"):
        await replay.draw(SOON_S)
    await replay.drop(held, "retriever")
    assert await exact_steps(replay, 3) == [[1, 1]] * 3


async def test_exact_deadline_missed_after_a_restore_ahead_ends_in_a_drop_not_a_deadlock(
    build_replay,
):
    replay = build_replay(staleness_policy="exact")
    await fill(replay, 4)
    await replay.restore_version(v(1))
    # All 4 have deadline 1, a step takes 2: the others are overdue at 2, and the ramp begins there.
    assert lags(await train(replay)) == [1, 1]
    await fill(replay, 2, version=2)
    with pytest.raises(WaitTimeout, match="window ready, 2 are"):
        await replay.draw(SOON_S)
    assert (await replay.stats()).dropped == {"overdue": 2}
    assert await exact_steps(replay, 3) == [[0, 0], [1, 1], [1, 1]]


async def test_exact_ramp_begins_anew_where_ready_groups_are_dropped(build_replay):
    replay = build_replay(staleness_policy="exact", max_returns=0)
    await exact_steps(replay, 2)
    await fill(replay, 2, version=2)
    await replay.release(await replay.draw(SOON_S))
    with pytest.raises(WaitTimeout, match="window ready, 2 are"):
        await replay.draw(SOON_S)
    assert (await replay.stats()).dropped == {"returned": 2}
    assert await exact_steps(replay, 3) == [[0, 0], [1, 1], [1, 1]]


# --- leases ------------------------------------------------------------------------------------


async def test_acknowledge_moves_the_version_and_forgets_the_bytes(build_replay):
    replay = build_replay()
    await fill(replay, 3)
    before = (await replay.stats()).num_bytes
    await train(replay)
    stats = await replay.stats()
    assert (stats.learner_version, stats.num_trained, stats.num_leased) == (1, 2, 0)
    assert stats.num_bytes == before // 3
    assert len(await replay.group_ids()) == 1


async def test_acknowledge_is_idempotent(build_replay):
    replay = build_replay()
    await fill(replay, 2)
    lease = await train(replay)
    await replay.acknowledge(lease, v(1))
    assert (await replay.stats()).num_trained == 2


async def test_expired_lease_returns_its_groups_and_refuses_the_acknowledgement(build_replay):
    replay = build_replay(lease_timeout_s=0.1)
    slots = await fill(replay, 2)
    lease = await replay.draw(SOON_S)
    await asyncio.sleep(0.15)
    with pytest.raises(LeaseExpired, match="lease_timeout_s"):
        await replay.acknowledge(lease, v(1))
    stats = await replay.stats()
    assert (stats.num_ready, stats.num_leased, stats.num_leases_expired) == (2, 0, 1)
    assert ids(await replay.draw(SOON_S)) == {slot.slot_id for slot in slots}


async def test_waiting_draw_wakes_when_a_lease_expires(build_replay):
    replay = build_replay(lease_timeout_s=0.2)
    await fill(replay, 2)
    await replay.draw(SOON_S)
    started = time.monotonic()
    assert len((await replay.draw(AMPLE_S)).groups) == 2
    assert time.monotonic() - started < 1.0


async def test_release_hands_the_groups_back(build_replay):
    replay = build_replay()
    await fill(replay, 2)
    lease = await replay.draw(SOON_S)
    await replay.release(lease)
    await replay.release(lease)
    assert ids(await replay.draw(SOON_S)) == ids(lease)


async def test_a_group_that_comes_back_too_often_is_dropped(build_replay):
    replay = build_replay(max_returns=1)
    await fill(replay, 2)
    for _ in range(2):
        await replay.release(await replay.draw(SOON_S))
    with pytest.raises(WaitTimeout):
        await replay.draw(SOON_S)
    stats = await replay.stats()
    assert (stats.num_drawn, stats.num_ready, stats.dropped) == (4, 0, {"returned": 2})
    assert stats.num_bytes == 0


async def test_dropping_what_came_back_makes_room_for_a_waiting_admission(build_replay):
    replay = build_replay(max_returns=0)
    await fill(replay, 4)
    waiting = asyncio.create_task(replay.admit(1, v(0), AMPLE_S))
    await replay.release(await replay.draw(SOON_S))
    assert len(await waiting) == 1


async def test_a_group_is_trained_max_draws_times_and_then_forgotten(build_replay):
    replay = build_replay(max_draws=2, max_staleness=3)
    await fill(replay, 2)
    first, second = await train(replay), await train(replay)
    assert ids(first) == ids(second)
    stats = await replay.stats()
    assert (stats.num_trained, stats.num_ready, stats.num_bytes) == (4, 0, 0)
    assert stats.dropped == {}
    with pytest.raises(WaitTimeout, match="0 are ready"):
        await replay.draw(SOON_S)


async def test_a_trained_group_too_old_for_another_step_is_forgotten_not_dropped(build_replay):
    replay = build_replay(max_draws=9, max_staleness=1)
    await fill(replay, 2)
    await train(replay), await train(replay)
    stats = await replay.stats()
    assert (stats.num_trained, stats.num_ready, stats.dropped) == (4, 0, {})


async def test_a_trained_group_owes_nothing_and_leaves_the_window_to_others(build_replay):
    replay = build_replay(max_draws=2, max_staleness=1)
    await fill(replay, 2)
    await train(replay)
    # Trained ones stand ready, and the window of four at version 1 is free all the same.
    await fill(replay, 4, version=1)
    assert (await replay.stats()).num_ready == 6


async def test_returning_a_lease_does_not_count_as_training(build_replay):
    replay = build_replay(max_draws=1)
    await fill(replay, 2)
    await replay.release(await replay.draw(SOON_S))
    assert len((await train(replay)).groups) == 2


# --- restore and stats -------------------------------------------------------------------------


async def test_restore_returns_leases_and_drops_what_lost_versions_sampled(build_replay):
    replay = build_replay(max_staleness=3)
    kept = await fill(replay, 2, version=0)
    lost = (await replay.admit(1, v(0), SOON_S))[0]
    await replay.add(lost, build_group(lost, version=2))
    await replay.draw(SOON_S)
    assert await replay.restore_version(v(1)) == 1
    stats = await replay.stats()
    assert (stats.learner_version, stats.num_leased, stats.dropped) == (1, 0, {"lost-version": 1})
    assert set(await replay.group_ids()) == {slot.slot_id for slot in kept}


async def test_slot_held_across_a_restore_may_not_bring_lost_tokens(build_replay):
    replay = build_replay(max_staleness=3)
    slot, other = await replay.admit(2, v(0), SOON_S)
    await replay.restore_version(v(1))
    await replay.add(slot, build_group(slot, version=2))
    await replay.add(other, build_group(other, version=1))
    stats = await replay.stats()
    assert (stats.num_ready, stats.num_slots, stats.dropped) == (1, 0, {"lost-version": 1})


async def test_a_second_restore_does_not_bring_lost_versions_back(build_replay):
    replay = build_replay(max_staleness=3)
    slot = (await replay.admit(1, v(0), SOON_S))[0]
    await replay.restore_version(v(1))
    await replay.restore_version(v(3))
    await replay.add(slot, build_group(slot, version=2))
    assert (await replay.stats()).dropped == {"lost-version": 1}


async def test_stats_count_waiting_of_workers_and_of_the_learner(build_replay):
    replay = build_replay()
    await replay.admit(4, v(0), SOON_S)
    for waiting in (replay.admit(1, v(0), 0.1), replay.draw(0.2)):
        with pytest.raises(WaitTimeout):
            await waiting
    stats = await replay.stats()
    assert 0.1 <= stats.wait_room_s < 0.19
    assert 0.2 <= stats.wait_data_s < 0.4


async def test_outstanding_counts_slots_buffered_and_leased_by_version(build_replay):
    replay = build_replay(max_staleness=3)
    await fill(replay, 3, version=0)
    await replay.draw(SOON_S)
    await replay.admit(2, v(1), SOON_S)
    stats = await replay.stats()
    assert stats.outstanding == {0: 3, 1: 2}
    assert (stats.num_slots, stats.num_ready, stats.num_leased) == (2, 1, 2)
