"""A buffer in six shards through its whole life, on a Redis Cluster of three nodes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import pytest

from leeway.replay.archive_buffer import OpenBuffer, export_groups, import_groups
from leeway.replay.config import ReplayConfig
from leeway.replay.connection import BLOCK_MS
from leeway.replay.errors import LeaseExpired, SlotExpired, StoreUnavailable, WaitTimeout
from leeway.replay.keys import replay_prefix
from leeway.replay.sharded_store import HAND_BACK_S, connect_replay
from leeway.replay.store import Replay
from leeway.replay.synthetic import build_group

from . import redis_servers
from .buffer_life import AMPLE_S, admit, as_stored, fill, v
from .redis_servers import Server, cluster_url, node_of

NUM_SHARDS = 6
CONFIG = ReplayConfig(groups_per_step=6, max_staleness=3, num_shards=NUM_SHARDS, max_groups=96)
RETRY_S = 2.0


def but(**changes: object) -> ReplayConfig:
    return ReplayConfig.model_validate(CONFIG.model_dump() | changes)


def nodes_of(run: str) -> list[int]:
    """The node of each shard."""
    return [node_of(replay_prefix(run, shard)) for shard in range(NUM_SHARDS)]


def run_on_every_node() -> str:
    """A name whose six tags fall on all three nodes; about 3 of 4 do."""
    while True:
        run = f"test-{uuid.uuid4().hex}"
        if set(nodes_of(run)) == {0, 1, 2}:
            return run


def stored_on(node: Server, run: str) -> set[str]:
    """Ids of the groups of the run that a node holds."""
    keys = [key.decode() for key in node.command("KEYS", f"leeway:{{{run}*payload:*")]
    return {key.rpartition(":")[2] for key in keys}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with redis_servers.cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def run() -> str:
    return run_on_every_node()


@pytest.fixture
async def replay(nodes: list[Server], run: str) -> AsyncIterator[Replay]:
    opened = connect_replay(cluster_url(nodes), run, CONFIG)
    yield opened
    await opened.close()


async def test_each_node_holds_the_groups_of_its_shards(nodes, run, replay):
    slots = await admit(replay, 12)
    for slot in slots:
        await replay.add(slot, build_group(slot))
    for number, node in enumerate(nodes):
        of_node = {s.slot_id for s in slots if nodes_of(run)[s.shard] == number}
        assert stored_on(node, run) == of_node != set()


async def test_steps_take_a_group_of_every_shard_and_free_what_they_trained(nodes, run, replay):
    for version in range(3):
        added = await fill(replay, 6, version)
        lease = await replay.draw(AMPLE_S)
        assert (lease.version, as_stored(lease.groups)) == (version, added)
        await replay.acknowledge(lease, v(version + 1))
        await replay.acknowledge(lease, v(version + 1))
    stats = await replay.stats()
    assert (stats.num_admitted, stats.num_added, stats.num_trained) == (18, 18, 18)
    assert (stats.learner_version, stats.num_bytes, stats.outstanding) == (3, 0, {})
    assert [stored_on(node, run) for node in nodes] == [set(), set(), set()]


async def test_a_draw_wakes_by_adds_on_every_node(replay):
    waiting = asyncio.create_task(replay.draw(AMPLE_S))
    await asyncio.sleep(0.2)
    added = await fill(replay, 6)
    assert as_stored((await waiting).groups) == added


async def test_what_is_released_is_drawn_again(replay):
    added = await fill(replay, 6)
    lease = await replay.draw(AMPLE_S)
    assert (await replay.stats()).num_leased == 6
    await replay.release(lease)
    stats = await replay.stats()
    assert (stats.num_leased, stats.num_ready) == (0, 6)
    assert as_stored((await replay.draw(AMPLE_S)).groups) == added
    assert await replay.restore_version(v(0)) == 0


async def test_slots_of_every_shard_are_dropped_once_each(replay):
    slots = await admit(replay, 6)
    assert {slot.shard for slot in slots} == set(range(NUM_SHARDS))
    for slot in slots * 2:
        await replay.drop(slot, "test")
    stats = await replay.stats()
    assert (stats.num_slots, stats.dropped) == (0, {"test": 6})


async def test_slots_and_leases_expire_on_every_node(nodes, run, replay):
    hasty = connect_replay(cluster_url(nodes), run, but(slot_timeout_s=0.2, lease_timeout_s=0.2))
    try:
        slots = await admit(hasty, 6)
        await asyncio.sleep(0.25)
        for slot in slots:
            with pytest.raises(SlotExpired):
                await replay.add(slot, build_group(slot))
        added = await fill(replay, 6)
        lease = await hasty.draw(AMPLE_S)
        await asyncio.sleep(0.25)
        with pytest.raises(LeaseExpired):
            await hasty.acknowledge(lease, v(1))
    finally:
        await hasty.close()
    stats = await replay.stats()
    # A step takes a part of every shard, so its lease is one lease of each.
    assert (stats.num_slots_expired, stats.num_leases_expired, stats.num_trained) == (6, 6, 0)
    assert as_stored((await replay.draw(AMPLE_S)).groups) == added


async def test_priorities_decide_on_every_node(nodes, run):
    replay = connect_replay(cluster_url(nodes), run, but(draw_by="prioritised"))
    try:
        slots = await admit(replay, 12)
        for slot in slots:
            await replay.add(slot, build_group(slot))
        last = {slot.shard: slot.slot_id for slot in slots}.values()  # two of each shard
        priorities = {slot.slot_id: float(slot.slot_id in last) for slot in slots}
        assert await replay.update_priorities(priorities | {"unknown": 1.0}) == 12
        assert {group.group_id for group in (await replay.draw(AMPLE_S)).groups} == set(last)
    finally:
        await replay.close()


async def test_a_pause_is_told_to_who_waits_and_ends_for_who_comes_later(replay):
    await fill(replay, CONFIG.window)
    waiting = asyncio.create_task(replay.admit(1, v(0), AMPLE_S))
    await asyncio.sleep(0.2)
    await replay.pause_admission(True)
    with pytest.raises(WaitTimeout, match="admission is stopped"):
        await waiting
    assert (await replay.stats()).admission_paused
    later = asyncio.create_task(replay.admit(1, v(1), AMPLE_S))
    lease = await replay.draw(AMPLE_S)
    await replay.acknowledge(lease, v(1))
    await asyncio.sleep(0.5)
    assert not later.done()
    await replay.pause_admission(False)
    assert len(await later) == 1


async def test_a_run_that_is_exported_and_imported_lies_on_every_node(nodes, run, tmp_path):
    url, file = cluster_url(nodes), tmp_path / "buffer"
    source = OpenBuffer(url, run, CONFIG)
    target = OpenBuffer(url, copy := run_on_every_node(), CONFIG)
    try:
        added = await fill(source.replay, 12)
        lease = await source.replay.draw(AMPLE_S)
        assert (await export_groups(source, file)).num_groups == 12
        imported = await import_groups(target, file)
        assert (imported.num_groups, imported.skipped, imported.fault) == (12, {}, None)
        assert (await import_groups(target, file)).skipped == {"stored": 12}
        held = [stored_on(node, copy) for node in nodes]
        assert set[str]().union(*held) == set(added) and all(held)
        first, second = [await target.replay.draw(AMPLE_S) for _ in range(2)]
        assert as_stored((*first.groups, *second.groups)) == added
        await source.replay.release(lease)
    finally:
        await source.close()
        await target.close()


async def test_a_node_that_dies_is_told_within_the_time_of_retries(tmp_path: Path, run: str):
    with redis_servers.cluster(tmp_path) as nodes:
        replay = connect_replay(cluster_url(nodes), run, CONFIG, RETRY_S)
        try:
            await fill(replay, 6)
            slots = await admit(replay, 6)
            # A caller begins at the shard behind the one before, which is to be on the dead node.
            slots += await replay.admit(1, v(0), AMPLE_S)
            while nodes_of(run)[(slots[-1].shard + 1) % NUM_SHARDS] != 2:
                slots += await replay.admit(1, v(0), AMPLE_S)
            lease = await replay.draw(AMPLE_S)
            draws = [asyncio.create_task(_told(replay.draw(AMPLE_S)))]
            await asyncio.sleep(0.2)
            nodes[2].kill()
            lost = next(slot for slot in slots if nodes_of(run)[slot.shard] == 2)
            calls = (
                replay.admit(1, v(0), AMPLE_S),
                replay.add(lost, build_group(lost)),
                replay.drop(lost, "test"),
                replay.acknowledge(lease, v(1)),
                replay.stats(),
            )
            draws.append(asyncio.create_task(_told(replay.draw(AMPLE_S))))
            for took_s in await asyncio.gather(*map(_told, calls)):
                assert took_s < RETRY_S + 3
            # A blocking read of a node that lives ends before the others are asked.
            for took_s in await asyncio.gather(*draws):
                assert took_s < BLOCK_MS / 1000 + RETRY_S + HAND_BACK_S + 3
        finally:
            await replay.close()


async def _told(call: Awaitable[object]) -> float:
    """Seconds until the call says that Redis does not answer, and where."""
    since = time.monotonic()
    with pytest.raises(
        StoreUnavailable, match=r"at 127\.0\.0\.1:\d+,.*( is down|no answer|reachable)"
    ):
        await call
    return time.monotonic() - since
