"""A process of the run that is killed: it is started again and the run goes on; where it may not be
started again the run ends by itself, says which it was, and leaves nothing."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from leeway.services.layout import RunDirectory
from leeway.services.status_client import token_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

ENDLESS = ("--set", "eval.num_questions=0", "--set", "learner.num_steps=100000")
SOON = [
    word
    for setting in (
        "learner.checkpoint_every=2",
        "learner.publish_timeout_s=20",
        "replay.lease_timeout_s=40",
        "replay.slot_timeout_s=40",
        "rollout.episode_timeout_s=35",
    )
    for word in ("--set", setting)
]
"""What the dead held comes back."""
TWO_RANKS = ("--set", "learner.num_processes=2")
DIRECT = ("--set", "learner.transport=direct")
"""Where the learner writes into the engine's memory, whichever of the two is the new one."""
NEVER_AGAIN = ("--set", "supervision.max_restarts=0")


def parent(pids: dict[str, int]) -> int:
    """Of the learner: it only waits (processes/foster.py)."""
    return pids["learner"]


def learner(pids: dict[str, int]) -> int:
    return psutil.Process(pids["learner"]).children()[0].pid


def rank(pids: dict[str, int]) -> int:
    """Of several, which torchrun starts within the learner's process."""
    return psutil.Process(learner(pids)).children()[0].pid


def serve(pids: dict[str, int]) -> int:
    return pids["serve"]


def redis(pids: dict[str, int]) -> int:
    return pids["redis"]


def api(pids: dict[str, int]) -> int:
    return pids["api"]


def num_lines(run: RunDirectory) -> int:
    return len(run.metrics.read_text().splitlines()) if run.metrics.is_file() else 0


def pids_of(run: RunDirectory) -> dict[str, int]:
    state = run.read_state()
    assert state is not None
    return state.pids


def restarts_of(run: RunDirectory) -> list[str]:
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    return [event["text"] for event in events if event["kind"] == "supervision"]


def answers(run: RunDirectory) -> bool:
    import httpx

    state = run.read_state()
    assert state is not None
    headers = {"authorization": f"Bearer {token_of(run)}"}
    try:
        answer = httpx.get(f"{state.api_address}/v1/status", timeout=5, headers=headers)
    except httpx.TransportError:
        return False
    return answer.status_code == 200


@pytest.mark.parametrize(
    ("victim", "name", "settings"),
    [
        (learner, "learner", ()),
        (parent, "learner", DIRECT),
        (rank, "learner", TWO_RANKS),
        (serve, "serve", DIRECT),
        (redis, "redis", ()),
        (api, "api", ()),
    ],
    ids=["learner", "parent of the learner", "rank", "serve", "redis", "api"],
)
def test_a_killed_process_is_started_again_and_training_goes_on(
    leeway, tiny: Callable[[], Path], victim: Any, name: str, settings: tuple[str, ...]
):
    with leeway(tiny(), "train", "tiny.toml", *ENDLESS, *SOON, *settings) as command:
        run: RunDirectory = command.run
        pids = command.state(run).pids
        command.until(lambda: num_lines(run) >= 3, 240)
        psutil.Process(victim(pids)).kill()
        command.until(lambda: pids_of(run)[name] != pids[name], 90)
        before = num_lines(run)
        command.until(lambda: num_lines(run) >= before + 3 and answers(run), 300)
        command.signal(signal.SIGTERM)
        ended = command.end(90, run)
    assert (ended.code, ended.left) == (0, []), ended.err
    (sentence,) = restarts_of(run)
    assert sentence.endswith("started again (1 of 3 times in 600 s)"), sentence
    after = {key: pid for key, pid in pids_of(run).items() if key != name}
    assert after == {key: pid for key, pid in pids.items() if key != name}


@pytest.mark.parametrize(
    ("victim", "name", "settings"),
    [(learner, "learner", ()), (rank, "learner", TWO_RANKS), (serve, "serve", ())],
)
def test_where_none_may_be_started_again_a_killed_process_ends_the_run(
    leeway, tiny: Callable[[], Path], victim: Any, name: str, settings: tuple[str, ...]
):
    settings = (*ENDLESS, *NEVER_AGAIN, *settings)
    with leeway(tiny(), "train", "tiny.toml", "--json", *settings) as command:
        run: RunDirectory = command.run
        pids = command.state(run).pids
        command.until(lambda: num_lines(run) > 0, 240)
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
