"""An arm that was killed goes on inside itself, and comes to what it would have come to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from leeway.services.experiments.arm_result import ARM, CHECKPOINT, METRICS, ArmSpec, read_lines
from leeway.services.experiments.collapse import CollapseRule

pytestmark = pytest.mark.timeout(600)

NUM_STEPS = 7
KEYS = (
    "learner.objective=so-ppo",
    f"learner.num_steps={NUM_STEPS}",
    "replay.staleness_policy=exact",
    "replay.max_staleness=2",
    "rollout.max_groups_in_flight=2",
    "eval.every_steps=2",
    # One row at a time: with more, which rows share a step depends on the clock, and so do the last
    # bits of what a run computes, whether it was interrupted or not.
    "policy.max_num_seqs=1",
)


def begin(
    folder: Path, base: Path, *more: str, keys: tuple[str, ...] = KEYS
) -> subprocess.Popen[bytes]:
    """The arm's process. Its threads are few, so that sums come out alike."""
    spec = ArmSpec(
        name="arm", objective="so-ppo", staleness=2, seed=0, variant={}, is_scan=False,
        overrides=keys, mode="exact", loop="in-process", collapse=CollapseRule().model_dump(),
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / ARM).write_bytes(msgspec.json.encode(spec))
    module = [sys.executable, "-m", "leeway.services.experiments.arm"]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [*module, str(folder), "--base", str(base), *more],
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def kill_behind(folder: Path, process: subprocess.Popen[bytes], version: int) -> None:
    """End it by the signal that nobody hears, once a checkpoint of `version` or later is there."""
    deadline = time.monotonic() + 240
    while not any(int(p.name[5:]) >= version for p in (folder / CHECKPOINT).glob("step-*")):
        assert process.poll() is None, (folder / "log.txt").read_text()
        assert time.monotonic() < deadline, "no checkpoint came in time"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def result_of(folder: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.wait(300) == 0, (folder / "log.txt").read_text()
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "finished", result["reason"]
    # Seconds are not what is compared.
    del result["wall_s"], result["curves"]["wall_s"]
    result["evaluations"] = [(one["step"], one["score"]) for one in result["evaluations"]]
    return result


def test_an_arm_that_was_killed_twice_ends_bit_for_bit_as_one_that_was_not(
    tmp_path: Path, tiny: Callable[[], Path]
):
    base = tiny() / "tiny.toml"
    whole = begin(tmp_path / "whole", base)
    expected = result_of(tmp_path / "whole", whole)

    folder = tmp_path / "cut"
    kept = ("--keep-every-s", "0")
    kill_behind(folder, begin(folder, base, *kept), 2)
    begun = read_lines(folder / METRICS)
    kill_behind(folder, begin(folder, base, *kept), 4)
    last = begin(folder, base, *kept)
    found = result_of(folder, last)

    assert found == expected
    assert [step for step, _ in found["evaluations"]] == [0, 2, 4, 6, 7]
    lines, whole_lines = (read_lines(f / METRICS) for f in (folder, tmp_path / "whole"))
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    # The first steps are those of the first call: it went on, and did not begin anew.
    assert lines[:2] == begun[:2]
    timed = ("time", "wait_s", "wall_s", "seconds", "seconds_ctn")
    for line, other in zip(lines, whole_lines, strict=True):
        same = {k: v for k, v in line.items() if k not in timed}
        assert same == {k: v for k, v in other.items() if k not in timed}
    seconds = [line["wall_s"] for line in lines]
    assert seconds == sorted(seconds)
    assert not (folder / CHECKPOINT).exists()


def test_the_size_of_micro_batches_decides_nothing_but_how_many_there_are(
    tmp_path: Path, tiny: Callable[[], Path]
):
    base = tiny() / "tiny.toml"
    plain, cut = tmp_path / "plain", tmp_path / "cut"
    size = ("--micro-batch-tokens", "256")
    keys = (*KEYS, "rollout.group_size=8", "learner.num_steps=3")
    arms = [(plain, begin(plain, base, keys=keys)), (cut, begin(cut, base, *size, keys=keys))]
    for folder, process in arms:
        result_of(folder, process)
    one, other = (read_lines(folder / METRICS)[0] for folder in (plain, cut))
    assert other["num_micro_batches"] > one["num_micro_batches"]
    for key in ("loss", "grad_norm", "entropy", "value_loss", "critic_grad_norm"):
        assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-7)
    assert other["learning_rate"] == one["learning_rate"]
