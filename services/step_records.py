"""What is written down of each optimizer step: a line of metrics.jsonl, the same on the run board,
and the section `learner` that status and dashboard show.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from leeway.learner.metrics import StepMetrics
from leeway.learner.weights.publisher import Published
from leeway.replay import free_pages
from leeway.replay.board import RunBoard
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Replay
from leeway.services.layout import RunDirectory
from leeway.services.metering import Metering
from leeway.services.records import append_whole
from leeway.services.snapshot import build_snapshot

RECENT_STEPS: Final = 10
"""Steps over which the share of waiting is reported."""
ENGINE_TOTALS: Final[Mapping[str, str]] = {
    "engine_busy_s": "busy_s",
    "engine_up_s": "up_s",
    "engine_tokens": "num_tokens",
    "engine_discarded_tokens": "num_discarded_tokens",
    "engine_prompt_tokens": "num_prompt_tokens",
    "engine_cached_tokens": "num_cached_tokens",
}
"""What grows since an engine's start, by its name in the engine's section. A step's line has the
sums over all engines."""


class StepRecords:
    """Of one learner process."""

    def __init__(
        self,
        run: RunDirectory,
        board: RunBoard,
        replay: Replay,
        metering: Metering,
        max_staleness_seen: int,
    ) -> None:
        """`max_staleness_seen`: of the steps before this process."""
        self._run = run
        self._board = board
        self._replay = replay
        self._metering = metering
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        self._rewards: list[float] = []
        self.max_staleness_seen = max_staleness_seen

    def take_score(self) -> float | None:
        """Mean reward of the steps since this was last asked; None without one."""
        rewards, self._rewards = self._rewards, []
        return sum(rewards) / len(rewards) if rewards else None

    async def write(
        self,
        version: PolicyVersion,
        step: StepMetrics,
        published: Published | None,
        *,
        wait_s: float,
        waited_s: Mapping[str, float],
        publish_s: float,
        confirm_s: float,
        settings_revision: int,
    ) -> None:
        """The step that made `version`, which came `wait_s` after the one before; `waited_s` of it
        by what was short."""
        metrics = step.as_dict()
        self._rewards.append(metrics["reward_mean"])
        self._recent.append((wait_s, metrics["seconds"]))
        self.max_staleness_seen = max(self.max_staleness_seen, int(metrics["staleness_max"]))
        line = {"step": version, "time": time.time(), "wait_s": wait_s, **metrics}
        line |= {f"wait_s/{reason}": seconds for reason, seconds in waited_s.items()}
        line |= {"publish_s": publish_s, "confirm_s": confirm_s}
        if published is not None:
            line["pause_ms"] = [pause * 1e3 for pause in published.pause_s]
            line["transfer_ms"] = published.transfer_s * 1e3
            line["num_engines"] = published.num_engines
        # Here between two steps: what lives only in one is freed.
        if (allocated := free_pages.allocated_bytes()) is not None:
            line["allocated_bytes"] = allocated
        line |= await self._surroundings()
        append_whole(self._run.metrics, f"{json.dumps(line)}\n".encode())
        section = self._section(version, metrics, wait_s)
        await self._board.put("learner", {**section, "settings_revision": settings_revision})
        await self._board.append_step(line)
        await self._metering.step(line)

    async def _surroundings(self) -> dict[str, float]:
        """The buffer and the other side at this step, for the report."""
        stats = await self._replay.stats()
        sections = await self._board.get_all()
        snapshot = build_snapshot(sections, stats)
        engines = [s for name, s in sections.items() if name.startswith("policy:")]
        numbers = {
            **{
                name: sum(engine.get(of_engine, 0) for engine in engines)
                for name, of_engine in ENGINE_TOTALS.items()
            },
            "engine_requests_in_flight": sum(e.get("num_in_flight", 0) for e in engines),
            "num_ready": stats.num_ready,
            "num_slots": stats.num_slots,
            "num_leased": stats.num_leased,
            "num_held_back": stats.num_held_back,
            "generated_tokens_per_s": snapshot.generated_tokens_per_s,
            "rollout_wait_share": snapshot.waits.rollouts_for_room,
        }
        drops = {f"dropped/{reason}": float(n) for reason, n in stats.dropped.items()}
        for reason, by_turns in stats.dropped_turns.items():
            drops[f"dropped_trajectories/{reason}"] = float(sum(by_turns.values()))
        return drops | {name: value for name, value in numbers.items() if value is not None}

    def _section(
        self, version: PolicyVersion, metrics: Mapping[str, float], wait_s: float
    ) -> dict[str, Any]:
        seconds = metrics["seconds"] + wait_s
        return {
            "step": version,
            "version": version,
            "metrics": dict(metrics),
            "idle_share": sum(w for w, _ in self._recent) / sum(w + s for w, s in self._recent),
            "tokens_per_s": metrics["num_tokens_trained"] / seconds,
            "max_staleness_seen": self.max_staleness_seen,
        }
