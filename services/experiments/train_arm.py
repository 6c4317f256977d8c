"""An arm that is a whole run: `leeway train`, with Redis, Ray Serve and the configured engine.

Its run directory lies in the arm's folder, and it has a Redis of its own: arms beside each other
would otherwise share one memory and wait for each other. What comes back is the same as from a run
in one process, read from that directory. Such a run is not stopped early. One that was ended in
the middle is resumed from its last checkpoint; learner.checkpoint_every says how often there is
one. It is a live run, so what comes then is not what would have come.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from leeway.learner.checkpoint import latest
from leeway.replay.errors import ConfigurationError
from leeway.services.config import REDIS_URL, RunConfig, dump, with_values
from leeway.services.experiments.arm_result import ArmResult, ArmSpec, read_lines
from leeway.services.experiments.collapse import Evaluated
from leeway.services.experiments.sweep_folder import replace_text
from leeway.services.layout import RunDirectory
from leeway.services.supervision import start

RUNS: Final = "runs"
CALLS: Final = "calls.json"
GRACE_S: Final = 120.0
"""A run that is told to stop finishes its step and writes a checkpoint."""
LOOK_S: Final = 0.1


async def train(spec: ArmSpec, config: RunConfig, folder: Path) -> ArmResult:
    """Train to the end. Raises ChildDied, with the run's own sentence, when it fails."""
    from leeway.services.experiments.arm import result_of

    config = own(config, spec, folder)
    await until_left(folder / RUNS, GRACE_S)
    begun = run_begun(folder / RUNS)
    calls = [*read_calls(folder), time.time()]
    replace_text(folder / CALLS, json.dumps(calls))
    if begun is None:
        shutil.rmtree(folder / RUNS, ignore_errors=True)
        file = folder / "config.toml"
        file.write_text(dump(config), encoding="utf-8")
        arguments = ["train", str(file)]
    else:
        arguments = ["train", "--resume", str(begun)]
    child = await start(
        "train", ["leeway.services.cli", *arguments], folder / "train.log", {REDIS_URL: ""}
    )
    try:
        if await child.process.wait() != 0:
            raise await child.ended()
    finally:
        await child.stop(GRACE_S)
    run = newest_run(folder / RUNS)
    lines = with_wall_s(read_lines(run.metrics), calls)
    evals = json.loads(run.eval.read_text(encoding="utf-8")) if run.eval.is_file() else {}
    wall_s = lines[-1]["wall_s"] if lines else 0.0
    return result_of(spec, config, evaluations_of(evals, lines, wall_s), lines, wall_s)


async def until_left(folder: Path, timeout_s: float) -> None:
    """Until no process trains a run of an earlier call: where a sweep is killed, its runs notice,
    and stop as if they were told to. Raises ConfigurationError, which names one that goes on."""
    deadline = time.monotonic() + timeout_s
    for path in folder.glob("*"):
        while (pid := RunDirectory(path).running_pid()) is not None:
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"{path} is still being trained by process {pid}, which an earlier call left, "
                    f"after {timeout_s:g} s; end it with `kill {pid}` and try again"
                )
            await asyncio.sleep(LOOK_S)


def run_begun(folder: Path) -> Path | None:
    """The run directory of an earlier call that has a checkpoint; None: there is none."""
    found = [path for path in folder.glob("*") if latest(RunDirectory(path).checkpoints)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def read_calls(folder: Path) -> list[float]:
    """When the calls that trained this arm began, Unix time."""
    file = folder / CALLS
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []


def own(config: RunConfig, spec: ArmSpec, folder: Path) -> RunConfig:
    """With what no two arms may share: the run directory, its name, and the Redis, which without an
    address is one that the run starts for itself."""
    directory = str((folder / RUNS).resolve())
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
    """The one that ended last."""
    found = max(folder.glob("*/summary.json"), key=lambda path: path.stat().st_mtime)
    return RunDirectory(found.parent)


def with_wall_s(lines: list[dict[str, Any]], calls: Sequence[float]) -> list[dict[str, Any]]:
    """Each step once, with the seconds since the first began: a line is written at the end of its
    step. The time between two calls, and what the second takes to start, count as nothing.

    Steps end at 10 and 12, a call begins at 100, and step 3, of 2 s and 1 s of wait, ends at 130:
    the third is 3 s behind the second.
    """
    by_step = {int(line["step"]): line for line in lines}
    found: list[dict[str, Any]] = []
    elapsed, last = 0.0, None
    for step in sorted(by_step):
        line = by_step[step]
        own_s = line.get("seconds", 0.0) + line.get("wait_s", 0.0)
        is_other_call = last is None or any(last < began <= line["time"] for began in calls)
        elapsed += own_s if is_other_call else line["time"] - last
        last = line["time"]
        found.append(line | {"wall_s": elapsed})
    return found


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
