"""An arm that is a whole run: `leeway train`, with Redis, Ray Serve and the configured engine.

Its run directory lies in the arm's folder, and it has a Redis of its own: arms beside each other
would otherwise share one memory and wait for each other. What comes back is the same as from a run
in one process, read from that directory. Such a run is not stopped early.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from leeway.services.config import REDIS_URL, RunConfig, dump, with_values
from leeway.services.experiments.arm_result import ArmResult, ArmSpec, read_lines
from leeway.services.experiments.collapse import Evaluated
from leeway.services.layout import RunDirectory
from leeway.services.supervision import start

GRACE_S = 120.0
"""A run that is told to stop finishes its step and writes a checkpoint."""


async def train(spec: ArmSpec, config: RunConfig, folder: Path) -> ArmResult:
    """Train to the end. Raises ChildDied, with the run's own sentence, when it fails."""
    from leeway.services.experiments.arm import result_of

    began = time.monotonic()
    config = own(config, spec, folder)
    file = folder / "config.toml"
    file.write_text(dump(config), encoding="utf-8")
    child = await start(
        "train", ["leeway.services.cli", "train", str(file)], folder / "train.log", {REDIS_URL: ""}
    )
    try:
        if await child.process.wait() != 0:
            raise await child.ended()
    finally:
        await child.stop(GRACE_S)
    run = newest_run(folder / "runs")
    lines = with_wall_s(read_lines(run.metrics))
    evals = json.loads(run.eval.read_text(encoding="utf-8")) if run.eval.is_file() else {}
    wall_s = time.monotonic() - began
    return result_of(spec, config, evaluations_of(evals, lines, wall_s), lines, wall_s)


def own(config: RunConfig, spec: ArmSpec, folder: Path) -> RunConfig:
    """With what no two arms may share: the run directory, its name, and the Redis, which without an
    address is one that the run starts for itself."""
    directory = str((folder / "runs").resolve())
    return with_values(
        config, {"directory": directory, "name": run_name(spec.name), "replay.url": None}
    )


def run_name(arm: str) -> str:
    """As a run may be called: 63 letters, digits, - and _. The digest at the end stays.

    grpo_lag4_seed0_lr0.0001-1a2b3c4d -> grpo_lag4_seed0_lr0-0001-1a2b3c4d
    """
    words, _, digest = re.sub(r"[^a-zA-Z0-9_-]", "-", arm).rpartition("-")
    return f"{words[: 62 - len(digest)]}-{digest}"


def newest_run(folder: Path) -> RunDirectory:
    """The one that ended last: an arm that was interrupted has left another."""
    found = max(folder.glob("*/summary.json"), key=lambda path: path.stat().st_mtime)
    return RunDirectory(found.parent)


def with_wall_s(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds since the first step began: a line is written at the end of its step."""
    if not lines:
        return []
    first = lines[0]["time"] - lines[0].get("seconds", 0.0) - lines[0].get("wait_s", 0.0)
    return [line | {"wall_s": line["time"] - first} for line in lines]


def evaluations_of(
    evals: dict[str, Any], lines: list[dict[str, Any]], wall_s: float
) -> list[Evaluated]:
    """Before, between and after, in order; each at the wall clock of its step."""
    at_step = {0: 0.0} | {int(line["step"]): float(line["wall_s"]) for line in lines}
    entries = [evals.get("before"), *(evals.get("history") or []), evals.get("after")]
    found: dict[int, Evaluated] = {}
    for entry in filter(None, entries):
        step = int(entry.get("step", 0))
        found[step] = Evaluated(step, at_step.get(step, wall_s), entry["scores"]["exact_match"])
    return [found[step] for step in sorted(found)]
