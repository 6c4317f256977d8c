"""Groups of an export that are stored again: what limiter, callers and a second try see of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from leeway.replay.codec import encode
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import WaitTimeout
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.store import Slot
from leeway.replay.stored import StoredGroup
from leeway.replay.synthetic import build_group

V0, V1 = PolicyVersion(0), PolicyVersion(1)
SOON_S = 0.05
Build = Callable[..., RedisReplay]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
async def build(server: EmbeddedRedis) -> AsyncIterator[Build]:
    stores: list[RedisReplay] = []

    def build(**settings: object) -> RedisReplay:
        usual = {"groups_per_step": 2, "max_staleness": 3}
        config = ReplayConfig.model_validate({**usual, **settings})
        stores.append(RedisReplay(server.url, f"test-{uuid.uuid4().hex}", config))
        return stores[-1]

    yield build
    for store in stores:
        await store.close()


async def put_back(replay: RedisReplay, group_id: str, draws: int = 0) -> str:
    payload = encode(build_group(Slot(group_id, V0)))
    shape = [(2, 12), (2, 12)]
    record = StoredGroup(0, 0, 1, draws, 0, len(payload), 0.5, shape)
    return await replay.buffer.put_back(group_id, record, payload)


async def test_a_group_put_back_counts_as_an_insert_for_admission(build: Build):
    replay = build(limiter="queue", queue_size=3)
    assert [await put_back(replay, name) for name in ("one", "two")] == ["added", "added"]
    # inserts - samples = 2 of 3.
    assert len(await replay.admit(9, V0, SOON_S)) == 1
    with pytest.raises(WaitTimeout, match="2 groups inserted and 1 being played, 0 sampled"):
        await replay.admit(1, V0, SOON_S)


async def test_a_group_put_back_counts_as_an_insert_for_a_draw(build: Build):
    replay = build(limiter="queue", queue_size=3)
    await put_back(replay, "one"), await put_back(replay, "two")
    lease = await replay.draw(SOON_S)
    assert {group.group_id for group in lease.groups} == {"one", "two"}


async def test_steps_that_have_trained_a_group_put_back_count_as_samples(build: Build):
    replay = build(limiter="queue", queue_size=3, max_draws=3, groups_per_step=1)
    await put_back(replay, "one", draws=1), await put_back(replay, "two", draws=2)
    # 2 inserts, 3 samples: one more sampled would be 2 - 4.
    with pytest.raises(WaitTimeout, match="2 exist, 2 were inserted, 3 sampled"):
        await replay.draw(SOON_S)
    assert len(await replay.admit(9, V0, SOON_S)) == 4


async def test_a_group_put_back_twice_after_a_lost_reply_is_stored_and_counted_once(
    build: Build,
):
    replay = build(limiter="queue", queue_size=3)
    assert await put_back(replay, "one") == "added"
    once = await replay.stats()
    assert await put_back(replay, "one") == "held"
    assert await replay.stats() == once
    assert (once.num_ready, once.outstanding) == (1, {0: 1})
    # One insert, so two more fit into the queue of three.
    assert len(await replay.admit(9, V0, SOON_S)) == 2


async def test_a_group_put_back_while_it_is_leased_stays_the_learners(build: Build):
    replay = build(groups_per_step=1)
    await put_back(replay, "one")
    lease = await replay.draw(SOON_S)
    assert await put_back(replay, "one") == "held"
    assert (await replay.stats()).num_ready == 0
    await replay.acknowledge(lease, V1)
    assert (await replay.stats()).num_bytes == 0


async def test_a_blocked_draw_goes_on_when_a_group_put_back_fills_its_step(build: Build):
    replay = build()
    waiting = asyncio.create_task(replay.draw(5.0))
    await asyncio.sleep(SOON_S)
    await put_back(replay, "one"), await put_back(replay, "two")
    lease = await asyncio.wait_for(waiting, 1.0)
    assert {group.group_id for group in lease.groups} == {"one", "two"}
