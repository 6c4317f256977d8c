"""What an admission reads where groups must go to make room: a few, however many there are."""

from __future__ import annotations

import uuid
from pathlib import Path

import redis

from leeway.replay.config import ReplayConfig
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.synthetic import build_group

VERSION = PolicyVersion(0)
NUM_GROUPS = 400
SOON_S = 5.0


async def test_an_admission_under_a_byte_budget_does_not_read_every_group(tmp_path: Path):
    size = await size_of_one(tmp_path / "one")
    with EmbeddedRedis.start(tmp_path) as server, redis.Redis.from_url(server.url) as admin:
        config = ReplayConfig(
            staleness_policy="drop",
            max_bytes=NUM_GROUPS * size,
            max_groups=2 * NUM_GROUPS,
            groups_per_step=2,
        )
        replay = RedisReplay(server.url, f"test-{uuid.uuid4().hex}", config)
        while (await replay.stats()).num_ready < NUM_GROUPS - 1:
            for slot in await replay.admit(50, VERSION, SOON_S):
                await replay.add(slot, build_group(slot))
        before = records_read(admin)
        for _ in range(3):
            for slot in await replay.admit(1, VERSION, SOON_S):
                await replay.add(slot, build_group(slot))
        assert (await replay.stats()).dropped["evicted"] >= 2
        await replay.close()
        # 64 records in one answer at most, and the one that goes: of 400.
        assert records_read(admin) - before <= 3 * 66


async def size_of_one(folder: Path) -> int:
    folder.mkdir()
    with EmbeddedRedis.start(folder) as server:
        replay = RedisReplay(server.url, "one", ReplayConfig(groups_per_step=1))
        for slot in await replay.admit(1, VERSION, SOON_S):
            await replay.add(slot, build_group(slot))
        size = (await replay.stats()).num_bytes
        await replay.close()
        return size


def records_read(admin: redis.Redis) -> int:
    """At most: Redis counts commands, and one HMGET asks for 64 records."""
    told = admin.info("commandstats")
    assert isinstance(told, dict)
    calls = {name: int(told.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in NAMES}
    return calls["hget"] + 64 * calls["hmget"]


NAMES = ("hget", "hmget")
