"""A sweep over the live loop: each arm is a `leeway train` with Redis, Ray Serve and a learner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

TEXT = """
name = "live"
base = "tiny.toml"
mode = "bound"
loop = "train"
[set]
learner.num_steps = 6
learner.checkpoint_every = 2
eval.every_steps = 3
[resources]
executor = "processes"
[[grid]]
objective = ["grpo"]
staleness = [1, 3]
"""


def start(folder: Path) -> subprocess.Popen[str]:
    (folder / "live.toml").write_text(TEXT)
    command = [sys.executable, "-m", "leeway.services.cli", "sweep", "live.toml"]
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(
            [*command, "--out", "out", "--json"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


def until_a_checkpoint(folder: Path, process: subprocess.Popen[str]) -> Path:
    """The run directory that holds it."""
    deadline = time.monotonic() + 400
    while True:
        found = list(folder.glob("out/arms/*/runs/*/checkpoints/step-*"))
        if found:
            return found[0].parents[1]
        assert process.poll() is None, (folder / "log.txt").read_text()
        assert time.monotonic() < deadline, "no arm has written a checkpoint in time"
        time.sleep(0.02)


def test_live_arms_that_were_killed_go_on_and_keep_their_bounds(tiny: Callable[[], Path]):
    folder = tiny()
    first = start(folder)
    begun = until_a_checkpoint(folder, first)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert not (begun / "summary.json").exists(), "the run had ended before it could be cut"

    second = start(folder)
    out, _ = second.communicate(timeout=600)
    assert second.returncode == 0, (folder / "log.txt").read_text()
    body = json.loads(out.splitlines()[-1])
    assert (body["phase"], body["num_ended"], body["num_failed"]) == ("done", 2, 0)
    # The arm that had a checkpoint went on with its run, and made no other one.
    assert [path for path in begun.parent.iterdir() if path.is_dir()] == [begun]
    for file in folder.glob("out/arms/*/result.json"):
        result = json.loads(file.read_text())
        assert result["curves"]["step"] == [1, 2, 3, 4, 5, 6]
        assert max(result["curves"]["staleness_max"]) <= result["spec"]["staleness"]
        steps = [one["step"] for one in result["evaluations"]]
        assert (steps[0], steps[-1]) == (0, 6)
        seconds = result["curves"]["wall_s"]
        assert seconds == sorted(seconds)
