"""Deadlines while Redis says nothing, and what becomes of the calls that were under way."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from leeway.replay.config import ReplayConfig
from leeway.replay.errors import NoAnswer, StoreUnavailable, WaitTimeout
from leeway.replay.late import ANSWER_S
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.sharded_store import connect_replay
from leeway.replay.store import Replay
from leeway.replay.synthetic import build_group

CONFIG = ReplayConfig(groups_per_step=2, max_staleness=1, max_returns=0, lookahead="full")
V0 = PolicyVersion(0)
AMPLE_S = 10.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
async def replay(server: EmbeddedRedis) -> AsyncIterator[RedisReplay]:
    store = RedisReplay(server.url, f"test-{uuid.uuid4().hex}", CONFIG)
    yield store
    await store.close()


def changed(**keys: Any) -> ReplayConfig:
    return CONFIG.model_copy(update=keys)


@contextmanager
def stopped(server: EmbeddedRedis) -> Iterator[None]:
    """Redis is there, takes what is sent, and answers nothing."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.fixture
def silent_url() -> Iterator[str]:
    """Of a socket that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}/0"


@pytest.fixture
def closed_url() -> str:
    return "redis://127.0.0.1:9/0"


def draws(replay: Replay):
    return replay.draw(0.5)


def admits(replay: Replay):
    return replay.admit(1, V0, 0.5)


@pytest.mark.parametrize("call", [draws, admits])
@pytest.mark.parametrize("url", ["silent_url", "closed_url"])
async def test_a_deadline_of_half_a_second_holds_where_redis_never_answers(
    call: Callable[[Replay], object], url: str, request: pytest.FixtureRequest
):
    replay = RedisReplay(request.getfixturevalue(url), "run", CONFIG)
    started = time.monotonic()
    with pytest.raises(NoAnswer, match=r"no answer from Redis at .* in 2\.\d s; waiting for it"):
        await call(replay)
    assert 0.5 + ANSWER_S <= time.monotonic() - started < 0.5 + ANSWER_S + 1.0
    await replay.close()


async def test_retry_s_ends_a_call_whose_deadline_is_later(closed_url):
    replay = RedisReplay(closed_url, "run", CONFIG, retry_s=0.3)
    with pytest.raises(StoreUnavailable):
        await replay.draw(60.0)
    await replay.close()


async def test_a_wait_for_groups_ends_in_time_where_redis_falls_silent_meanwhile(replay, server):
    waiting = asyncio.create_task(replay.draw(1.0))
    await asyncio.sleep(0.3)
    started = time.monotonic()
    with stopped(server):
        with pytest.raises(WaitTimeout, match="no rollout worker holds a slot"):
            await waiting  # as Redis said last
        assert time.monotonic() - started < 1.0 + ANSWER_S + 1.0


async def test_a_step_that_was_leased_behind_the_deadline_is_the_next_draw(replay, server):
    for slot in await replay.admit(4, V0, 1.0):
        await replay.add(slot, build_group(slot))
    with stopped(server), pytest.raises(NoAnswer):
        await replay.draw(0.0)
    lease = await replay.draw(AMPLE_S)
    stats = await replay.stats()
    assert (lease.version, stats.num_leased, stats.num_ready) == (0, 2, 2)
    await replay.acknowledge(lease, PolicyVersion(1))


async def test_a_step_that_was_leased_behind_the_deadline_and_has_run_out_is_no_draw(server):
    """Another learner has it by then."""
    run, config = f"test-{uuid.uuid4().hex}", changed(lease_timeout_s=0.5, max_returns=9)
    late, other = (RedisReplay(server.url, run, config) for _ in range(2))
    for slot in await late.admit(2, V0, 1.0):
        await late.add(slot, build_group(slot))
    with stopped(server), pytest.raises(NoAnswer):
        await late.draw(0.0)
    held = await other.draw(AMPLE_S)
    with pytest.raises(WaitTimeout, match="no step of 2 groups for version 1"):
        await late.draw(0.0)
    await other.acknowledge(held, PolicyVersion(1))
    await late.close()
    await other.close()


async def test_a_step_whose_lease_ran_out_while_it_was_read_is_drawn_again(server, monkeypatch):
    replay = RedisReplay(
        server.url, f"test-{uuid.uuid4().hex}", changed(lease_timeout_s=0.5, max_returns=9)
    )
    for slot in await replay.admit(2, V0, 1.0):
        await replay.add(slot, build_group(slot))
    read, delays = replay.buffer.read, [0.7]

    async def slowly(leased: Any) -> Any:
        await asyncio.sleep(delays.pop() if delays else 0)
        return await read(leased)

    monkeypatch.setattr(replay.buffer, "read", slowly)
    lease = await replay.draw(AMPLE_S)
    assert not delays
    await replay.acknowledge(lease, PolicyVersion(1))

    for slot in await replay.admit(2, PolicyVersion(1), 1.0):
        await replay.add(slot, build_group(slot))
    delays.append(0.7)
    with pytest.raises(NoAnswer, match=r"longer to answer than the 0\.5 s for which"):
        await replay.draw(0.2)
    await replay.close()


async def test_slots_that_were_granted_behind_the_deadline_and_have_run_out_are_for_nobody(server):
    replay = RedisReplay(server.url, f"test-{uuid.uuid4().hex}", changed(slot_timeout_s=0.5))
    with stopped(server), pytest.raises(NoAnswer):
        await replay.admit(1, V0, 0.0)
    await asyncio.sleep(0.7)
    (slot,) = await replay.admit(1, V0, AMPLE_S)
    await replay.add(slot, build_group(slot))
    await replay.close()


async def test_slots_that_were_granted_behind_the_deadline_are_for_the_next_callers(replay, server):
    with stopped(server), pytest.raises(NoAnswer):
        await replay.admit(3, V0, 0.0)
    assert [len(await replay.admit(n, V0, AMPLE_S)) for n in (2, 9, 9)] == [2, 1, 1]
    assert (await replay.stats()).num_slots == 4


async def test_what_was_granted_late_and_nobody_came_for_goes_back_when_the_store_closes(server):
    run = f"test-{uuid.uuid4().hex}"
    leaving, staying = (RedisReplay(server.url, run, CONFIG) for _ in range(2))
    for slot in await leaving.admit(2, V0, 1.0):
        await leaving.add(slot, build_group(slot))
    with stopped(server):
        calls = (leaving.draw(0.0), leaving.admit(1, V0, 0.0))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [NoAnswer, NoAnswer]
    async with asyncio.timeout(AMPLE_S):
        while (found := await staying.stats()).num_leased + found.num_slots < 3:
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)
    await leaving.close()
    stats = await staying.stats()
    assert (stats.num_ready, stats.num_leased, stats.num_slots) == (2, 0, 0)
    await staying.close()


async def test_two_shards_end_their_draw_in_time_and_keep_no_lease(server):
    config = CONFIG.model_copy(update={"num_shards": 2})
    replay = connect_replay(server.url, f"test-{uuid.uuid4().hex}", config)
    for slot in await replay.admit(4, V0, 1.0):
        await replay.add(slot, build_group(slot))
    with stopped(server):
        started = time.monotonic()
        with pytest.raises(NoAnswer):
            await replay.draw(0.5)
        assert time.monotonic() - started < 0.5 + ANSWER_S + 1.0
    lease = await replay.draw(AMPLE_S)
    assert (lease.version, len(lease.groups)) == (0, 2)
    await replay.acknowledge(lease, PolicyVersion(1))
    await replay.close()
