"""Fixtures of the contract tests: one embedded Redis for the session, a run of its own per test."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from leeway.replay.config import ReplayConfig
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.redis_store import RedisReplay
from leeway.replay.server import EmbeddedRedis
from leeway.replay.store import Replay

BuildReplay = Callable[..., Replay]


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(params=["memory", "redis"])
async def build_replay(
    request: pytest.FixtureRequest, redis_url: str
) -> AsyncIterator[BuildReplay]:
    """A builder of empty buffers from ReplayConfig settings; 2 groups a step unless told."""
    closers: list[Callable[[], Awaitable[None]]] = []

    def build(**settings: object) -> Replay:
        config = ReplayConfig.model_validate({"groups_per_step": 2, "max_staleness": 1, **settings})
        run = f"test-{uuid.uuid4().hex}"
        is_memory = request.param == "memory"
        replay = MemoryReplay(config) if is_memory else RedisReplay(redis_url, run, config)
        closers.append(replay.close)
        return replay

    yield build
    for close in closers:
        await close()
