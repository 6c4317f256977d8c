"""`leeway train` from start to end, with Redis, Ray Serve, torchrun and the torch policy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from leeway.services.layout import RunDirectory
from leeway.services.results import Summary
from leeway.services.status_client import token_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


@dataclass
class Seen:
    """What a run showed of itself while it lasted, and how it ended."""

    run: RunDirectory
    ended: Any
    phases: list[str] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)
    exposition: str = ""
    status: Any = None

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(self.ended.out.splitlines()[-1])


@pytest.fixture(scope="module")
def seen(leeway, tiny: Callable[[], Path]) -> Seen:
    folder = tiny()
    # Other runs broadcast; this one writes into the engine's memory.
    direct = ("--set", "learner.transport=direct")
    with leeway(folder, "train", "tiny.toml", *direct, "--json") as command:
        found = Seen(command.run, None)
        address = command.state(found.run).api_address

        def look() -> bool:
            headers = {"authorization": f"Bearer {token_of(found.run)}"}
            for path in ("/livez", "/v1/status", "/metrics"):
                try:
                    answer = httpx.get(f"{address}{path}", timeout=5, headers=headers)
                except httpx.TransportError:  # it goes away at the end of the run
                    return "done" in found.phases
                found.answers[path] = answer.status_code
                if path == "/v1/status":
                    found.phases.append(answer.json()["run"]["phase"])
            found.exposition = answer.text
            return found.phases[-1] == "done"

        command.until(lambda: look() or found.phases, 30)
        found.status = subprocess.run(
            [Path(sys.executable).with_name("leeway"), "status", str(found.run.root), "--json"],
            capture_output=True,
            text=True,
        )
        command.until(look, 240)
        found.ended = command.end(90, found.run)
    return found


def test_a_run_ends_with_0_and_leaves_nothing_running(seen: Seen):
    assert (seen.ended.code, seen.ended.left) == (0, []), seen.ended.err


def test_the_last_line_of_stdout_is_the_summary(seen: Seen):
    assert len(seen.ended.out.splitlines()) == 1
    summary = msgspec.convert(seen.summary, Summary)
    assert (summary.steps, summary.publishes, summary.max_staleness) == (3, 3, 1)
    assert summary.max_staleness_seen <= 1
    assert summary.exact_match_before is not None and summary.exact_match_after is not None
    assert summary.pause_ms_p50 is not None and 0 < summary.pause_ms_p50 < 1000
    assert 0 < summary.wall_s < 400


def test_every_step_has_a_line_with_its_staleness_within_the_bound(seen: Seen):
    lines = [json.loads(line) for line in seen.run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(0 <= line["staleness_max"] <= 1 for line in lines)


def test_the_learner_wrote_every_version_into_the_engines_memory(seen: Seen):
    lines = [json.loads(line) for line in seen.run.publishes.read_text().splitlines()]
    assert [line["version"] for line in lines] == [1, 2, 3]
    assert {line["transport"] for line in lines} == {"direct"}
    assert all(line["wire_s"] > 0 and not line["evicted"] for line in lines)


def test_the_run_directory_holds_what_the_layout_names(seen: Seen):
    run = seen.run
    assert json.loads(run.summary.read_text()) == seen.summary
    assert run.report.read_text().lstrip().lower().startswith("<!doctype html>")
    evaluations = json.loads(run.eval.read_text())
    assert [evaluations[when]["step"] for when in ("before", "after")] == [0, 3]


def test_transformers_loads_the_trained_model(seen: Seen):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(seen.run.model)
    tokenizer: Any = AutoTokenizer.from_pretrained(seen.run.model)
    ids = tokenizer("Question: Where does place 1 lie?\n", return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all()


def test_the_api_answers_while_the_run_lasts(seen: Seen):
    assert seen.answers == {"/livez": 200, "/v1/status": 200, "/metrics": 200}
    assert "leeway_" in seen.exposition
    order = ["starting", "evaluating-before", "training", "evaluating-after", "done"]
    assert sorted(seen.phases, key=order.index) == seen.phases
    assert {"starting", "done"} <= set(seen.phases)


def test_the_status_command_reads_a_running_run(seen: Seen):
    assert seen.status.returncode == 0, seen.status.stderr
    assert json.loads(seen.status.stdout)["run"]["name"] == seen.run.root.name
