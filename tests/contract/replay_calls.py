"""Calls that tests of the replay buffer make of both stores, and stores whose time stands still."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import redis

from leeway.replay.config import ReplayConfig
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import Group, PolicyVersion
from leeway.replay.store import Lease, Replay, Slot
from leeway.replay.synthetic import build_group
from tests.chaos.replay_ledger import scripts_on_our_clock, set_clock

SOON_S: Final = 0.05
"""Deadline of a wait that is expected to fail."""
AMPLE_S: Final = 5.0
"""Deadline of a wait that is expected to succeed."""
FULL_HOUR_S: Final = 1200.0
"""When the hour changes on the clock of `Timed`, which begins 40 minutes into one."""


def v(version: int) -> PolicyVersion:
    return PolicyVersion(version)


def with_rewards(group: Group, rewards: Sequence[float]) -> Group:
    pairs = zip(group.trajectories, rewards, strict=True)
    return msgspec.structs.replace(
        group, trajectories=tuple(msgspec.structs.replace(t, reward=r) for t, r in pairs)
    )


async def put(replay: Replay, version: int = 0) -> Slot:
    """Admit one group at `version` and add it. Its rewards are 0 and 1, so its priority is 0.5."""
    (slot,) = await replay.admit(1, v(version), SOON_S)
    await replay.add(slot, with_rewards(build_group(slot), (0.0, 1.0)))
    return slot


async def train(replay: Replay) -> Lease:
    """One step: draw, acknowledge as the next version."""
    lease = await replay.draw(SOON_S)
    await replay.acknowledge(lease, v(lease.version + 1))
    return lease


def places(ids: Iterable[str], slots: Sequence[Slot]) -> list[int]:
    """Where in `slots` the groups of these ids stand."""
    place_of = {slot.slot_id: place for place, slot in enumerate(slots)}
    return [place_of[group_id] for group_id in ids]


def drawn(lease: Lease, slots: Sequence[Slot]) -> list[int]:
    return places([group.group_id for group in lease.groups], slots)


async def evicted_one_by_one(replay: Replay, slots: Sequence[Slot], version: int = 0) -> list[int]:
    """Which of the stored `slots` make room, in their order, for as many others. Those are only
    admitted, so that none of them is evicted in their place."""
    seen: list[str] = []
    for _ in slots:
        before = await replay.group_ids()
        await replay.admit(1, v(version), SOON_S)
        seen += set(before) - set(await replay.group_ids())
    return places(seen, slots)


class Timed:
    """Builds stores, all on one clock that moves when it is told to."""

    def __init__(self, url: str | None) -> None:
        """`url` of a Redis; None: stores in memory."""
        self._url = url
        self._now_s = 0.0
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._admin = None if url is None else redis.Redis.from_url(url)
        self.pass_s(0.0)

    def pass_s(self, seconds: float) -> None:
        self._now_s += seconds
        if self._admin is not None:
            set_clock(self._admin, self._now_s)

    def build(self, run: str | None = None, **settings: object) -> Replay:
        """As `build_replay` of conftest.py does. `run`: the buffer's name; None: a new one."""
        usual = {"groups_per_step": 2, "max_staleness": 1, "lookahead": "full"}
        config = ReplayConfig.model_validate({**usual, **settings})
        name = run or f"test-{uuid.uuid4().hex}"
        replay = (
            MemoryReplay(config, clock=lambda: self._now_s)
            if self._url is None
            else RedisReplay(self._url, name, config)
        )
        self._closers.append(replay.close)
        return replay

    async def close(self) -> None:
        for close in self._closers:
            await close()
        if self._admin is not None:
            self._admin.close()


@asynccontextmanager
async def timed_stores(url: str | None) -> AsyncIterator[Timed]:
    """Scripts that are sent inside read the clock of the Timed."""
    with scripts_on_our_clock():
        timed = Timed(url)
        try:
            yield timed
        finally:
            await timed.close()
