"""What the learner tells about its steps and publishes: totals on the run board, and the sinks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from leeway.learner.weights.publisher import Published
from leeway.replay.board import RunBoard
from leeway.services.config import RunConfig
from leeway.services.layout import RunDirectory
from leeway.services.sinks.delivery import FINISH_S
from leeway.services.sinks.factory import open_sinks
from leeway.services.totals import SECTION, Totals


class Metering:
    """Rank 0 of the learner owns one."""

    def __init__(self, config: RunConfig, run: RunDirectory, board: RunBoard, step: int) -> None:
        """`step`: optimizer steps done."""
        self._run = run
        self._board = board
        self._totals = Totals(None)
        self._sinks = open_sinks(config, run, step)
        self._has_finished = False

    async def resume(self) -> None:
        """Count on behind what an earlier process of the run has counted."""
        self._totals = Totals((await self._board.get_all()).get(SECTION))

    async def step(self, line: Mapping[str, Any]) -> None:
        """One optimizer step, as in metrics.jsonl."""
        self._totals.count_step(line)
        await self._board.put(SECTION, self._totals.section())
        self._sinks.step(int(line["step"]), line)
        await self._tell_failures()

    async def publish(self, published: Published) -> None:
        """A publish that engines have answered."""
        self._totals.count_publish(published)
        await self._board.put(SECTION, self._totals.section())

    async def finish(self, *, is_done: bool = False) -> None:
        """The run has ended, with its summary where it `is_done`; calling it again does nothing."""
        if self._has_finished:
            return
        self._has_finished = True
        if not len(self._sinks):
            return
        summary = msgspec.json.decode(self._run.summary.read_bytes()) if is_done else {}
        await asyncio.to_thread(self._sinks.finish, summary)
        await self._tell_failures()

    @property
    def finish_s(self) -> float:
        """How long `finish` may take."""
        return FINISH_S if len(self._sinks) else 0.0

    async def _tell_failures(self) -> None:
        for sentence in self._sinks.failures():
            await self._board.append_event("metrics", sentence)
