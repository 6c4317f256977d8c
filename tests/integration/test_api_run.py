"""The REST API beside a living run: what it shows, how it steers, every curl of docs/rest.md."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from leeway.services.layout import RunDirectory

pytestmark = [pytest.mark.ray, pytest.mark.timeout(500)]

DOCS = Path(__file__).parents[2] / "docs" / "rest.md"
STEPS = 100_000
"""More than it will make: the test drains it."""


@dataclass
class Live:
    """A run that trains, and its API."""

    run: RunDirectory
    client: httpx.Client
    address: str
    token: str
    command: Any

    def get(self, path: str) -> Any:
        answer = self.client.get(f"/v1/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def until(self, found: Callable[[], Any], seconds: float = 120) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := found()):
            assert time.monotonic() < deadline, "it did not come about"
            time.sleep(0.2)
        return value


@pytest.fixture(scope="module")
def live(leeway, tiny: Callable[[], Path]) -> Iterator[Live]:
    folder = tiny()
    options = ("--set", f"learner.num_steps={STEPS}", "--set", "eval.num_questions=0")
    with leeway(folder, "train", "tiny.toml", "--json", *options) as command:
        run = command.run
        address = command.state(run).api_address
        token = json.loads((run.root / "api-tokens.json").read_text())["control"]
        headers = {"authorization": f"Bearer {token}"}
        with httpx.Client(base_url=address, headers=headers, timeout=40) as client:
            found = Live(run, client, address, token, command)
            command.until(lambda: found.get("status")["run"]["step"] >= 2, 200)
            yield found


def test_a_run_that_trains_is_ready_and_shows_its_parts(live: Live):
    ready = live.until(lambda: a if (a := httpx.get(f"{live.address}/readyz")).is_success else None)
    assert ready.json() == {"status": "ok", "reasons": []}
    rollouts = live.until(lambda: r if (r := live.get("rollouts"))["stop_reasons"] else None)
    assert rollouts["retriever"] in ("healthy", "unknown")
    policy = live.until(lambda: p if (p := live.get("policy"))["publishes"] else None)
    newest = policy["publishes"][0]
    assert newest["num_engines"] == 1 and newest["checksum"] and newest["transfer_s"] > 0
    replay = live.get("replay")
    assert replay["num_trained"] >= 4 and sum(replay["staleness_histogram"].values()) >= 8
    learner = live.get("learner")
    assert learner["objective"] == "so-grpo" and learner["metrics"]["num_trajectories"] == 4


def test_the_records_of_steps_are_the_lines_of_metrics_jsonl(live: Live):
    [first] = live.get("learner/steps?limit=1")["items"]
    assert first == json.loads(live.run.metrics.read_text().splitlines()[0])


def test_a_trajectory_is_read_turn_by_turn(live: Live):
    items = live.until(lambda: live.get("trajectories?limit=2")["items"])
    one = live.get(f"trajectories/{items[0]['trajectory_id']}")
    assert one["question"] in one["prompt"] and one["golden_answers"] == ["north"]
    assert len(one["turns"]) == one["num_turns"]
    assert sum(turn["num_generated"] for turn in one["turns"]) == one["num_trained_tokens"]


def test_events_are_replayed_from_an_id_and_come_live(live: Live):
    with live.client.stream("GET", "/v1/events?after=0-0.0&wait_s=3") as answer:
        text = answer.read().decode()
    kinds = re.findall(r"^event: (\w+)$", text, re.MULTILINE)
    assert {"event", "step", "status"} <= set(kinds)
    steps = [json.loads(d)["step"] for d in re.findall(r"event: step\ndata: (.+)", text)]
    assert steps[:2] == [1, 2] and steps == sorted(set(steps))


def test_a_pause_stops_the_steps_and_a_resumption_goes_on(live: Live):
    assert live.client.post("/v1/control/pause").json()["state"] == "done"

    def has_stopped() -> bool:
        before = live.get("status")["run"]["step"]
        time.sleep(2)
        return live.get("status")["run"]["step"] == before

    live.until(has_stopped)
    stopped_at = live.get("status")["run"]["step"]
    assert "resume opens it" in live.get("replay")["limiter"]
    assert live.client.post("/v1/control/resume").json()["state"] == "done"
    live.until(lambda: live.get("status")["run"]["step"] > stopped_at)


def test_a_changed_learning_rate_is_that_of_the_next_step(live: Live):
    body = {"values": {"learner.learning_rate": 0.000025, "rollout.max_groups_in_flight": 3}}
    revision = live.client.patch("/v1/settings", json=body).json()["revision"]
    live.until(lambda: live.get("settings")["is_applied"])
    assert live.get("settings")["applied"] == {"learner": revision, "worker-0": revision}
    step = live.get("status")["run"]["step"]
    live.until(lambda: live.get(f"learner/steps?cursor={step + 1}")["items"])
    [line] = live.get(f"learner/steps?cursor={step + 1}&limit=1")["items"]
    assert line["learning_rate"] == pytest.approx(0.000025)


@pytest.mark.parametrize("action", ["checkpoint", "publish"])
def test_what_is_asked_of_the_learner_is_done(live: Live, action: str):
    answer = live.client.post(f"/v1/control/{action}?wait_s=30").json()
    assert answer["state"] == "done", answer
    if action == "checkpoint":
        version = int(re.findall(r"\d+", answer["detail"])[0])
        assert any(str(version) in path.name for path in live.run.checkpoints.iterdir())


def slot_of(live: Live) -> dict[str, Any]:
    def ask() -> Any:
        answer = live.client.post("/v1/slots", json={"num": 1, "wait_s": 10})
        return answer.json() if answer.status_code == 200 else None

    return live.until(ask)


def give_back(live: Live, slots: dict[str, Any]) -> None:
    """A slot that nobody fills holds the learner back until it expires."""
    for slot in slots["items"]:
        answer = live.client.post("/v1/slots/return", json={"ticket": slot["ticket"]})
        assert answer.status_code == 200, answer.text


def group_for(slots: dict[str, Any]) -> dict[str, Any]:
    slot = slots["items"][0]
    return {
        "ticket": slot["ticket"],
        "question_id": "q1",
        "worker_id": "agent",
        "trajectories": [
            {
                "trajectory_id": f"{slot['slot_id']}-{number}",
                "token_ids": [5, 6, 7, 8],
                "num_prompt": 2,
                "turns": [{"num_generated": 2, "num_observed": 0, "action": "answer"}],
                "logprobs": [-0.5, -0.25],
                "versions": [slot["version"]] * 2,
                "reward": float(number),
                "stop_reason": "answer",
                "scores": {"exact_match": float(number)},
            }
            for number in range(slots["group_size"])
        ],
    }


def test_a_group_from_outside_is_trained_once_however_often_it_is_sent(live: Live):
    group = group_for(slot_of(live))
    first = live.client.post("/v1/groups", json=group)
    again = live.client.post("/v1/groups", json=group)
    assert (first.status_code, again.json()) == (200, first.json()), first.text
    assert first.json()["num_trained_tokens"] == 4
    # Under fifo it is drawn within the next steps, which a group that breaks the learner would end.
    step = live.get("status")["run"]["step"]
    live.until(lambda: live.get("status")["run"]["step"] > step + 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logprobs": [-0.5]}, "1 logprobs for 2 generated tokens"),
        ({"token_ids": [5, 6, 7, 10**6]}, "the tokenizer of this run has"),
        ({"versions": [10**6, 10**6]}, "no engine has it"),
        ({"num_prompt": 3}, "of 4 tokens"),
        ({"logprobs": [-0.5, 0.5]}, "less than or equal"),
    ],
)
def test_a_group_that_could_not_be_trained_is_refused(
    live: Live, change: dict[str, Any], words: str
):
    slots = slot_of(live)
    group = group_for(slots)
    group["trajectories"][0] |= change
    answer = live.client.post("/v1/groups", json=group)
    assert answer.status_code == 422
    assert words in answer.json()["detail"]
    give_back(live, slots)


def test_a_forged_ticket_is_refused(live: Live):
    slots = slot_of(live)
    group = group_for(slots) | {"ticket": "QUFBQUFBQUFBQUFBQUFBQXt9"}
    answer = live.client.post("/v1/groups", json=group)
    give_back(live, slots)
    assert answer.status_code == 422 and "not granted by this run" in answer.json()["detail"]


def curls() -> list[str]:
    """Every example of the page, but the drain, which the last test does."""
    lines = [line for line in DOCS.read_text().splitlines() if line.startswith("curl ")]
    return [line for line in lines if not line.endswith("/v1/control/drain")]


@pytest.mark.parametrize("line", curls())
def test_an_example_of_the_page_works(live: Live, line: str, tmp_path: Path):
    named = {"$URL": live.address, "$TOKEN": live.token, "demo-1": live.run.root.name}
    if "TRAJECTORY" in line:
        items = live.until(lambda: live.get("trajectories?limit=1")["items"])
        named["TRAJECTORY"] = items[0]["trajectory_id"]
    if "@group.json" in line or '"TICKET"' in line:
        slots = slot_of(live)
        file = tmp_path / "group.json"
        file.write_text(json.dumps(group_for(slots)))
        named |= {"@group.json": f"@{file}", '"TICKET"': json.dumps(slots["items"][0]["ticket"])}
    words = shlex.split(line)
    for name, value in named.items():
        words = [word.replace(name, value) for word in words]

    def works() -> bool:
        ended = subprocess.run(
            [*words, "-w", "\n%{http_code}"], capture_output=True, text=True, timeout=60
        )
        body, _, status = ended.stdout.rpartition("\n")
        assert ended.returncode == 0 and status in ("200", "202", "409", "503"), body
        if line.endswith("/v1/slots") and status == "200":
            give_back(live, json.loads(body))
        # Admission may be held back for a moment, and an engine be about to tell its version.
        return status in ("200", "202")

    live.until(works)


def test_a_drained_run_trains_what_is_left_and_ends(live: Live):
    answer = live.client.post("/v1/control/drain")
    assert answer.status_code == 202
    ended = live.command.end(120, live.run)
    assert (ended.code, ended.left) == (0, []), ended.err
    summary = json.loads(live.run.summary.read_text())
    assert 2 < summary["steps"] < STEPS
    assert (live.run.model / "config.json").is_file()
