"""A process of the run that is killed: the run ends by itself, says which, and leaves nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from leeway.services.layout import RunDirectory

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ENDLESS = ("--set", "eval.num_questions=0", "--set", "learner.num_steps=100000")
TWO_RANKS = ("--set", "learner.num_processes=2")


def learner(pids: dict[str, int]) -> int:
    return pids["learner"]


def rank(pids: dict[str, int]) -> int:
    """Of several, which torchrun starts within the learner's process."""
    return psutil.Process(pids["learner"]).children()[0].pid


def serve(pids: dict[str, int]) -> int:
    return pids["serve"]


@pytest.mark.parametrize(
    ("victim", "name", "settings"),
    [(learner, "learner", ()), (rank, "learner", TWO_RANKS), (serve, "serve", ())],
)
def test_a_killed_process_ends_the_run(
    leeway, tiny: Callable[[], Path], victim: Any, name: str, settings: tuple[str, ...]
):
    with leeway(tiny(), "train", "tiny.toml", "--json", *ENDLESS, *settings) as command:
        run: RunDirectory = command.run
        pids = command.state(run).pids
        command.until(lambda: run.metrics.is_file() and len(run.metrics.read_text()) > 10, 120)
        psutil.Process(victim(pids)).kill()
        ended = command.end(60, run)
    assert (ended.code, ended.left) == (1, []), ended.err
    assert ended.out == ""
    last = ended.err.splitlines()[-1]
    assert last.startswith(f"leeway: the {name} process ended with ")
    assert "SIGKILL" in last
    assert last.endswith(f"its log is {run.log(name)}")  # type: ignore[arg-type]
    assert "Traceback" not in ended.err
    assert not run.summary.exists()
    assert json.loads(run.events.read_text().splitlines()[0])["kind"] == "run"
