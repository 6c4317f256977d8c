"""What a step's line says of the other side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import msgspec

from leeway.replay.config import ReplayConfig
from leeway.replay.memory_store import MemoryReplay
from leeway.services.step_records import StepRecords


async def test_a_line_has_the_sums_over_all_engines():
    board: Any = SimpleNamespace(
        get_all=AsyncMock(
            return_value={
                "policy:a": {"num_in_flight": 3, "num_tokens": 100, "busy_s": 1.5},
                "policy:b": {"num_in_flight": 4, "num_tokens": 20, "busy_s": 0.5},
                "rollout:w": {"num_in_flight": 50},
            }
        )
    )
    records = StepRecords(MagicMock(), board, MemoryReplay(ReplayConfig()), MagicMock(), 0)
    line = await records._surroundings()
    assert line["engine_requests_in_flight"] == 7
    assert (line["engine_tokens"], line["engine_busy_s"]) == (120, 2.0)


async def test_groups_and_trajectories_dropped_are_told_by_reason():
    """Two of one turn and three of four make five; the first group never reached the buffer."""
    board: Any = SimpleNamespace(get_all=AsyncMock(return_value={}))
    stats = msgspec.structs.replace(
        await MemoryReplay(ReplayConfig()).stats(),
        dropped={"timeout": 1, "overdue": 2},
        dropped_turns={"overdue": {1: 2, 4: 3}},
    )
    replay: Any = SimpleNamespace(stats=AsyncMock(return_value=stats))
    line = await StepRecords(MagicMock(), board, replay, MagicMock(), 0)._surroundings()
    assert {name: n for name, n in line.items() if name.startswith("dropped")} == {
        "dropped/timeout": 1,
        "dropped/overdue": 2,
        "dropped_trajectories/overdue": 5,
    }
