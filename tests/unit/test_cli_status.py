"""`leeway status` against an API that a script plays: once, live, refused, gone and back again."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from leeway.replay.config import ReplayConfig
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.store import Held, Waiting
from leeway.services import cli, status_client
from leeway.services.api import models
from leeway.services.config import load
from leeway.services.layout import RunDirectory, RunState, create_run
from leeway.services.snapshot import build_snapshot
from leeway.services.status_client import token_of


def body(step: int) -> str:
    run = {"name": "demo", "phase": "training", "elapsed_s": 0.0, "step": step, "num_steps": 9}
    return json.dumps({"run": run})


class Api:
    """An API on a free port. `streams` are the answers to /v1/events, one a connection."""

    def __init__(self) -> None:
        self.tokens: list[str | None] = []
        self.status: tuple[int, str] = (200, body(1))
        self.streams: list[str] = []
        self.kind = "text/event-stream"
        self.when_streams_end: Callable[[], None] = lambda: None
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                api.tokens.append(self.headers.get("authorization"))
                if self.path == "/v1/status":
                    self._answer(*api.status)
                elif api.streams:
                    self._answer(200, api.streams.pop(0), api.kind)
                else:
                    api.when_streams_end()
                    self._answer(503, problem(503, "Redis gave no answer"), PROBLEM)

            def _answer(self, code: int, text: str, kind: str = "application/json") -> None:
                self.send_response(code)
                self.send_header("content-type", PROBLEM if code >= 400 else kind)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:
                """Silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


PROBLEM = "application/problem+json"


def problem(status: int, detail: str) -> str:
    return json.dumps({"type": "about:blank", "title": "x", "status": status, "detail": detail})


def event(step: int, kind: str = "status") -> str:
    return f"id: {step}-0\nevent: {kind}\ndata: {body(step)}\n\n"


@pytest.fixture
def api() -> Iterator[Api]:
    served = Api()
    yield served
    served.close()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    for name in ("LEEWAY_API_TOKEN", "LEEWAY_API_READ_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(status_client, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(status_client, "MAX_PAUSE_S", 0.02)

    def leeway(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leeway", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return leeway


@pytest.fixture
def live(api: Api, run: Any) -> RunDirectory:
    """A run directory whose API is the scripted one."""
    made = create_run(load(None))
    pids = {"api": os.getpid()}
    made.write_state(RunState(name="run", started_at=1.0, pids=pids, api_address=api.address))
    return made


# --- once ---


def test_one_line_without_a_terminal(run, api: Api):
    assert run("status", api.address)[:2] == (0, "00:00 training step 1/9\n")


def test_json_is_the_body_as_it_was_sent(run, api: Api):
    assert run("status", api.address, "--json")[:2] == (0, body(1) + "\n")


async def test_a_status_as_the_api_makes_it_is_read_whole():
    """What a wait holds, and numbers as keys of objects."""
    held = Held("slot", 4, 31.0, 89.0)
    stats = msgspec.structs.replace(
        await MemoryReplay(ReplayConfig()).stats(),
        dropped_turns={"retriever": {3: 2}},
        slots=(held,),
        waits=(Waiting("learner", "missing", 2.0),),
    )
    snapshot = build_snapshot({"run": {"name": "demo"}}, stats)
    assert snapshot.replay is not None
    assert [wait.held for wait in snapshot.replay.waits] == [models.Held.model_validate(held)]
    assert status_client._heard(snapshot.model_dump_json()).snapshot == snapshot


def test_without_a_run_it_says_what_to_name(run):
    code, _, err = run("status")
    assert code == 2
    assert err == "leeway: there is no run in runs/; name a run directory or the URL of its API\n"


def test_a_url_that_does_not_answer(run):
    code, _, err = run("status", "http://127.0.0.1:9")
    assert code == 1
    assert err == "leeway: nobody answers at http://127.0.0.1:9; is the run still on?\n"


@pytest.mark.parametrize("url", ["http://a:b:c", "http://a:b"])
def test_what_is_no_url_is_one_sentence(run, url: str):
    code, _, err = run("status", url)
    assert code == 1
    assert "is not a URL" in err
    assert err.count("\n") == 1


def test_another_server_than_ours_is_told_apart(run, api: Api):
    api.status = (200, "<html>")
    assert "is not the status of a leeway run" in run("status", api.address)[2]


def test_a_stopped_run_says_how_to_go_on(run):
    stopped = create_run(load(None))
    code, _, err = run("status", str(stopped.root))
    assert code == 1
    assert f"leeway train --resume {stopped.root}" in err


def test_an_ended_run_is_its_summary(run):
    ended = create_run(load(None))
    ended.summary.write_text('{"steps": 3}')
    assert run("status", "--json")[:2] == (0, '{"steps": 3}\n')


def test_a_run_of_several_processes_whose_api_is_gone_is_not_called_stopped(run):
    made = create_run(load(None))
    state = RunState(
        name="run", started_at=1.0, pids={"api": 2**22 - 1}, api_address="http://127.0.0.1:9"
    )
    made.write_state(state)
    assert "leeway api, which served it, is gone" in run("status")[2]


# --- token ---


def test_the_token_is_the_environment_s_before_the_run_directory_s(
    run, api: Api, live: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    (live.root / "api-tokens.json").write_text('{"read": "r", "control": "c"}')
    run("status")
    monkeypatch.setenv("LEEWAY_API_TOKEN", "t")
    run("status")
    run("status", api.address)
    assert api.tokens == ["Bearer r", "Bearer t", "Bearer t"]


@pytest.mark.parametrize("text", ["", "[]", '{"read": 3}', "\x00"])
def test_a_file_of_tokens_that_cannot_be_read_gives_none(run, live: RunDirectory, text: str):
    (live.root / "api-tokens.json").write_text(text)
    assert token_of(live) is None


@pytest.mark.parametrize("code", [401, 403])
def test_a_refused_token_gets_a_sentence(run, api: Api, code: int):
    api.status = (code, problem(code, "no such token"))
    exit_code, _, err = run("status", api.address)
    assert exit_code == 1
    assert err == (
        f"leeway: {api.address} refused the token ({code}: no such token); give the run directory, "
        "whose api-tokens.json holds one, or set LEEWAY_API_TOKEN\n"
    )


@pytest.mark.parametrize("pids", [{"train": os.getpid()}, {"api": os.getpid()}])
def test_an_api_that_cannot_answer_now_is_not_called_gone(run, api: Api, pids: dict[str, int]):
    api.status = (503, problem(503, "Redis gave no answer within 5 s"))
    said = f"leeway: {api.address} answers, but Redis gave no answer within 5 s; try again in"
    assert run("status", api.address)[2].startswith(said)
    made = create_run(load(None))
    made.write_state(RunState(name="run", started_at=1.0, pids=pids, api_address=api.address))
    assert run("status", str(made.root))[2].startswith(said)


def test_any_other_refusal_is_what_the_api_says(run, api: Api):
    api.status = (500, problem(500, "something broke"))
    assert run("status", api.address)[2] == f"leeway: {api.address} answered 500: something broke\n"


# --- live ---


def test_watch_shows_each_step_and_goes_on_over_a_broken_stream(run, api: Api, live: RunDirectory):
    api.streams = [event(2) + ": a comment\n\n" + event(7, "step"), event(3) + event(4)]
    api.when_streams_end = lambda: live.summary.write_text('{"steps": 4}')
    code, out, err = run("status", "--watch")
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("00:00")]
    assert lines == [f"00:00 training step {step}/9" for step in (2, 3, 4)]
    assert '{"steps": 4}' in out
    assert err == ""


def _on_a_terminal(*arguments: str) -> str:
    """What `leeway` writes to a terminal."""
    leader, follower = pty.openpty()
    ran = subprocess.Popen(
        [sys.executable, "-m", "leeway.services.cli", *arguments],
        stdin=follower, stdout=follower, stderr=follower,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"},
    )  # fmt: skip
    os.close(follower)
    found = bytearray()
    with suppress(OSError):  # EIO: it has closed its end
        while piece := os.read(leader, 4096):
            found += piece
    os.close(leader)
    assert ran.wait(60) == 0, found.decode()
    return found.decode()


def test_on_a_terminal_it_is_live_unless_told_otherwise(api: Api, live: RunDirectory):
    api.streams = [event(2) + event(3)]
    api.when_streams_end = lambda: live.summary.write_text('{"steps": 3}')
    root = str(live.root.absolute())
    assert '{"steps": 3}' not in _on_a_terminal("status", root, "--once")
    assert '{"run":' in _on_a_terminal("status", root, "--json").replace(" ", "")
    assert api.streams, "neither has listened"
    assert '{"steps": 3}' in _on_a_terminal("status", root)
    assert not api.streams


def test_watch_with_json_is_a_line_for_each_state(run, api: Api, live: RunDirectory):
    api.streams = [event(2) + event(3)]
    api.when_streams_end = lambda: live.summary.write_text('{"steps": 3}')
    out = run("status", "--watch", "--json")[1]
    steps = [json.loads(line).get("run", {}).get("step") for line in out.splitlines()]
    assert steps == [2, 3, None]


def test_watch_gives_up_when_nobody_answers_for_long(
    run, api: Api, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(status_client, "RECONNECT_S", 0.1)
    api.streams = [event(2)]
    code, out, err = run("status", api.address, "--watch")
    assert code == 1
    assert f"{api.address} answers, but Redis gave no answer; trying again for 0 s" in out
    assert "for 0.1 s now; is the run still on?" in err


def test_what_is_no_stream_of_events_is_told_apart(run, api: Api, live: RunDirectory):
    api.kind, api.streams = "text/html", ["<html>"]
    code, _, err = run("status", "--watch")
    assert code == 1
    assert f"{api.address}/v1/events is no event stream" in err


def test_watch_ends_at_once_when_the_token_is_refused(run, api: Api):
    api.status = (401, problem(401, "no token"))
    assert "refused the token" in run("status", api.address, "--watch")[2]
