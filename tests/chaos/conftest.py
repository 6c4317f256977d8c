"""A Redis of our own for tests, and processes around it that are killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from leeway.replay.config import ReplayConfig
from leeway.replay.server import EmbeddedRedis
from tests.chaos.swarm import Swarm


@pytest.fixture
def build_swarm(tmp_path: Path) -> Iterator[Callable[[ReplayConfig, int], Swarm]]:
    swarms: list[Swarm] = []

    def build(config: ReplayConfig, seed: int) -> Swarm:
        swarms.append(Swarm(tmp_path, config, seed))
        return swarms[-1]

    yield build
    for swarm in swarms:
        swarm.end()
        swarm.server.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def admin(server: EmbeddedRedis) -> Iterator[Any]:
    """A client of our own, past the store."""
    with redis.Redis.from_url(server.admin_url) as client:
        yield client
