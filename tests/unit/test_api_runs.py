"""The runs of a folder: which of them live, and since when."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from .test_api import SECTIONS, FakeBoard, ask, build


async def run_of(folder: Path, name: str, sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    app = build(board=FakeBoard(sections), run=folder / "demo")
    answer = await ask(app, f"/v1/runs/{name}")
    assert answer.status_code == 200
    return answer.json()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("demo", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
    return tmp_path


async def test_the_start_of_one_run_is_not_told_of_another(folder: Path):
    assert (await run_of(folder, "demo", SECTIONS))["started_at"] == 1.0
    assert (await run_of(folder, "other", SECTIONS))["started_at"] is None


@pytest.mark.parametrize(("age_s", "state"), [(1.0, "running"), (3600.0, "stopped")])
async def test_a_run_runs_while_its_processes_write(folder: Path, age_s: float, state: str):
    learner = {**SECTIONS["learner"], "updated_at": time.time() - age_s}
    assert (await run_of(folder, "demo", {**SECTIONS, "learner": learner}))["state"] == state


async def test_what_the_api_itself_writes_keeps_no_run_alive(folder: Path):
    now = {"lag_s": 0.0, "updated_at": time.time()}
    assert (await run_of(folder, "demo", {**SECTIONS, "loop:api": now}))["state"] == "stopped"
    assert (await run_of(folder, "demo", {**SECTIONS, "loop:learner": now}))["state"] == "running"
