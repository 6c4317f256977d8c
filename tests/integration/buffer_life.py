"""What every arrangement of Redis must do for a buffer: two steps of its life."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable

from leeway.replay.codec import encode
from leeway.replay.config import ReplayConfig
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import Group, PolicyVersion
from leeway.replay.store import Lease, Replay, Slot
from leeway.replay.synthetic import build_group

CONFIG = ReplayConfig(groups_per_step=2, max_staleness=1)
AMPLE_S = 20.0


def v(version: int) -> PolicyVersion:
    return PolicyVersion(version)


async def admit(replay: Replay, n: int, version: int = 0) -> list[Slot]:
    """`n` slots, however many each call grants."""
    slots: list[Slot] = []
    while len(slots) < n:
        slots += await replay.admit(n - len(slots), v(version), AMPLE_S)
    return slots


async def fill(replay: Replay, n: int, version: int = 0) -> dict[str, bytes]:
    """Admit and add `n` groups: by id, as they are stored."""
    groups: dict[str, Group] = {}
    for number, slot in enumerate(await admit(replay, n, version)):
        groups[slot.slot_id] = build_group(slot, seed=number)
        await replay.add(slot, groups[slot.slot_id])
    return as_stored(groups.values())


def as_stored(groups: Iterable[Group]) -> dict[str, bytes]:
    return {group.group_id: encode(group) for group in groups}


async def live(
    url: str, before_draw: Callable[[], Awaitable[None]] | None = None, run: str | None = None
) -> None:
    """Two steps: in the first the draw waits for the groups, in the second `before_draw` comes
    between adding and drawing. `run` None: a name of its own."""
    replay = RedisReplay(url, run or f"life-{uuid.uuid4().hex}", CONFIG)
    try:
        waiting = asyncio.create_task(replay.draw(AMPLE_S))
        await asyncio.sleep(0.1)
        added = await fill(replay, 2)
        await _train(replay, await waiting, added)
        added = await fill(replay, 2, version=1)
        if before_draw:
            await before_draw()
        await _train(replay, await replay.draw(AMPLE_S), added)
        stats = await replay.stats()
        assert (stats.num_admitted, stats.num_added, stats.num_trained) == (4, 4, 4)
        assert (stats.learner_version, stats.num_bytes) == (2, 0)
    finally:
        await replay.close()


async def _train(replay: Replay, lease: Lease, added: dict[str, bytes]) -> None:
    assert as_stored(lease.groups) == added
    await replay.acknowledge(lease, v(lease.version + 1))
