"""What only the buffer in Redis can show: lost replies, cut connections, crashes and restarts."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
import uuid
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import redis

from leeway.replay import scripts
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import (
    ConfigurationError,
    SlotExpired,
    StoreUnavailable,
    WaitTimeout,
)
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.store import Slot
from leeway.replay.synthetic import build_group

CONFIG = ReplayConfig(groups_per_step=2, max_staleness=1)
V0, V1 = PolicyVersion(0), PolicyVersion(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
async def replay(server: EmbeddedRedis) -> AsyncIterator[RedisReplay]:
    store = RedisReplay(server.url, f"test-{uuid.uuid4().hex}", CONFIG)
    yield store
    await store.close()


async def test_admission_sent_twice_is_granted_once(replay):
    ids = ["one", "two", "three"]
    first = await replay.buffer.admit(ids, V0)
    assert await replay.buffer.admit(ids, V0) == first
    assert (await replay.stats()).num_slots == 3


async def test_draw_sent_twice_returns_the_same_lease(replay):
    for slot in await replay.admit(4, V0, 1.0):
        await replay.add(slot, build_group(slot))
    first, second = [await replay.buffer.lease("lease") for _ in range(2)]
    assert first == second and len(first.ids) == 2
    stats = await replay.stats()
    assert (stats.num_leased, stats.num_drawn) == (2, 2)


async def test_waits_end_when_connections_are_cut(replay, server):
    waiting = asyncio.create_task(replay.draw(10.0))
    await asyncio.sleep(0.1)
    with redis.Redis.from_url(server.admin_url) as admin:
        admin.client_kill_filter(_type="normal", skipme=True)
    for slot in await replay.admit(2, V0, 1.0):
        await replay.add(slot, build_group(slot))
    assert len((await waiting).groups) == 2


async def test_cancelled_calls_do_not_leave_replies_behind(replay):
    await replay.admit(3, V0, 1.0)
    for _ in range(20):
        calls = [asyncio.create_task(replay.group_ids()) for _ in range(8)]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert (await replay.stats()).num_slots == 3


async def test_limits_come_from_the_configuration_of_today(server):
    run = f"test-{uuid.uuid4().hex}"
    first = RedisReplay(server.url, run, CONFIG)
    assert len(await first.admit(9, V0, 1.0)) == 4
    await first.close()
    wider = RedisReplay(server.url, run, ReplayConfig(groups_per_step=2, max_staleness=3))
    assert len(await wider.admit(9, V0, 1.0)) == 4
    await wider.close()


async def test_runs_of_one_server_do_not_see_each_other(server):
    first, second = (RedisReplay(server.url, f"test-{uuid.uuid4().hex}", CONFIG) for _ in "12")
    await first.admit(4, V0, 1.0)
    assert (await second.stats()).num_slots == 0
    await first.close()
    await second.close()


async def test_hundreds_of_waiting_workers_use_few_connections(replay, server):
    await replay.admit(4, V0, 1.0)
    waits = [asyncio.create_task(replay.admit(1, V0, 1.0)) for _ in range(200)]
    await asyncio.sleep(0.4)
    with redis.Redis.from_url(server.admin_url) as admin:
        assert admin.info("clients")["connected_clients"] < 40  # type: ignore[index]
    results = await asyncio.gather(*waits, return_exceptions=True)
    assert all(isinstance(result, WaitTimeout) for result in results)


async def test_everything_of_a_trained_group_is_forgotten(replay, server):
    for slot in await replay.admit(2, V0, 1.0):
        await replay.add(slot, build_group(slot))
    await replay.acknowledge(await replay.draw(1.0), V1)
    prefix = replay.buffer.prefix
    kept = {prefix + name for name in ("state", "added", "acknowledged", "room", "data")}
    with redis.Redis.from_url(server.admin_url, decode_responses=True) as admin:
        keys = set(admin.scan_iter(f"{prefix}*"))
    assert {re.sub(r":added:\d+$", ":added", key) for key in keys} == kept
    assert (await replay.stats()).num_bytes == 0


async def test_a_payload_without_its_script_expires_by_itself(replay, server):
    slot = (await replay.admit(1, V0, 1.0))[0]
    key = f"{replay.buffer.prefix}payload:{slot.slot_id}"
    with redis.Redis.from_url(server.admin_url) as admin:
        # A producer died between the two commands of an add.
        admin.set(key, b"half", nx=True, px=60_000)
        await replay.drop(slot, "failed")
        with pytest.raises(SlotExpired):
            await replay.add(slot, build_group(slot))
        assert admin.exists(key) == 0


async def test_a_payload_that_was_taken_does_not_expire(replay, server):
    slot = (await replay.admit(1, V0, 1.0))[0]
    await replay.add(slot, build_group(slot))
    await replay.add(slot, build_group(slot))
    with redis.Redis.from_url(server.admin_url) as admin:
        assert admin.ttl(f"{replay.buffer.prefix}payload:{slot.slot_id}") == -1


async def test_other_selectors_than_the_run_before_order_what_is_there(server):
    run = f"test-{uuid.uuid4().hex}"
    first = RedisReplay(server.url, run, CONFIG)
    slots = await first.admit(4, V0, 1.0)
    for slot in slots:
        await first.add(slot, build_group(slot))
    await first.close()
    config = ReplayConfig(groups_per_step=2, max_staleness=3, draw_by="lifo")
    second = RedisReplay(server.url, run, config)
    drawn = {group.group_id for group in (await second.draw(1.0)).groups}
    assert drawn == {slot.slot_id for slot in slots[2:]}
    await second.close()


async def test_a_buffer_of_another_layout_is_refused_with_both_numbers(server):
    run = f"test-{uuid.uuid4().hex}"
    replay = RedisReplay(server.url, run, CONFIG)
    with redis.Redis.from_url(server.admin_url) as admin:
        admin.hset(f"{replay.buffer.prefix}state", "learner_version", "3")
        with pytest.raises(ConfigurationError, match=r"layout 1 .*reads 7;"):
            await replay.stats()
        admin.set(f"{replay.buffer.prefix}state", msgspec.msgpack.encode({"layout": 9}))
        with pytest.raises(ConfigurationError, match=r"layout 9 .*reads 7;"):
            await replay.admit(1, V0, 0)
        assert msgspec.msgpack.decode(admin.get(f"{replay.buffer.prefix}state")) == {"layout": 9}
    await replay.close()


async def test_a_wait_that_is_reported_twice_counts_once(replay):
    with pytest.raises(WaitTimeout):
        await replay.draw(0.3)
    stats = await replay.stats()
    assert 0.25 < stats.wait_data_s < 0.6
    await replay.buffer.end_wait(replay._learners.report())
    assert (await replay.stats()).wait_data_s == stats.wait_data_s


async def test_waits_of_all_callers_of_a_process_are_summed(replay):
    await replay.admit(4, V0, 1.0)
    waits = [asyncio.create_task(replay.admit(1, V0, 0.6)) for _ in range(8)]
    await asyncio.gather(*waits, return_exceptions=True)
    stats = await replay.stats()
    assert 8 * 0.55 < stats.wait_room_s < 8 * 0.9
    assert stats.waits == ()


async def test_a_signal_of_the_board_wakes_an_admission_once(replay, server):
    """An engine's newer version is written to the stream of room; the scripts do not know of it."""
    await replay.admit(4, V0, 1.0)
    waiting = asyncio.create_task(replay.admit(1, V0, 2.0))
    await asyncio.sleep(0.3)
    with redis.Redis.from_url(server.admin_url) as admin:
        admin.config_resetstat()
        admin.xadd(f"{replay.buffer.prefix}room", {"at": "1"})
        await asyncio.sleep(1.0)
        calls = admin.info("commandstats")["cmdstat_evalsha"]["calls"]  # type: ignore[index]
    assert 1 <= calls <= 3
    with pytest.raises(WaitTimeout):
        await waiting


@pytest.mark.parametrize(
    ("max_draws", "version", "num_signals"),
    [(1, 1, 0), (2, 1, 1), (1, 2, 1)],
    ids=["a step as it was counted on", "groups to train once more", "a version was left out"],
)
async def test_an_acknowledgement_calls_a_draw_only_where_one_may_do_what_it_could_not(
    server, max_draws, version, num_signals
):
    config = ReplayConfig(groups_per_step=2, max_staleness=1, max_draws=max_draws)
    replay = RedisReplay(server.url, f"test-{uuid.uuid4().hex}", config)
    for slot in await replay.admit(2, V0, 1.0):
        await replay.add(slot, build_group(slot))
    lease = await replay.draw(1.0)
    with redis.Redis.from_url(server.admin_url) as admin:
        data = f"{replay.buffer.prefix}data"
        before = admin.xlen(data)
        await replay.acknowledge(lease, PolicyVersion(version))
        assert admin.xlen(data) - before == num_signals
    await replay.close()


async def test_thousands_of_slots_and_adds_at_once(server):
    config = ReplayConfig(groups_per_step=5000, max_staleness=1, max_groups=20_000)
    replay = RedisReplay(server.url, f"test-{uuid.uuid4().hex}", config)
    slots: list[Slot] = []
    while len(slots) < 5000:
        slots += await replay.admit(5000, V0, 1.0)
    groups = [build_group(slot, num_trajectories=1, num_tokens=8) for slot in slots]
    await asyncio.gather(*map(replay.add, slots, groups))
    lease = await replay.draw(5.0)
    assert len(lease.groups) == 5000
    await replay.acknowledge(lease, V1)
    stats = await replay.stats()
    assert (stats.num_trained, stats.num_bytes) == (5000, 0)
    await replay.close()


async def test_who_gives_no_limits_changes_none(server):
    run = f"test-{uuid.uuid4().hex}"
    twice = ReplayConfig(groups_per_step=2, max_staleness=3, max_draws=2)
    replay, bystander = (RedisReplay(server.url, run, c) for c in (twice, ReplayConfig()))
    for slot in await replay.admit(2, V0, 1.0):
        await replay.add(slot, build_group(slot))
    await replay.acknowledge(await replay.draw(1.0), V1)
    await bystander.pause_admission(True)
    await bystander.update_priorities({"nobody": 1.0})
    assert (await bystander.stats()).num_ready == 2
    await replay.close()
    await bystander.close()


@pytest.mark.parametrize("come_back", ["restore", "import"])
async def test_groups_trained_often_enough_are_not_drawn_again(server, come_back):
    run = f"test-{uuid.uuid4().hex}"
    twice = ReplayConfig(groups_per_step=2, max_staleness=3, max_draws=2)
    once = ReplayConfig(groups_per_step=2, max_staleness=3)
    first, second = RedisReplay(server.url, run, twice), RedisReplay(server.url, run, once)
    for slot in await first.admit(2, V0, 1.0):
        await first.add(slot, build_group(slot))
    await first.acknowledge(await first.draw(1.0), V1)
    if come_back == "restore":
        await first.draw(1.0)
        await second.restore_version(V1)
    else:
        (group_id, record), *_ = (await first.buffer.records()).items()
        payload = await anext(first.buffer.payloads([group_id]))
        await first.acknowledge(await first.draw(1.0), PolicyVersion(2))
        assert payload is not None
        assert await second.buffer.put_back(group_id, record, payload) == "trained"
    with pytest.raises(WaitTimeout, match="0 are ready"):
        await second.draw(0.05)
    assert (await second.stats()).num_bytes == 0
    await first.close()
    await second.close()


async def test_a_cancelled_draw_ends_at_once_though_redis_is_gone(tmp_path):
    server = EmbeddedRedis.start(tmp_path)
    replay = RedisReplay(server.url, "gone", CONFIG, retry_s=20.0)
    waiting = asyncio.create_task(replay.draw(30.0))
    await asyncio.sleep(0.3)
    server.kill()
    waiting.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert time.monotonic() - began < 5.0
    await replay.close()


async def test_fewer_draws_than_the_run_before_forget_what_was_trained(server):
    run = f"test-{uuid.uuid4().hex}"
    twice = ReplayConfig(groups_per_step=2, max_staleness=3, max_draws=2)
    first = RedisReplay(server.url, run, twice)
    for slot in await first.admit(2, V0, 1.0):
        await first.add(slot, build_group(slot))
    await first.acknowledge(await first.draw(1.0), V1)
    assert (await first.stats()).num_ready == 2
    await first.close()
    once = RedisReplay(server.url, run, ReplayConfig(groups_per_step=2, max_staleness=3))
    assert len(await once.admit(2, V1, 1.0)) == 2
    stats = await once.stats()
    assert (stats.num_ready, stats.num_bytes) == (0, 0)
    await once.close()


async def test_time_set_back_neither_moves_deadlines_away_nor_stops_them(server, monkeypatch):
    """The server's clock cannot be set, so scripts read it an hour behind from the second call."""
    run = f"test-{uuid.uuid4().hex}"
    config = ReplayConfig(groups_per_step=2, slot_timeout_s=0.3)
    replay = RedisReplay(server.url, run, config)
    await replay.admit(2, V0, 1.0)
    text = scripts.lua_text
    behind = "local clock = call('TIME')\nclock[1] = tonumber(clock[1]) - 3600"

    def set_back(name: str) -> str:
        return text(name).replace("local clock = call('TIME')", behind)

    monkeypatch.setattr(scripts, "lua_text", set_back)
    scripts.script_source.cache_clear()
    later = RedisReplay(server.url, run, config)
    assert (await later.stats()).num_slots == 2
    await asyncio.sleep(0.4)
    # Time stood still at the step and went on from there, though nobody did more than look.
    assert (await later.stats()).num_slots_expired == 2
    scripts.script_source.cache_clear()
    await replay.close()
    await later.close()


async def test_an_added_group_survives_the_crash_of_redis(tmp_path):
    server = EmbeddedRedis.start(tmp_path)
    replay = RedisReplay(server.url, "run", CONFIG)
    slots = await replay.admit(2, V0, 1.0)
    for slot in slots:
        await replay.add(slot, build_group(slot))
    await replay.close()
    os.kill(server.pid, signal.SIGKILL)
    with EmbeddedRedis.start(tmp_path) as again:
        replay = RedisReplay(again.url, "run", CONFIG)
        assert set(await replay.group_ids()) == {slot.slot_id for slot in slots}
        assert len((await replay.draw(1.0)).groups) == 2
        await replay.close()
    assert server._process.wait(5) == -signal.SIGKILL


async def test_waiting_callers_outlive_a_crash_and_restart_of_redis(tmp_path):
    server = EmbeddedRedis.start(tmp_path)
    replay = RedisReplay(server.url, "run", CONFIG)
    slots = await replay.admit(2, V0, 1.0)
    waiting = asyncio.create_task(replay.draw(20.0))
    await asyncio.sleep(0.1)
    server.kill()
    adding = [asyncio.create_task(replay.add(slot, build_group(slot))) for slot in slots]
    await asyncio.sleep(0.1)
    with EmbeddedRedis.start(tmp_path) as again:
        assert again.url == server.url
        await asyncio.gather(*adding)
        assert len((await waiting).groups) == 2
        await replay.close()


async def test_a_dead_server_is_unavailable_within_the_deadline(tmp_path):
    server = EmbeddedRedis.start(tmp_path)
    replay = RedisReplay(server.url, "run", CONFIG, retry_s=0.3)
    waiting = asyncio.create_task(replay.draw(20.0))
    await asyncio.sleep(0.1)
    server.kill()
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match="no answer from Redis"):
        await waiting
    assert time.monotonic() - started < 3.0
    await replay.close()
