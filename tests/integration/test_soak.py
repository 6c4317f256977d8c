"""A soak of a small run: it is started, looked at, stopped and judged by one command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def test_a_soak_samples_every_part_of_a_run_and_ends_it(leeway, tiny: Callable[[], Path]):
    settings = ("--set", "eval.num_questions=0", "--json")
    times = ("--minutes", "0.5", "--every-s", "1")
    with leeway(tiny(), "soak", "tiny.toml", *times, *settings) as command:
        ended = command.end(500, command.run)
        samples = command.run.root / "samples.csv"
    # So short a soak tells nothing: what has just started still grows.
    assert ended.code in (0, 1), ended.err
    assert ended.left == []
    line = json.loads(ended.out.splitlines()[-1])
    assert line["num_flat"] + line["num_grows"] + line["num_undecided"] == len(line["judged"])
    measured = {(entry["subject"], entry["measure"]) for entry in line["judged"]}
    for role in ("train", "serve", "learner", "redis", "policy replica", "rollout worker"):
        # What the learner holds between steps, elsewhere the memory of the process.
        memory = "allocated_bytes" if role == "learner" else "own_bytes"
        assert {(role, memory), (role, "open_files"), (role, "threads")} <= measured
    assert {("redis", "used_bytes"), ("ray", "actors"), ("ray", "objects")} <= measured
    steps = [row for row in samples.read_text().splitlines() if ",learner,step," in row]
    assert len(steps) >= 20
    assert float(steps[-1].rpartition(",")[2]) > float(steps[0].rpartition(",")[2])


def test_a_run_that_fails_ends_its_soak_with_the_reason(leeway, tiny: Callable[[], Path]):
    settings = ("--set", "learner.draw_timeout_s=1000", "--set", "data.train=nowhere.jsonl")
    with leeway(tiny(), "soak", "tiny.toml", *settings) as command:
        ended = command.end(300)
    assert ended.code in (1, 2), ended.err
    assert "nowhere.jsonl" in ended.err or "soak.log" in ended.err
    assert "Traceback" not in ended.err
