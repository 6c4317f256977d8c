"""What is dropped is counted by turns and by lengths, whatever the reason."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import pytest

from leeway.replay import memory_store, redis_store
from leeway.replay.errors import WaitTimeout
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import Group, Turn
from leeway.replay.store import Replay, Slot
from leeway.replay.synthetic import build_group
from tests.contract.replay_calls import SOON_S, train, v

TURNS = {1: 1, 2: 1}
TOKENS = {16: 1, 32: 1}
"""Of `uneven`: at most so many, so 16 tokens are of the first row and 17 of the second."""


def uneven(slot: Slot, version: int | None = None) -> Group:
    """One trajectory of two turns and 16 tokens, one of one turn and 17 tokens."""
    first = build_group(slot, version, num_trajectories=1, num_tokens=16).trajectories[0]
    other = build_group(slot, version, num_trajectories=1, num_tokens=17).trajectories[0]
    num_generated = len(other.logprobs)
    turn = Turn(17 - num_generated, num_generated, num_observed=0, action="answer")
    other = msgspec.structs.replace(other, turns=(turn,))
    group = build_group(slot, version)
    return msgspec.structs.replace(group, trajectories=(first, other))


async def put(replay: Replay, version: int | None = None) -> Slot:
    (slot,) = await replay.admit(1, v(0), SOON_S)
    await replay.add(slot, uneven(slot, version))
    return slot


async def draw_in_vain(replay: Replay) -> None:
    with pytest.raises(WaitTimeout):
        await replay.draw(SOON_S)


async def come_back_too_often(replay: Replay) -> None:
    await put(replay)
    await replay.release(await replay.draw(SOON_S))


async def grow_too_old(replay: Replay) -> None:
    await put(replay)
    await replay.restore_version(v(2))
    await draw_in_vain(replay)


async def make_room(replay: Replay) -> None:
    await put(replay)
    await replay.admit(1, v(0), SOON_S)


async def lose_what_is_stored(replay: Replay) -> None:
    await put(replay, version=1)
    assert await replay.restore_version(v(0)) == 1


async def lose_what_is_played(replay: Replay) -> None:
    (slot,) = await replay.admit(1, v(0), SOON_S)
    assert await replay.restore_version(v(0)) == 0
    await replay.add(slot, uneven(slot, version=1))


async def be_unreadable(replay: Replay) -> None:
    slot = await put(replay)
    if isinstance(replay, MemoryReplay):
        replay._buffer.groups[slot.slot_id].payload = b"no group"
    else:
        assert isinstance(replay, RedisReplay)
        key = f"{replay.buffer.prefix}payload:{slot.slot_id}"
        await replay._link.execute(("SET", key, b"no group"))
    await draw_in_vain(replay)


async def be_of_two_versions(replay: Replay) -> None:
    await put(replay, version=1)
    await draw_in_vain(replay)


@pytest.mark.parametrize(
    ("reason", "happen", "settings"),
    [
        ("returned", come_back_too_often, {"max_returns": 0}),
        ("overdue", grow_too_old, {}),
        ("overdue", grow_too_old, {"staleness_policy": "drop"}),
        ("evicted", make_room, {"staleness_policy": "drop", "max_groups": 1}),
        ("lost-version", lose_what_is_stored, {}),
        ("lost-version", lose_what_is_played, {}),
        ("unreadable", be_unreadable, {}),
        ("mixed-versions", be_of_two_versions, {"staleness_policy": "exact"}),
    ],
)
async def test_turns_and_lengths_of_what_is_dropped_are_counted_for_every_reason(
    build_replay, monkeypatch, reason: str, happen: Callable[[Replay], Awaitable[None]], settings
):
    for store in (memory_store, redis_store):
        monkeypatch.setattr(store, "check_fills", lambda *_: None)  # as if added under pace
    replay = build_replay(groups_per_step=1, **settings)
    await happen(replay)
    stats = await replay.stats()
    assert stats.dropped == {reason: 1}
    assert (stats.dropped_turns, stats.dropped_tokens) == ({reason: TURNS}, {reason: TOKENS})
    assert (stats.num_bytes, stats.num_ready) == (0, 0)


async def test_drops_of_one_reason_add_up_and_those_of_others_stand_beside_them(build_replay):
    replay = build_replay(groups_per_step=1, max_returns=0)
    await come_back_too_often(replay)
    await come_back_too_often(replay)
    await put(replay, version=1)
    await replay.restore_version(v(0))
    stats = await replay.stats()
    assert stats.dropped_turns == {"lost-version": {1: 1, 2: 1}, "returned": {1: 2, 2: 2}}
    assert stats.dropped_tokens == {"lost-version": {16: 1, 32: 1}, "returned": {16: 2, 32: 2}}


async def test_a_slot_that_ends_empty_counts_as_a_group_without_turns(build_replay):
    replay = build_replay()
    await replay.drop((await replay.admit(1, v(0), SOON_S))[0], "retriever")
    await replay.restore_version(v(1))
    await replay.admit(1, v(1), SOON_S)
    assert await replay.restore_version(v(0)) == 1
    stats = await replay.stats()
    assert stats.dropped == {"retriever": 1, "lost-version": 1}
    assert (stats.dropped_turns, stats.dropped_tokens) == ({}, {})


async def test_what_was_trained_before_is_no_loss_when_it_makes_room(build_replay):
    limits = {"staleness_policy": "drop", "max_groups": 1, "max_draws": 2}
    replay = build_replay(groups_per_step=1, **limits)
    await put(replay)
    await train(replay)
    await replay.admit(1, v(1), SOON_S)
    stats = await replay.stats()
    assert (stats.num_ready, stats.dropped, stats.dropped_turns) == (0, {}, {})
