"""An arm that is a `leeway train` of its own shares nothing with the one beside it."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from leeway.replay.errors import ConfigurationError
from leeway.services.config import REDIS_URL, load
from leeway.services.experiments import train_arm
from leeway.services.layout import RunDirectory, RunState

from .sweep_results import arm

NAME = "grpo_lag4_eps0.004_seed0_lr0.0001-1a2b3c4d"


def test_a_run_is_named_by_its_arm_as_runs_may_be_named():
    assert train_arm.run_name(NAME) == "grpo_lag4_eps0-004_seed0_lr0-0001-1a2b3c4d"
    # Cut to 63, with the digest that tells arms apart.
    long = train_arm.run_name("x" * 90 + "-1a2b3c4d")
    assert (len(long), long[-10:]) == (63, "x-1a2b3c4d")


def test_an_arm_starts_its_run_without_the_redis_of_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(REDIS_URL, "redis://127.0.0.1:1/0")
    config = load(None)
    assert config.replay.url == "redis://127.0.0.1:1/0"
    environments: list[Mapping[str, str]] = []

    async def look(
        name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        environments.append(environment)
        raise InterruptedError

    monkeypatch.setattr(train_arm, "start", look)
    spec = arm().spec
    with pytest.raises(InterruptedError):
        asyncio.run(train_arm.train(spec, config, tmp_path))
    # As the run reads it.
    monkeypatch.setenv(REDIS_URL, environments[0][REDIS_URL])
    found = load(tmp_path / "config.toml")
    assert (found.replay.url, found.name) == (None, train_arm.run_name(spec.name))
    assert re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,62}", found.name)
    assert found.directory == str(tmp_path / "runs")


def test_seconds_of_a_run_leave_out_what_lies_between_two_calls():
    line = {"seconds": 2.0, "wait_s": 1.0}
    lines = [
        {"step": 1, "time": 10.0, **line},
        {"step": 2, "time": 12.0, **line},
        {"step": 3, "time": 14.0, **line},
        # A second call begins at 100 and trains step 3 again.
        {"step": 3, "time": 130.0, **line},
        {"step": 4, "time": 135.0, **line},
    ]
    found = train_arm.with_wall_s(lines, [5.0, 100.0])
    assert [(one["step"], one["wall_s"]) for one in found] == [(1, 3), (2, 5), (3, 8), (4, 13)]
    assert found[2]["time"] == 130.0


def test_a_run_is_gone_on_with_where_it_has_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[Sequence[str]] = []

    async def look(
        name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        started.append(arguments)
        raise InterruptedError

    monkeypatch.setattr(train_arm, "start", look)
    begun = tmp_path / "runs" / "arm-1"
    (begun / "logs").mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(InterruptedError):
            asyncio.run(train_arm.train(arm().spec, load(None), tmp_path))
        # Without a checkpoint it begins anew, and nothing is left of the first.
        assert started[-1][1:] == ["train", str(tmp_path / "config.toml")]
        assert not begun.exists()
    step = begun / "checkpoints" / "step-00000002"
    step.mkdir(parents=True)
    (step / "training.json").write_text(
        '{"version": 2, "score": null, "optimizer_steps": {}, "rng": "", "rng_cuda": [],'
        ' "extra": {}}'
    )
    with pytest.raises(InterruptedError):
        asyncio.run(train_arm.train(arm().spec, load(None), tmp_path))
    assert started[-1][1:] == ["train", "--resume", str(begun)]
    assert len(train_arm.read_calls(tmp_path)) == 3


def test_an_arm_waits_for_the_run_that_a_killed_sweep_left_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    left = RunDirectory(tmp_path / "arm-1")
    left.root.mkdir()
    left.write_state(RunState(name="arm", started_at=1.0, pids={"train": 4711}))
    looks = iter([True, True, False])
    monkeypatch.setattr("leeway.services.layout._is_leeway", lambda pid: next(looks))
    asyncio.run(train_arm.until_left(tmp_path, timeout_s=10.0))
    assert list(looks) == [], "it looks until the process is gone"

    monkeypatch.setattr("leeway.services.layout._is_leeway", lambda pid: True)
    with pytest.raises(ConfigurationError, match=r"still being trained by process 4711.*kill 4711"):
        asyncio.run(train_arm.until_left(tmp_path, timeout_s=0.2))
