"""Redis and memory give the same answers to the same calls."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from leeway.replay.config import ReplayConfig, StalenessPolicy
from leeway.replay.errors import SlotExpired, WaitTimeout
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.store import Lease, Replay, Slot
from leeway.replay.synthetic import build_group


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as running:
        yield running


class Twins:
    """The same calls to both stores. Slots and leases are named by their order."""

    def __init__(self, url: str, seed: int, policy: StalenessPolicy) -> None:
        config = ReplayConfig(
            groups_per_step=2,
            max_staleness=2,
            staleness_policy=policy,
            max_groups=9,
            max_draws=2,
        )
        self.is_exact = policy == "exact"
        run = f"test-{uuid.uuid4().hex}"
        self.stores: tuple[Replay, Replay] = (RedisReplay(url, run, config), MemoryReplay(config))
        self.rng = random.Random(seed)
        self.learner = 0
        self.slots: list[tuple[Slot, Slot]] = []
        self.leases: list[tuple[Lease, Lease]] = []

    async def both(self, call: Callable[[int, Replay], Awaitable[Any]]) -> tuple[Any, Any] | None:
        """Results of both, or None when both refused with the same words."""
        results = [await self.attempt(call(i, store)) for i, store in enumerate(self.stores)]
        if any(isinstance(result, Exception) for result in results):
            assert _words(results[0]) == _words(results[1])
            return None
        return results[0], results[1]

    async def attempt(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except (WaitTimeout, SlotExpired) as error:
            return error

    async def step(self) -> None:
        kinds = ("admit", "add", "add", "drop", "draw", "finish", "release", "restore")
        await getattr(self, self.rng.choices(kinds, (5, 5, 5, 1, 5, 5, 2, 0.3))[0])()
        redis_stats, memory_stats = [await store.stats() for store in self.stores]
        even = {"num_bytes": 0, "wait_room_s": 0, "wait_data_s": 0}
        assert msgspec.structs.replace(redis_stats, **even) == msgspec.structs.replace(
            memory_stats, **even
        )
        self.learner = memory_stats.learner_version

    async def admit(self) -> None:
        lag = self.rng.choice((0, 0, 0, 1, -1)) if self.is_exact else self.rng.randint(0, 3)
        version = PolicyVersion(max(0, self.learner - lag))
        n = self.rng.randint(1, 4)
        granted = await self.both(lambda i, store: store.admit(n, version, 0))
        self.slots += zip(*granted, strict=True) if granted else []

    async def add(self) -> None:
        if self.slots:
            pair = self.slots.pop(self.rng.randrange(len(self.slots)))
            newest = pair[0].version + (0 if self.is_exact else self.rng.randint(0, 1))
            await self.both(lambda i, store: store.add(pair[i], build_group(pair[i], newest, 1, 8)))

    async def drop(self) -> None:
        if self.slots:
            pair = self.slots.pop()
            await self.both(lambda i, store: store.drop(pair[i], "test"))

    async def draw(self) -> None:
        drawn = await self.both(lambda i, store: store.draw(0))
        if drawn:
            assert drawn[0].version == drawn[1].version
            assert drawn[0].ramp_version == drawn[1].ramp_version
            versions = [[g.oldest_version for g in lease.groups] for lease in drawn]
            assert versions[0] == versions[1]
            self.leases.append(drawn)

    async def finish(self) -> None:
        if self.leases:
            pair, version = self.leases.pop(0), PolicyVersion(self.learner + 1)
            await self.both(lambda i, store: store.acknowledge(pair[i], version))

    async def release(self) -> None:
        if self.leases:
            pair = self.leases.pop(self.rng.randrange(len(self.leases)))
            await self.both(lambda i, store: store.release(pair[i]))

    async def restore(self) -> None:
        version = PolicyVersion(max(0, self.learner - self.rng.randint(0, 2)))
        dropped = await self.both(lambda i, store: store.restore_version(version))
        assert dropped is not None and dropped[0] == dropped[1]
        self.leases.clear()


@pytest.mark.parametrize("policy", ["pace", "exact"])
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_redis_and_memory_agree_on_random_sequences_of_calls(server, seed, policy):
    twins = Twins(server.url, seed, policy)
    for _ in range(500 if policy == "exact" else 250):
        await twins.step()
    assert twins.learner > 5
    for store in twins.stores:
        await store.close()


def _words(result: object) -> str:
    """What was said, without ids and seconds."""
    return re.sub(r"\b[0-9a-f]{32}\b|in [0-9.]+ s", "", repr(result))
