"""What Redis remembers of calls and callers is forgotten in time: else it would grow for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis

from leeway.replay.errors import LeaseExpired, SlotExpired
from leeway.replay.redis_store import RedisReplay
from leeway.replay.server import EmbeddedRedis
from leeway.replay.synthetic import build_group
from tests.contract.replay_calls import FULL_HOUR_S, Timed, put, timed_stores, train, v


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def admin(server: EmbeddedRedis) -> Iterator[Any]:
    with redis.Redis.from_url(server.admin_url, decode_responses=True) as client:
        yield client


@pytest.fixture
async def timed(server: EmbeddedRedis) -> AsyncIterator[Timed]:
    async with timed_stores(server.url) as stores:
        yield stores


def built(timed: Timed, run: str | None = None) -> RedisReplay:
    replay = timed.build(run, groups_per_step=1, max_staleness=9)
    assert isinstance(replay, RedisReplay)
    return replay


async def test_the_ids_of_every_hour_expire_two_hours_after_the_first_of_it(timed, admin):
    replay = built(timed)
    await put(replay), await put(replay)
    timed.pass_s(FULL_HOUR_S)
    await put(replay)
    sets = {key: admin.scard(key) for key in admin.scan_iter(f"{replay.buffer.prefix}added:*")}
    assert sorted(sets.values()) == [1, 2]
    # By the server's own time: that of the scripts stands still here.
    assert all(7100 < admin.ttl(key) <= 7200 for key in sets)


async def test_a_later_id_of_an_hour_does_not_put_off_its_end(timed, admin):
    replay = built(timed)
    await put(replay)
    (key,) = admin.scan_iter(f"{replay.buffer.prefix}added:*")
    admin.expire(key, 60)
    await put(replay)
    assert admin.ttl(key) <= 60


async def test_an_id_of_two_hours_before_is_no_longer_known(timed, admin):
    replay = built(timed)
    slot = await put(replay)
    await train(replay)
    timed.pass_s(FULL_HOUR_S + 3600.0)
    with pytest.raises(SlotExpired):
        await replay.add(slot, build_group(slot))
    assert admin.exists(f"{replay.buffer.prefix}payload:{slot.slot_id}") == 0


async def test_acknowledged_leases_are_forgotten_an_hour_later(timed, admin):
    replay = built(timed)
    key = f"{replay.buffer.prefix}acknowledged"
    await put(replay)
    first = await train(replay)
    timed.pass_s(3599.0)
    await put(replay, 1)
    second = await train(replay)
    assert set(admin.zrange(key, 0, -1)) == {first.lease_id, second.lease_id}
    timed.pass_s(1.0)
    await put(replay, 2)
    third = await train(replay)
    assert set(admin.zrange(key, 0, -1)) == {second.lease_id, third.lease_id}
    await replay.acknowledge(second, v(2))
    with pytest.raises(LeaseExpired):
        await replay.acknowledge(first, v(1))
    assert (await replay.stats()).num_trained == 3


async def die_waiting(replay: RedisReplay, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed in a draw says nothing more."""

    async def nobody_left(_: object) -> None: ...

    waiting = asyncio.create_task(replay.draw(60.0))
    async with asyncio.timeout(5.0):
        while not (await replay.stats()).waits:
            await asyncio.sleep(0.01)
    monkeypatch.setattr(replay.buffer, "end_wait", nobody_left)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_the_wait_of_a_dead_caller_is_forgotten_after_15_seconds(timed, admin, monkeypatch):
    dead = built(timed, run="dead-caller")
    living = built(timed, run="dead-caller")
    await die_waiting(dead, monkeypatch)
    timed.pass_s(15.0)
    (wait,) = (await living.stats()).waits
    assert (wait.side, wait.since_s) == ("learner", pytest.approx(15.0, abs=1.0))
    timed.pass_s(0.001)
    assert (await living.stats()).waits == ()
    assert admin.hlen(f"{living.buffer.prefix}waits") == 0


async def test_a_caller_that_was_heard_of_later_is_seen_longer(timed, monkeypatch):
    first, second, living = (built(timed, run="two-callers") for _ in range(3))
    await die_waiting(first, monkeypatch)
    timed.pass_s(10.0)
    waiting = asyncio.create_task(second.draw(60.0))
    async with asyncio.timeout(5.0):
        while len((await living.stats()).waits) < 2:
            await asyncio.sleep(0.01)
    timed.pass_s(5.001)
    assert len((await living.stats()).waits) == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
