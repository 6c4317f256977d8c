"""Every configuration in deploy/configs is valid as it stands."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from .local_processes import BIN

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "configs").glob("*.toml"))
SIZES = {"demo", "single-gpu", "eight-gpus", "several-nodes"}


@pytest.mark.parametrize(
    "file",
    [file for file in FILES if not file.stem.startswith("sweep")],
    ids=lambda file: file.stem,
)
def test_leeway_config_validate_accepts_it_without_a_remark(file: Path):
    done = subprocess.run(
        [BIN / "leeway", "config", "validate", file], capture_output=True, text=True
    )
    assert (done.returncode, "note:" in done.stdout) == (0, False), done.stdout + done.stderr


def test_there_is_one_for_each_size():
    assert {file.stem for file in FILES} >= SIZES


@pytest.mark.parametrize("name", sorted(SIZES))
def test_it_begins_with_what_it_is_for_and_bears_its_own_name(name: str):
    text = (ROOT / "deploy" / "configs" / f"{name}.toml").read_text()
    assert re.match(r"# \w", text)
    assert tomllib.loads(text)["name"] == name


def test_eight_gpus_are_shared_out_between_engines_and_ranks():
    from leeway.services.config import load
    from leeway.services.processes.devices import split_gpus

    config = load(ROOT / "deploy" / "configs" / "eight-gpus.toml")
    ranks, engines = config.learner.num_processes, config.policy.num_replicas
    assert ranks + engines == 8
    assert split_gpus([str(i) for i in range(8)], ranks, engines) == (
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    )


def test_with_too_few_gpus_engine_and_learner_share_them():
    from leeway.services.processes.devices import split_gpus

    assert split_gpus(["0"], 1, 1) == ({}, {})
    assert split_gpus([], 1, 1) == ({}, {})


def test_the_gpus_of_the_environment_are_those_that_count(monkeypatch: pytest.MonkeyPatch):
    from leeway.services.processes.devices import visible_gpus

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-abc")
    assert visible_gpus() == ["2", "GPU-abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
