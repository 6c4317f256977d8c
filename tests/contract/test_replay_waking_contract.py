"""Who waits is woken by whatever lets it go on, and is seen no longer than it waits.

Slots and leases last for minutes here, and a caller of Redis asks again after five seconds: what
goes on within one second was woken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

import pytest

from leeway.replay.errors import WaitTimeout
from leeway.replay.store import Replay, Slot
from leeway.replay.synthetic import build_group
from tests.contract.replay_calls import AMPLE_S, SOON_S, put, train, v

T = TypeVar("T")


async def blocked(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """The call, once it waits."""
    task = asyncio.create_task(call)
    await asyncio.sleep(SOON_S)
    assert not task.done()
    return task


async def woken(waiting: Awaitable[T]) -> T:
    return await asyncio.wait_for(waiting, 1.0)


async def slow_slot(replay: Replay) -> Slot:
    """Learner at 1; one group from version 0 (deadline 1) is still played, two from 1 are ready,
    and the draw waits for the slow one."""
    await put(replay), await put(replay)
    (slow,) = await replay.admit(1, v(0), SOON_S)
    await train(replay)
    await put(replay, 1), await put(replay, 1)
    return slow


async def test_a_blocked_admission_goes_on_when_the_version_is_restored_to_its_engines(
    build_replay,
):
    replay = build_replay()
    await replay.restore_version(v(5))
    waiting = await blocked(replay.admit(1, v(1), AMPLE_S))  # engines at 1 are behind
    await replay.restore_version(v(1))
    assert len(await woken(waiting)) == 1


async def test_a_blocked_admission_goes_on_when_a_restore_drops_what_filled_the_buffer(
    build_replay,
):
    replay = build_replay(max_groups=2)
    for slot in await replay.admit(2, v(0), SOON_S):
        await replay.add(slot, build_group(slot, version=1))
    waiting = await blocked(replay.admit(2, v(0), AMPLE_S))
    assert await replay.restore_version(v(0)) == 2
    assert len(await woken(waiting)) == 2


async def test_a_blocked_draw_goes_on_when_a_restore_leaves_the_slow_slot_behind(build_replay):
    replay = build_replay()
    await slow_slot(replay)
    waiting = await blocked(replay.draw(AMPLE_S))
    # At 2 no step may train what version 0 sampled, so nobody waits for it any more.
    assert await replay.restore_version(v(2)) == 0
    assert (await woken(waiting)).version == 2


async def test_a_blocked_draw_goes_on_when_a_restore_returns_the_lease_of_another(build_replay):
    replay = build_replay()
    await put(replay), await put(replay)
    await replay.draw(SOON_S)
    waiting = await blocked(replay.draw(AMPLE_S))
    await replay.restore_version(v(0))
    assert (await woken(waiting)).version == 0


async def test_a_blocked_draw_goes_on_when_another_lease_is_released(build_replay):
    replay = build_replay()
    await put(replay), await put(replay)
    lease = await replay.draw(SOON_S)
    waiting = await blocked(replay.draw(AMPLE_S))
    await replay.release(lease)
    groups = (await woken(waiting)).groups
    assert {group.group_id for group in groups} == {group.group_id for group in lease.groups}


async def test_a_blocked_draw_goes_on_when_the_slot_it_waits_for_is_dropped(build_replay):
    replay = build_replay()
    slow = await slow_slot(replay)
    waiting = await blocked(replay.draw(AMPLE_S))
    await replay.drop(slow, "retriever")
    assert len((await woken(waiting)).groups) == 2


async def test_a_blocked_admission_goes_on_when_a_released_lease_can_make_room(build_replay):
    replay = build_replay(staleness_policy="drop", max_groups=2)
    await put(replay), await put(replay)
    lease = await replay.draw(SOON_S)
    waiting = await blocked(replay.admit(1, v(0), AMPLE_S))  # what is leased is never evicted
    await replay.release(lease)
    assert len(await woken(waiting)) == 1
    assert (await replay.stats()).dropped == {"evicted": 1}


async def test_a_blocked_admission_goes_on_when_a_draw_in_vain_drops_what_is_overdue(build_replay):
    replay = build_replay(max_groups=2)
    await put(replay), await put(replay)
    await replay.restore_version(v(2))
    waiting = await blocked(replay.admit(2, v(2), AMPLE_S))
    with pytest.raises(WaitTimeout, match="0 are ready"):
        await replay.draw(0)
    assert len(await woken(waiting)) == 2


async def test_who_is_cancelled_while_it_waits_is_seen_no_longer(build_replay):
    replay = build_replay()
    waiting = [await blocked(replay.draw(AMPLE_S))]
    await replay.pause_admission(True)
    waiting.append(await blocked(replay.admit(1, v(0), AMPLE_S)))
    assert {wait.side for wait in (await replay.stats()).waits} == {"learner", "rollout"}
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (await replay.stats()).waits == ()
