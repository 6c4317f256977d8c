"""A buffer in shards: its rules, on tables in memory. test_replay_cluster.py is on a cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest
from pydantic import ValidationError

from leeway.replay.config import ReplayConfig
from leeway.replay.errors import (
    ConfigurationError,
    LeaseExpired,
    NoAnswer,
    StoreUnavailable,
    WaitTimeout,
)
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.sharded_store import HAND_BACK_S, ShardedReplay, check_shards, connect_replay
from leeway.replay.store import Lease, Replay, Slot
from leeway.replay.synthetic import build_group

CONFIG = ReplayConfig(groups_per_step=4, max_staleness=1, num_shards=2, max_groups=64)
SOON_S = 0.05
AMPLE_S = 10.0


def v(version: int) -> PolicyVersion:
    return PolicyVersion(version)


def on_memory(config: ReplayConfig = CONFIG) -> tuple[ShardedReplay, list[MemoryReplay]]:
    shards = [MemoryReplay(config.of_shard()) for _ in range(config.num_shards)]
    return ShardedReplay(shards, config), shards


async def fill(replay: Replay, n: int, version: int = 0) -> list[Slot]:
    slots: list[Slot] = []
    while len(slots) < n:
        slots += await replay.admit(n - len(slots), v(version), SOON_S)
    for slot in slots:
        await replay.add(slot, build_group(slot))
    return slots


async def later(delay_s: float, call: Awaitable[object]) -> None:
    await asyncio.sleep(delay_s)
    await call


async def train(replay: Replay) -> Lease:
    lease = await replay.draw(AMPLE_S)
    await replay.acknowledge(lease, v(lease.version + 1))
    return lease


def test_every_shard_gets_its_part_of_the_limits():
    config = ReplayConfig(
        groups_per_step=8, num_shards=4, max_groups=100, max_bytes=4096, queue_size=9
    )
    part = config.of_shard()
    assert (part.groups_per_step, part.max_groups, part.max_bytes) == (2, 25, 1024)
    assert (part.num_shards, part.queue_size) == (1, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"groups_per_step": 6, "num_shards": 4}, "multiple of num_shards = 4"),
        (
            {"groups_per_step": 8, "num_shards": 4, "max_groups": 9, "staleness_policy": "exact"},
            "max_groups",
        ),
        (
            {"groups_per_step": 8, "num_shards": 4, "limiter": "queue", "queue_size": 8},
            None,
        ),
    ],
)
def test_shards_that_could_not_hold_their_part_of_a_step_are_refused(settings, words):
    if words is None:
        assert ReplayConfig.model_validate(settings).of_shard().queue_size == 2
        return
    with pytest.raises(ValidationError, match=words):
        ReplayConfig.model_validate(settings)


async def test_a_buffer_is_not_opened_with_fewer_shards_than_it_has(tmp_path: Path):
    with EmbeddedRedis.start(tmp_path) as server:
        assert not await check_shards(server.url, "run", 1)
        replay = connect_replay(server.url, "run", CONFIG)
        await fill(replay, 4)
        await replay.close()
        assert await check_shards(server.url, "run", 2)
        assert await check_shards(server.url, "run", 4)
        with pytest.raises(ConfigurationError, match="more shards than num_shards = 1"):
            await check_shards(server.url, "run", 1)


async def test_a_step_takes_an_equal_part_from_every_shard():
    replay, shards = on_memory()
    await fill(replay, 8)
    await train(replay)
    assert [(await shard.stats()).num_trained for shard in shards] == [2, 2]
    stats = await replay.stats()
    assert (stats.learner_version, stats.num_trained, stats.num_ready) == (1, 4, 4)


async def test_the_window_of_all_shards_is_the_window():
    replay, _ = on_memory()
    await fill(replay, CONFIG.window)
    with pytest.raises(WaitTimeout, match="window"):
        await replay.admit(1, v(0), SOON_S)
    waiting = asyncio.create_task(replay.admit(1, v(1), AMPLE_S))
    await train(replay)
    assert len(await waiting) == 1


async def test_room_in_another_shard_than_ones_own_is_found():
    replay, shards = on_memory()
    slots = await fill(replay, CONFIG.window - 1)
    slots += await replay.admit(1, v(0), SOON_S)
    waiting = [asyncio.create_task(replay.admit(1, v(0), AMPLE_S)) for _ in range(2)]
    await asyncio.sleep(SOON_S)
    await replay.drop(slots[-1], "failed")
    done, rest = await asyncio.wait(waiting, timeout=3.0, return_when="FIRST_COMPLETED")
    assert len(done) == 1
    for task in rest:
        task.cancel()
    assert sum([(await shard.stats()).num_slots for shard in shards]) == 1


async def test_a_draw_that_one_shard_cannot_serve_takes_nothing_from_the_others():
    replay, shards = on_memory()
    for slot in await shards[0].admit(2, v(0), SOON_S):
        await shards[0].add(slot, build_group(slot))
    with pytest.raises(WaitTimeout):
        await replay.draw(SOON_S)
    assert (await replay.stats()).num_leased == 0


async def test_seconds_of_a_wait_for_one_shard_do_not_count_as_training_at_another():
    replay, shards = on_memory()
    await fill(shards[0], 2)
    for _ in range(2):
        with pytest.raises(WaitTimeout):
            await replay.draw(0.3)
    filling = asyncio.create_task(later(0.3, fill(shards[1], 2)))
    lease = await replay.draw(AMPLE_S)
    await filling
    trained_from_s = time.monotonic()
    await asyncio.sleep(0.1)
    await replay.acknowledge(lease, v(1))
    trained_s = time.monotonic() - trained_from_s
    stats = await replay.stats()
    assert 0.1 <= stats.train_s <= trained_s + 0.05
    assert stats.wait_data_s >= 0.85


async def test_draws_that_failed_do_not_count_against_the_groups_of_other_shards():
    replay, shards = on_memory()
    for slot in await shards[0].admit(2, v(0), SOON_S):
        await shards[0].add(slot, build_group(slot))
    for _ in range(6):
        with pytest.raises(WaitTimeout):
            await replay.draw(SOON_S)
    stats = await replay.stats()
    assert (stats.num_ready, stats.dropped) == (2, {})


async def test_a_draw_ahead_after_half_a_lease_expired_is_refused():
    replay, shards = on_memory(ReplayConfig(**CONFIG.model_dump() | {"max_staleness": 3}))
    await fill(replay, 12)
    first = await replay.draw(AMPLE_S)
    await shards[1].release(replay._parts[first.lease_id][1])  # as if it had expired
    with pytest.raises(LeaseExpired, match="shard"):
        await replay.draw(SOON_S)
    await replay.release(first)
    assert (await replay.draw(AMPLE_S)).version == 0


async def test_shards_at_two_versions_come_together_at_the_next_draw():
    replay, shards = on_memory(ReplayConfig(**CONFIG.model_dump() | {"max_staleness": 3}))
    await fill(replay, 12)
    part = await shards[0].draw(SOON_S)
    await shards[0].acknowledge(part, v(1))
    lease = await replay.draw(AMPLE_S)
    assert (lease.version, len(lease.groups)) == (1, 4)
    await replay.acknowledge(lease, v(2))
    assert [(await shard.stats()).learner_version for shard in shards] == [2, 2]


async def test_a_pause_tells_who_waits_and_not_who_comes_later():
    replay, _ = on_memory()
    await fill(replay, CONFIG.window)
    waiting = asyncio.create_task(replay.admit(1, v(0), AMPLE_S))
    await asyncio.sleep(SOON_S)
    await replay.pause_admission(True)
    with pytest.raises(WaitTimeout, match="admission is stopped"):
        await waiting
    later = asyncio.create_task(replay.admit(1, v(1), AMPLE_S))
    await train(replay)
    await asyncio.sleep(1.5)
    assert not later.done()
    await replay.pause_admission(False)
    assert len(await later) == 1


async def test_acknowledging_twice_is_harmless_and_a_foreign_lease_is_refused():
    replay, _ = on_memory()
    await fill(replay, 4)
    lease = await train(replay)
    await replay.acknowledge(lease, v(1))
    assert (await replay.stats()).num_trained == 4
    other, _ = on_memory()
    with pytest.raises(LeaseExpired):
        await other.acknowledge(lease, v(1))


# --- a shard that does not answer ---


class Silent(MemoryReplay):
    """Grants what it is asked for, but its node can go away."""

    is_away = False

    async def admit(self, n, version, timeout_s):
        self._ask()
        return await super().admit(n, version, timeout_s)

    async def withdraw(self, lease):
        if self.is_away:
            await asyncio.sleep(30.0)
        await super().withdraw(lease)

    def _ask(self) -> None:
        if self.is_away:
            raise StoreUnavailable("no answer from Redis at a:1")


async def test_slots_of_live_shards_are_handed_out_where_another_is_down():
    shards = [Silent(CONFIG.of_shard()) for _ in range(2)]
    replay = ShardedReplay(shards, CONFIG)
    shards[0].is_away = True  # the first call begins at the second shard
    assert [slot.shard for slot in await replay.admit(2, v(0), SOON_S)] == [1]
    with pytest.raises(StoreUnavailable, match="a:1"):
        await replay.admit(2, v(0), SOON_S)
    stats = await shards[1].stats()
    assert stats.num_slots == 1


async def test_a_draw_in_vain_ends_in_time_and_the_next_hands_back_what_it_leased():
    shards = [Silent(CONFIG.of_shard()) for _ in range(2)]
    replay = ShardedReplay(shards, CONFIG)
    await fill(shards[0], 2)
    shards[0].is_away = True
    started = time.monotonic()
    with pytest.raises(WaitTimeout):
        await replay.draw(SOON_S)
    assert time.monotonic() - started < SOON_S + HAND_BACK_S + 1.0
    assert (await shards[0].stats()).num_leased == 2
    with pytest.raises(NoAnswer, match="take back what they leased for an earlier draw"):
        await replay.draw(SOON_S)
    shards[0].is_away = False
    await fill(shards[1], 2)
    assert (await train(replay)).version == 0
    assert [(await shard.stats()).num_leased for shard in shards] == [0, 0]
