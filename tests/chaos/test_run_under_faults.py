"""The short form of `make chaos`: a small run with one fault of several kinds, each got over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import tiny

__all__ = ["tiny"]

ROOT = Path(__file__).parents[2]
KINDS = ("kill", "stop", "cut off", "slow", "set")
TARGETS = ("rollout worker", "learner", "redis", "everybody", "disk", "clock")
NUM_FAULTS = 8
NO_STAGE = 77
SEED = 20
SETTINGS = (
    # What the dead held comes back soon, and little work is done twice.
    "replay.slot_timeout_s=35",
    "rollout.episode_timeout_s=30",
    "learner.checkpoint_every=2",
    # Each fault is one that somebody is started again for.
    "supervision.max_restarts=100",
)


@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_a_run_gets_over_faults_and_loses_nothing(tiny: Callable[[], Path], tmp_path: Path):
    found = tmp_path / "chaos.json"
    arguments = ["--faults", str(NUM_FAULTS), "--per-run", str(NUM_FAULTS), "--minutes", "15"]
    arguments += ["--endless", "--seed", str(SEED), "--json", str(found)]
    arguments += [word for setting in SETTINGS for word in ("--set", setting)]
    arguments += ["--kinds", *KINDS, "--targets", *TARGETS]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.campaign", str(tiny() / "tiny.toml"), *arguments],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=1100,
    )
    if done.returncode == NO_STAGE:
        pytest.skip(done.stderr.strip())
    assert found.exists(), done.stderr[-3000:]
    results = json.loads(found.read_text())
    assert len(results["outcomes"]) == NUM_FAULTS, done.stderr[-3000:]
    assert all(outcome["is_recovered"] for outcome in results["outcomes"]), done.stderr[-3000:]
    assert not any(outcome["died"] for outcome in results["outcomes"]), done.stderr[-3000:]
    (run,) = results["runs"]
    assert (run["exit_code"], run["left"]) == (0, []), done.stderr[-3000:]
    account = run["account"]
    assert account["num_added"] > 0 and account["num_trained"] > 0 and account["num_taken"] > 0
    wrong = ("num_lost", "num_overdrawn", "num_stale", "num_unverified")
    assert {name: account[name] for name in wrong} == dict.fromkeys(wrong, 0), account
    assert done.returncode == 0, done.stderr[-3000:]
