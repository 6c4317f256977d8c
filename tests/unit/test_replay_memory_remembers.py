"""The buffer in memory recognises the last REMEMBERED of what came before, and no more."""

from __future__ import annotations

import pytest

from leeway.replay import memory_buffer
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import LeaseExpired, SlotExpired
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Lease, Slot
from leeway.replay.synthetic import build_group


async def steps_of_one(num_steps: int) -> tuple[MemoryReplay, list[Slot], list[Lease]]:
    replay = MemoryReplay(ReplayConfig(groups_per_step=1))
    slots: list[Slot] = []
    leases: list[Lease] = []
    for version in range(num_steps):
        slots += await replay.admit(1, PolicyVersion(version), 0)
        await replay.add(slots[-1], build_group(slots[-1]))
        leases.append(await replay.draw(0))
        await replay.acknowledge(leases[-1], PolicyVersion(version + 1))
    return replay, slots, leases


async def test_of_three_added_groups_the_last_two_are_known_where_two_are_remembered(monkeypatch):
    monkeypatch.setattr(memory_buffer, "REMEMBERED", 2)
    replay, slots, _ = await steps_of_one(3)
    for slot in slots[1:]:
        await replay.add(slot, build_group(slot))
    with pytest.raises(SlotExpired):
        await replay.add(slots[0], build_group(slots[0]))
    assert (await replay.stats()).num_added == 3


async def test_of_three_trained_leases_the_last_two_are_known_where_two_are_remembered(monkeypatch):
    monkeypatch.setattr(memory_buffer, "REMEMBERED", 2)
    replay, _, leases = await steps_of_one(3)
    for lease in leases[1:]:
        await replay.acknowledge(lease, PolicyVersion(3))
    with pytest.raises(LeaseExpired):
        await replay.acknowledge(leases[0], PolicyVersion(1))
    assert (await replay.stats()).num_trained == 3
