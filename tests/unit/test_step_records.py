"""What a step's line says of the other side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

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
