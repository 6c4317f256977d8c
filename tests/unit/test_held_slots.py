"""What a rollout worker held when it was killed, comes back when its successor starts."""

from __future__ import annotations

from typing import Any

import pytest

from leeway.replay.config import ReplayConfig
from leeway.replay.errors import SlotExpired, StoreUnavailable
from leeway.replay.held_slots import REASON, HeldSlots
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.synthetic import build_group

V0 = PolicyVersion(0)


class Board:
    def __init__(self) -> None:
        self.sections: dict[str, dict[str, Any]] = {}
        self.is_away = False

    async def put(self, section: str, value: dict[str, Any]) -> None:
        if self.is_away:
            raise StoreUnavailable("no answer")
        self.sections[section] = value

    async def get_all(self) -> dict[str, dict[str, Any]]:
        return self.sections


@pytest.fixture
def replay() -> MemoryReplay:
    return MemoryReplay(ReplayConfig(groups_per_step=4, max_staleness=0))


async def test_a_successor_gives_back_what_the_dead_held_and_keeps_what_it_filled(
    replay: MemoryReplay,
):
    board = Board()
    dead = HeldSlots(replay, board, "worker-0")
    first, second = await dead.admit(2, V0, 1.0)
    [third] = await dead.admit(1, V0, 1.0)
    await dead.add(second, build_group(second))

    successor = HeldSlots(replay, board, "worker-0")
    assert await successor.return_those_of_the_dead() == 3
    stats = await replay.stats()
    assert (stats.num_slots, stats.num_ready, stats.dropped) == (0, 1, {REASON: 2})
    for slot in (first, third):
        with pytest.raises(SlotExpired):
            await dead.add(slot, build_group(slot))
    assert await HeldSlots(replay, board, "worker-0").return_those_of_the_dead() == 0


async def test_the_slots_of_other_workers_stay(replay: MemoryReplay):
    board = Board()
    await HeldSlots(replay, board, "worker-1").admit(2, V0, 1.0)
    assert await HeldSlots(replay, board, "worker-0").return_those_of_the_dead() == 0
    assert (await replay.stats()).num_slots == 2


async def test_what_was_filled_dropped_or_has_expired_is_written_down_no_more(
    replay: MemoryReplay,
):
    board = Board()
    worker = HeldSlots(replay, board, "worker-0")
    first, second, third = await worker.admit(3, V0, 1.0)
    await worker.add(first, build_group(first))
    await worker.drop(second, "timeout")
    await replay.drop(third, "timeout")
    with pytest.raises(SlotExpired):
        await worker.add(third, build_group(third))
    [last] = await worker.admit(1, V0, 1.0)
    [written] = board.sections["slots:worker-0"]["slots"]
    assert written["slot_id"] == last.slot_id


async def test_slots_are_granted_though_the_board_is_away(replay: MemoryReplay):
    board = Board()
    board.is_away = True
    assert len(await HeldSlots(replay, board, "worker-0").admit(2, V0, 1.0)) == 2
