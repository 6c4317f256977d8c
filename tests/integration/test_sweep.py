"""A sweep with real arms: killed in the middle, run again, reported."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = f"""
name = "tiny"
base = "{ROOT / "deploy" / "configs" / "stability.toml"}"
[set]
replay.groups_per_step = 1
rollout.group_size = 2
rollout.max_groups_in_flight = 1
policy.max_num_seqs = 8
learner.num_steps = 3
eval.num_questions = 2
eval.every_steps = 1
[resources]
executor = "EXECUTOR"
max_parallel = 1
[[grid]]
objective = ["grpo"]
staleness = [1]
seed = [0, 1, 2]
"""


def start(folder: Path, executor: str) -> subprocess.Popen[str]:
    file = folder / "tiny.toml"
    file.write_text(TEXT.replace("EXECUTOR", executor))
    command = [sys.executable, "-m", "leeway.services.cli", "sweep", str(file), "--json"]
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(
            [*command, "--out", str(folder / "out")],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


def ended(folder: Path) -> dict[str, float]:
    """Arms with a result, and when it was written."""
    found = folder.glob("out/arms/*/result.json")
    return {file.parent.name: file.stat().st_mtime for file in found}


def arms_alive(folder: Path) -> list[int]:
    """Processes whose command line names the folder."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if str(folder).encode() in words and b"experiments.arm" in words:
            found.append(int(entry.name))
    return found


@pytest.mark.timeout(400)
def test_a_sweep_that_was_killed_keeps_what_had_ended_and_runs_the_rest(tmp_path: Path):
    first = start(tmp_path, "processes")
    deadline = time.monotonic() + 150
    # One has ended and the next has trained a step.
    while len(list(tmp_path.glob("out/arms/*/metrics.jsonl"))) < 2 or not ended(tmp_path):
        assert first.poll() is None, (tmp_path / "log.txt").read_text()
        assert time.monotonic() < deadline, "no arm ended in time"
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    kept = ended(tmp_path)
    # The kernel ends the arms with their parent.
    while arms_alive(tmp_path):
        assert time.monotonic() < deadline, "an arm outlived the sweep"
        time.sleep(0.05)
    assert 1 <= len(kept) < 3

    second = start(tmp_path, "processes")
    out, _ = second.communicate(timeout=200)
    assert second.returncode == 0, (tmp_path / "log.txt").read_text()
    assert len(ended(tmp_path)) == 3
    assert {name: when for name, when in ended(tmp_path).items() if name in kept} == kept
    body = json.loads(out.splitlines()[-1])
    assert (body["phase"], body["num_left"], body["num_failed"]) == ("done", 0, 0)
    check_results(tmp_path)
    assert (tmp_path / "out" / "report" / "sweep.html").is_file()


def check_results(folder: Path) -> None:
    """Every arm evaluated at each step, and every token exactly as old as it was to be."""
    for file in folder.glob("out/arms/*/result.json"):
        result = json.loads(file.read_text())
        lag = result["spec"]["staleness"]
        assert [one["step"] for one in result["evaluations"]] == [0, 1, 2, 3]
        assert result["curves"]["staleness_mean"] == [min(step, lag) for step in range(3)]
        assert len(result["curves"]["ctn_norm"]) == 3


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_arms_run_as_tasks_of_ray(tmp_path: Path):
    process = start(tmp_path, "ray")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, (tmp_path / "log.txt").read_text()
    assert json.loads(out.splitlines()[-1])["num_ended"] == 3
    check_results(tmp_path)
