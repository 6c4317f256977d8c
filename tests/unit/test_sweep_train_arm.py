"""An arm that is a `leeway train` of its own shares nothing with the one beside it."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from leeway.services.config import REDIS_URL, load
from leeway.services.experiments import train_arm

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
