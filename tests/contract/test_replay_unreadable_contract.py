"""Bytes in the buffer that are no group, and what else fails between a lease and its hand-over."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable

import pytest

from leeway.replay import memory_store, redis_buffer, redis_store
from leeway.replay.codec import encode
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import ConfigurationError, StalenessViolation, WaitTimeout
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import SCHEMA_VERSION, PolicyVersion
from leeway.replay.sharded_store import Shard, ShardedReplay
from leeway.replay.store import Replay, Slot
from leeway.replay.synthetic import build_group

V0 = PolicyVersion(0)
SOON_S = 0.05
HANDMADE = b"not a group"


def of_next_schema(payload: bytes) -> bytes:
    return payload[:2] + struct.pack("<H", SCHEMA_VERSION + 1) + payload[4:]


def flipped(payload: bytes) -> bytes:
    return payload[:40] + bytes([payload[40] ^ 1]) + payload[41:]


async def fill(replay: Replay, n: int) -> list[Slot]:
    slots = await replay.admit(n, V0, SOON_S)
    assert len(slots) == n
    for slot in slots:
        await replay.add(slot, build_group(slot))
    return slots


async def change(replay: Replay, slot: Slot, by: Callable[[bytes], bytes]) -> None:
    """Write other bytes in the place of a stored group's."""
    changed = by(encode(build_group(slot)))
    if isinstance(replay, MemoryReplay):
        replay._buffer.groups[slot.slot_id].payload = changed
        return
    assert isinstance(replay, RedisReplay)
    key = f"{replay.buffer.prefix}payload:{slot.slot_id}"
    await replay._link.execute(("SET", key, changed))


@pytest.mark.parametrize("by", [of_next_schema, flipped, lambda _: HANDMADE, lambda _: b""])
async def test_of_a_step_of_two_with_an_unreadable_group_the_sibling_is_trained(
    build_replay, by, caplog
):
    replay = build_replay(max_returns=0)
    first, second, third = await fill(replay, 3)
    await change(replay, first, by)
    with caplog.at_level(logging.ERROR):
        lease = await replay.draw(SOON_S)
    assert {group.group_id for group in lease.groups} == {second.slot_id, third.slot_id}
    assert f"group {first.slot_id} is dropped as unreadable: " in caplog.text
    await replay.acknowledge(lease, PolicyVersion(1))
    stats = await replay.stats()
    assert (stats.dropped, stats.num_trained) == ({"unreadable": 1}, 2)
    assert (stats.num_leased, stats.num_bytes, stats.outstanding) == (0, 0, {})


async def test_a_draw_that_is_left_with_too_few_says_so_and_keeps_the_sibling(build_replay):
    replay = build_replay(max_returns=0)
    first, second = await fill(replay, 2)
    await change(replay, first, flipped)
    for _ in range(3):
        with pytest.raises(WaitTimeout, match="1 are ready"):
            await replay.draw(SOON_S)
    assert await replay.group_ids() == [second.slot_id]
    assert (await replay.stats()).dropped == {"unreadable": 1}


async def test_what_was_dropped_as_unreadable_makes_room_for_another_group(build_replay):
    replay = build_replay()
    slots = await fill(replay, 4)
    await change(replay, slots[0], flipped)
    waiting = asyncio.create_task(replay.admit(1, V0, 5.0))
    await asyncio.sleep(SOON_S)
    await replay.draw(SOON_S)
    assert len(await waiting) == 1


async def test_a_group_beyond_the_bound_does_not_take_its_lease_along(build_replay, monkeypatch):
    replay = build_replay(max_returns=0)
    await fill(replay, 2)

    def violated(*_: object) -> None:
        raise StalenessViolation("as if")

    for store in (memory_store, redis_store):
        monkeypatch.setattr(store, "check_staleness", violated)
    for _ in range(3):
        with pytest.raises(StalenessViolation):
            await replay.draw(SOON_S)
    stats = await replay.stats()
    assert (stats.num_ready, stats.num_leased, stats.dropped) == (2, 0, {})


async def test_shards_train_the_siblings_of_an_unreadable_group(redis_url):
    config = ReplayConfig(groups_per_step=4, num_shards=2, max_returns=0, lookahead="full")
    run = "unreadable-shards"
    shards = [RedisReplay(redis_url, run, config.of_shard(), shard=k) for k in range(2)]
    of_shards: list[Shard] = [*shards]
    replay = ShardedReplay(of_shards, config)
    try:
        slots = await fill(replay, 6)
        await change(shards[1], next(slot for slot in slots if slot.shard == 1), flipped)
        lease = await replay.draw(SOON_S)
        assert len(lease.groups) == 4
        assert (await replay.stats()).dropped == {"unreadable": 1}
    finally:
        await replay.close()


async def test_redis_keeps_the_bytes_of_the_last_unreadable_group(redis_url):
    replay = RedisReplay(redis_url, "kept-aside", ReplayConfig(groups_per_step=2))
    try:
        slots = await fill(replay, 4)
        for slot, text in zip(slots, (b"one", b"two"), strict=False):
            await change(replay, slot, lambda _, text=text: text)
        await replay.draw(SOON_S)
        [kept] = await replay._link.execute(("EVAL", SHOW, 1, f"{replay.buffer.prefix}unreadable"))
        assert kept == [slots[1].slot_id.encode(), b"two"]
    finally:
        await replay.close()


SHOW = "return redis.call('HGETALL', KEYS[1])"


async def test_what_a_cancelled_draw_had_leased_is_for_the_next_one_or_goes_back(
    redis_url, monkeypatch
):
    config = ReplayConfig(groups_per_step=2, max_returns=0)
    first, second = (RedisReplay(redis_url, "cancelled", config) for _ in range(2))
    try:
        await fill(first, 2)
        for is_drawn_again in (True, False):
            has_leased, may_read, read = asyncio.Event(), asyncio.Event(), first.buffer.read

            async def late_read(leased, has_leased=has_leased, may_read=may_read, read=read):
                has_leased.set()
                await may_read.wait()
                return await read(leased)

            with monkeypatch.context() as patch:
                patch.setattr(first.buffer, "read", late_read)
                drawing = asyncio.create_task(first.draw(5.0))
                await has_leased.wait()
            drawing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await drawing
            may_read.set()
            if is_drawn_again:
                lease = await first.draw(SOON_S)
                assert (lease.version, len(lease.groups)) == (0, 2)
                await first.withdraw(lease)
        await first.close()
        stats = await second.stats()
        assert (stats.num_ready, stats.num_leased, stats.dropped) == (2, 0, {})
    finally:
        await second.close()


# --- a program of another schema ------------------------------------------------------------------


async def test_a_buffer_of_another_schema_is_refused_before_anything_is_leased(
    redis_url, monkeypatch
):
    config = ReplayConfig(groups_per_step=2, max_returns=0)
    replay = RedisReplay(redis_url, "another-schema", config)
    try:
        slots = await fill(replay, 2)
        before = await replay.stats()
        sentence = (
            f"holds groups of schema version {SCHEMA_VERSION} and this program reads "
            f"{SCHEMA_VERSION + 1}; nothing was changed: go on with the version of Leeway that"
        )
        with monkeypatch.context() as patch:
            patch.setattr(redis_buffer, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
            for call in (
                lambda: replay.restore_version(V0),
                lambda: replay.draw(SOON_S),
                lambda: replay.admit(1, V0, SOON_S),
                lambda: replay.add(slots[0], build_group(slots[0])),
                replay.stats,
            ):
                with pytest.raises(ConfigurationError, match=sentence) as refused:
                    await call()
                assert refused.value.exit_code == 2
        assert await replay.stats() == before
        assert len((await replay.draw(SOON_S)).groups) == 2
    finally:
        await replay.close()


async def test_a_buffer_without_groups_is_taken_over_by_another_schema(redis_url, monkeypatch):
    replay = RedisReplay(redis_url, "taken-over", ReplayConfig(groups_per_step=2))
    try:
        slots = await fill(replay, 2)
        await replay.acknowledge(await replay.draw(SOON_S), PolicyVersion(1))
        monkeypatch.setattr(redis_buffer, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
        assert (await replay.stats()).num_trained == len(slots)
        await fill(replay, 1)
        monkeypatch.setattr(redis_buffer, "SCHEMA_VERSION", SCHEMA_VERSION)
        with pytest.raises(ConfigurationError, match=f"schema version {SCHEMA_VERSION + 1}"):
            await replay.draw(SOON_S)
    finally:
        await replay.close()
