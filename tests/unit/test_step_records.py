"""What stands beside a step's own numbers in its line of metrics.jsonl."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from leeway.learner.metrics import StepMetrics
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import ReplayStats
from leeway.services.config import RunConfig
from leeway.services.layout import create_run
from leeway.services.step_records import StepRecords
from tests.unit.test_prometheus import STATS


class Nobody:
    """A board without sections, a buffer, sinks and a step's numbers."""

    def __init__(self, stats: ReplayStats) -> None:
        self._stats = stats

    async def get_all(self) -> dict[str, dict[str, Any]]:
        return {}

    async def put(self, name: str, section: Mapping[str, Any]) -> None:
        return

    async def append_step(self, line: Mapping[str, Any]) -> None:
        return

    async def step(self, line: Mapping[str, Any]) -> None:
        return

    async def stats(self) -> ReplayStats:
        return self._stats

    def as_dict(self) -> dict[str, float]:
        return {"reward_mean": 0.5, "seconds": 1, "staleness_max": 0, "num_tokens_trained": 8}


def written(folder: Path, stats: ReplayStats) -> dict[str, Any]:
    """The line of one step."""
    run = create_run(RunConfig(directory=str(folder / "run")))
    around = cast("Any", Nobody(stats))
    records = StepRecords(run, around, around, around, 0)
    step = records.write(
        PolicyVersion(1), cast("StepMetrics", around), None, wait_s=1.0, waited_s={},
        publish_s=0.0, confirm_s=0.0, settings_revision=0,
    )  # fmt: skip
    asyncio.run(step)
    return json.loads(run.metrics.read_text())


def test_groups_and_trajectories_dropped_are_told_by_reason(tmp_path: Path) -> None:
    """Two of one turn and three of four make five; the first group never reached the buffer."""
    stats = msgspec.structs.replace(
        STATS, dropped={"timeout": 1, "overdue": 2}, dropped_turns={"overdue": {1: 2, 4: 3}}
    )
    line = written(tmp_path, stats)
    assert {name: n for name, n in line.items() if name.startswith("dropped")} == {
        "dropped/timeout": 1,
        "dropped/overdue": 2,
        "dropped_trajectories/overdue": 5,
    }


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
