"""The buffer under SIGKILL, cut connections, a full server and a busy one: each effect once."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from math import ceil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from leeway.replay.config import ReplayConfig
from leeway.replay.errors import (
    LeaseExpired,
    SlotExpired,
    StoreError,
    StoreUnavailable,
    WaitTimeout,
)
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.store import Lease, Replay, Slot
from leeway.replay.synthetic import build_group
from tests.chaos.history import History
from tests.chaos.replay_ledger import Ledgers, scripts_on_our_clock, set_clock
from tests.chaos.swarm import PREFIX, RUN, SHARES, Swarm

NUM_KILLS = int(os.environ.get("LEEWAY_KILLS", "200"))
"""Kills of each kind of swarm.py over both settings, a quarter of them of acknowledgements."""
TIMEOUT_S = 1.0
"""Of slots and leases, so that what the dead held comes back during the run."""
SETTLE_S = 20.0
CONFIG = ReplayConfig(groups_per_step=2, max_staleness=1)
V0, V1 = PolicyVersion(0), PolicyVersion(1)

SETTINGS: dict[str, dict[str, Any]] = {
    "pace": {},
    "drop": {"staleness_policy": "drop", "max_draws": 2, "draw_by": "uniform", "max_groups": 40},
}


@pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler to hold a write with"
)
@pytest.mark.timeout(100 + 4 * NUM_KILLS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_nothing_acknowledged_is_lost_or_doubled_by_kills(build_swarm, settings):
    seed = int(os.environ.get("LEEWAY_SEED") or time.time_ns() % 2**32)
    print(f"seed {seed}")
    config = ReplayConfig(
        groups_per_step=2,
        max_staleness=4,
        max_returns=9,
        slot_timeout_s=TIMEOUT_S,
        lease_timeout_s=TIMEOUT_S,
        **settings,
    )
    swarm: Swarm = build_swarm(config, seed)
    kinds = [kind for kind, share in SHARES.items() for _ in range(ceil(share * NUM_KILLS / 2))]
    swarm.rng.shuffle(kinds)
    for kind in kinds:
        swarm.kill(kind)
    time.sleep(TIMEOUT_S)
    swarm.stop()
    # Every kill waits until it can land, so all have.
    assert {kind: swarm.landed.of(kind) for kind in SHARES} == Counter(kinds)
    asyncio.run(check(swarm))


async def check(swarm: Swarm) -> None:
    """Wait until what the dead held has come back, then hold the ledgers against the buffer."""
    replay = RedisReplay(swarm.server.url, RUN, swarm.config)
    deadline = time.monotonic() + SETTLE_S
    while (stats := await replay.stats()).num_slots or stats.leases:
        assert time.monotonic() < deadline, f"held by nobody: {stats.slots} {stats.leases}"
        await asyncio.sleep(0.1)
    ledgers, history = Ledgers.read(swarm.ledgers), History.read(swarm.home, PREFIX)
    check_killed_calls(swarm, ledgers, history)
    ledgers.check(swarm.config, stats, await replay.buffer.records(), history.dropped)
    print(f"{dict(swarm.landed.num)}, {swarm.landed.num_open} files ended within a script")
    print(f"{len(ledgers.added)} added, {ledgers.num_leases} leases, {stats}")
    assert ledgers.num_leases > NUM_KILLS, "the run went on between the kills"
    await replay.close()


def check_killed_calls(swarm: Swarm, ledgers: Ledgers, history: History) -> None:
    """What a killed process was about has happened if its script had run, and only then."""
    names = swarm.landed.names
    done, undone = names["add reply"], names["add request"]
    assert ledgers.maybe_added == done | undone, "only what was killed in an add does not know"
    assert done <= history.arrived
    assert not undone & history.arrived
    ledgers.maybe_added -= done
    ledgers.added |= done  # Redis has answered, so they count as acknowledged

    leased = names["draw reply"] | names["draw payloads"]
    assert leased <= history.leased
    assert not names["draw request"] & history.leased
    assert not leased & history.acknowledged, "nobody knew these leases"
    assert len(ledgers.open_draws) == swarm.landed.of("draw")

    assert names["acknowledge reply"] <= history.acknowledged
    assert not names["acknowledge request"] & history.acknowledged


# --- replies that are lost ----------------------------------------------------------------------


@pytest.fixture
async def replay(server: EmbeddedRedis) -> AsyncIterator[RedisReplay]:
    store = RedisReplay(server.url, f"test-{uuid.uuid4().hex}", CONFIG)
    yield store
    await store.close()


class Thief:
    """A proxy. Once armed, it lets the next script through, keeps the reply and cuts the line."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.is_armed = False
        self.num_stolen = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_connection("127.0.0.1", self._port)
        is_marked = False

        async def carry_replies() -> None:
            while (data := await from_redis.read(2**16)) and not is_marked:
                writer.write(data)
            self.num_stolen += is_marked
            writer.close()
            to_redis.close()

        replies = asyncio.create_task(carry_replies())
        while data := await reader.read(2**20):
            if self.is_armed and b"EVALSHA" in data:
                self.is_armed, is_marked = False, True
            to_redis.write(data)
        to_redis.close()
        await replies


async def one_step(replay: Replay, before: Callable[[str], None] = lambda name: None) -> None:
    """Admit two groups, add them, draw, acknowledge; `before` each it is told which."""
    before("admit")
    slots = await replay.admit(2, V0, 5.0)
    before("add")
    for slot in slots:
        await replay.add(slot, build_group(slot))
    before("draw")
    lease = await replay.draw(5.0)
    before("acknowledge")
    await replay.acknowledge(lease, V1)


@pytest.mark.parametrize("stolen", ["admit", "add", "draw", "acknowledge"])
async def test_a_call_whose_reply_was_lost_has_one_effect(server, replay, stolen):
    await one_step(replay)  # from now on Redis knows the scripts by their names
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    thief = Thief(port)
    proxy = await asyncio.start_server(thief.serve, "127.0.0.1", 0)
    url = server.url.replace(str(port), str(proxy.sockets[0].getsockname()[1]))
    behind = RedisReplay(url, f"test-{uuid.uuid4().hex}", CONFIG)

    def arm(name: str) -> None:
        thief.is_armed = name == stolen

    async with asyncio.timeout(20):
        await one_step(behind, arm)
    stats = await behind.stats()
    assert thief.num_stolen == 1
    assert (stats.num_admitted, stats.num_added, stats.num_drawn, stats.num_trained) == (2, 2, 2, 2)
    assert (stats.num_slots, stats.num_leased, stats.num_ready, stats.num_bytes) == (0, 0, 0, 0)
    await behind.close()
    proxy.close()


async def test_steps_are_counted_once_while_connections_are_cut_all_the_time(replay, admin):
    async def cut() -> None:
        while True:
            await asyncio.to_thread(admin.client_kill_filter, _type="normal", skipme=True)
            await asyncio.sleep(0.005)

    cutting = asyncio.create_task(cut())
    async with asyncio.timeout(60):
        for version in range(50):
            for slot in await replay.admit(2, PolicyVersion(version), 20.0):
                await replay.add(slot, build_group(slot))
            await replay.acknowledge(await replay.draw(20.0), PolicyVersion(version + 1))
    cutting.cancel()
    await asyncio.wait({cutting})
    stats = await replay.stats()
    assert (stats.num_admitted, stats.num_added, stats.num_drawn, stats.num_trained) == (100,) * 4


# --- a server that refuses ----------------------------------------------------------------------


@pytest.mark.parametrize("room", [-1, 30_000], ids=["payload refused", "script refused"])
async def test_a_full_redis_refuses_in_words_stores_no_half_group_and_recovers(replay, admin, room):
    first, second = await replay.admit(2, V0, 1.0)
    await replay.add(first, build_group(first))
    admin.set("ballast", b"x" * 2_000_000)
    before = await replay.stats()
    admin.config_set("maxmemory", admin.info("memory")["used_memory"] + room)
    try:
        with pytest.raises(StoreError, match=r"is full: .*raise maxmemory or lower max_groups"):
            await replay.add(second, build_group(second, num_tokens=40_000))
        assert (await replay.stats()).outstanding == before.outstanding
        assert await replay.group_ids() == [first.slot_id]
        assert admin.ttl(f"{replay.buffer.prefix}payload:{second.slot_id}") != -1
        admin.delete("ballast")
        await replay.add(second, build_group(second, num_tokens=40_000))
    finally:
        admin.config_set("maxmemory", 0)
    assert {g.group_id for g in (await replay.draw(1.0)).groups} == {first.slot_id, second.slot_id}


async def test_a_full_redis_lets_the_learner_train_which_makes_room(replay, admin):
    for slot in await replay.admit(2, V0, 1.0):
        await replay.add(slot, build_group(slot))
    admin.config_set("maxmemory", 1)
    try:
        await replay.acknowledge(await replay.draw(1.0), V1)
    finally:
        admin.config_set("maxmemory", 0)
    assert (await replay.stats()).num_trained == 2


async def test_a_read_only_replica_is_unavailable_and_named(server, tmp_path: Path):
    master = urlsplit(server.admin_url)
    with EmbeddedRedis.start(tmp_path) as other, redis.Redis.from_url(other.admin_url) as follower:
        follower.config_set("masteruser", master.username)
        follower.config_set("masterauth", master.password)
        follower.execute_command("REPLICAOF", "127.0.0.1", master.port)
        replay = RedisReplay(other.url, "run", CONFIG, retry_s=0.3)
        with pytest.raises(StoreUnavailable, match=r"read-only replica.*must lead to the master"):
            await replay.admit(1, V0, 1.0)
        await replay.close()


async def test_a_busy_redis_is_waited_for(replay, admin, server):
    admin.config_set("lua-time-limit", 20)
    long = "local t = tonumber(redis.call('TIME')[1]) repeat until redis.call('TIME')[1] - t >= 2"
    with redis.Redis.from_url(server.admin_url) as other:
        busy = threading.Thread(target=other.eval, args=(long, 0))
        busy.start()
        await asyncio.sleep(0.2)
        with pytest.raises(redis.ResponseError, match="BUSY"):
            admin.get("key")
        assert len(await replay.admit(2, V0, 5.0)) == 2
        busy.join(10)
    admin.config_set("lua-time-limit", 5000)
    assert (await replay.stats()).num_admitted == 2


# --- a clock that is set ------------------------------------------------------------------------


@pytest.fixture
def our_clock() -> Iterator[None]:
    with scripts_on_our_clock():
        yield


async def half_done(replay: RedisReplay) -> tuple[Slot, Lease]:
    """A slot and a lease that are held; one group is ready, two are leased."""
    held, *others = await replay.admit(4, V0, 0)
    for slot in others:
        await replay.add(slot, build_group(slot))
    return held, await replay.draw(0)


async def test_a_clock_set_back_an_hour_makes_nothing_last_longer(our_clock, server, admin):
    set_clock(admin, 0)
    replay = RedisReplay(server.url, f"test-{uuid.uuid4().hex}", CONFIG)
    await half_done(replay)
    set_clock(admin, -3600)
    with pytest.raises(WaitTimeout):
        await replay.draw(0)
    set_clock(admin, -3600 + CONFIG.lease_timeout_s - 1)
    stats = await replay.stats()
    assert (stats.num_slots, stats.num_leased, stats.num_slots_expired) == (0, 2, 1)
    set_clock(admin, -3600 + CONFIG.lease_timeout_s)
    stats = await replay.stats()
    assert (stats.num_leased, stats.num_ready, stats.num_leases_expired) == (0, 3, 1)
    await replay.close()


@pytest.mark.parametrize("steps_s", [(3600,), (-3600, 0), (-3600, 3600)])
async def test_a_clock_set_forward_ends_what_is_held_and_loses_nothing(
    our_clock, server, admin, steps_s
):
    set_clock(admin, 0)
    replay = RedisReplay(server.url, f"test-{uuid.uuid4().hex}", CONFIG)
    slot, lease = await half_done(replay)
    for seconds in steps_s[:-1]:
        set_clock(admin, seconds)
        with pytest.raises(WaitTimeout):
            await replay.draw(0)
    set_clock(admin, steps_s[-1])
    with pytest.raises(SlotExpired):
        await replay.add(slot, build_group(slot))
    with pytest.raises(LeaseExpired):
        await replay.acknowledge(lease, V1)
    stats = await replay.stats()
    assert (stats.num_slots, stats.num_leased, stats.num_ready, stats.dropped) == (0, 0, 3, {})
    assert {g.group_id for g in (await replay.draw(0)).groups} == {g.group_id for g in lease.groups}
    await replay.close()
