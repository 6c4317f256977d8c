"""The REST surface: what it answers, to whom, and what it says when Redis does not."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from leeway.replay.board import EngineRecord
from leeway.replay.errors import ConfigurationError, StoreUnavailable
from leeway.replay.run_board import Event
from leeway.replay.run_records import ControlRequest, LiveSettings
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import ReplayStats
from leeway.services.api import app as api
from leeway.services.api import limits, models, reader
from leeway.services.api.auth import FILE, Tokens, tokens_of
from leeway.services.api.process import tell_tokens
from leeway.services.api.routes import events, health
from leeway.services.config import RunConfig, load
from leeway.services.layout import RunDirectory

TOKENS = Tokens("read-token-0123456789", "control-token-0123456789")
STATS = ReplayStats(
    learner_version=PolicyVersion(7),
    num_slots=3,
    num_ready=2,
    num_leased=4,
    num_bytes=1000,
    admission_paused=False,
    num_admitted=40,
    num_added=37,
    num_drawn=28,
    num_trained=24,
    num_slots_expired=0,
    num_leases_expired=0,
    dropped={"retriever": 5, "timeout": 1},
    outstanding={6: 4, 7: 5},
    wait_room_s=10.0,
    play_s=30.0,
    wait_data_s=20.0,
)
WORKER = {
    "num_groups_in_flight": 2,
    "num_episodes_in_flight": 3,
    "episodes_by_stage": {"generating": {"10s": 2}, "searching": {"1m": 1}},
    "episodes": {"answer": 10, "turns": 2},
    "dropped": {"timeout": 1},
    "retriever": {
        "num_searches": 4,
        "num_failed": 0,
        "num_in_flight": 1,
        "search_s": {"bounds": [1.0], "counts": [4, 0], "sum": 2.0},
        "last_error": None,
        "last_success_at": 5.0,
    },
}
SECTIONS: dict[str, dict[str, Any]] = {
    "joined": {"version": 0},
    "run": {"name": "demo", "num_steps": 60, "bound": 4, "started_at": 1.0, "objective": "grpo"},
    "learner": {
        "step": 7,
        "version": 7,
        "metrics": {"reward_mean": 0.5, "staleness_mean": 1.5, "staleness_max": 3},
    },
    "totals": {"histograms": {"staleness": {"bounds": [0.0, 1.0], "counts": [3, 5, 2]}}},
    "policy": {"engine-1": {"version": 6, "pause_ms": 12.0, "tokens_per_s": 3000.0}},
    "rollout": {"worker-0": WORKER, "worker-1": WORKER},
    "eval": {
        "before": {"step": 0, "scores": {"exact_match": 0.31}},
        "history": [{"step": 5, "scores": {"exact_match": 0.8}}],
    },
}


class FakeBoard:
    """A run board that holds what the test says."""

    def __init__(self, sections: Mapping[str, dict[str, Any]], phase: str = "training") -> None:
        self.sections = {name: dict(value) for name, value in sections.items()}
        self.current = phase
        self.is_mute = False
        self.live = LiveSettings()
        self.told: list[tuple[str, str]] = []
        self.asked: dict[str, ControlRequest] = {}
        self.is_closed = False
        self.num_changes = self.num_lost = 0
        """Changes that were tried, and how many of them somebody else forestalls."""

    async def get_all(self) -> dict[str, dict[str, Any]]:
        return {name: dict(value) for name, value in self.sections.items()}

    async def phase(self) -> str | None:
        return self.current

    async def events(self, after: str = "", count: int = 100) -> Sequence[Event]:
        return [Event("5-0", 5.0, "run", "started")] if after in ("", "0-0") else []

    async def append_event(self, kind: str, text: str) -> None:
        if self.is_mute:
            raise StoreUnavailable("no answer from 10.0.0.1:6379")
        self.told.append((kind, text))

    async def steps(self, after: int = 0, count: int = 100) -> list[dict[str, Any]]:
        return [{"step": step} for step in range(after + 1, 8)][:count]

    async def publishes(self, count: int = 20) -> list[dict[str, Any]]:
        return []

    async def ask(self, action: Any, detail: str, take_up_s: float) -> ControlRequest:
        request = ControlRequest(
            request_id="r1", action=action, asked_at=1.0, deadline_at=2.0, detail=detail
        )
        self.asked[action] = request
        return request

    async def request(self, action: Any) -> ControlRequest | None:
        return self.asked.get(action)

    async def settings(self) -> LiveSettings:
        return self.live

    async def change_settings(
        self, values: Mapping[str, float], before: LiveSettings
    ) -> LiveSettings | None:
        self.num_changes += 1
        if self.num_changes <= self.num_lost:
            self.live = LiveSettings(self.live.revision + 1, {"learner.checkpoint_every": 7})
        if before.revision != self.live.revision:
            return None
        self.live = LiveSettings(self.live.revision + 1, {**self.live.values, **values})
        return self.live

    async def close(self) -> None:
        self.is_closed = True


class FakeReplay:
    """A buffer with the numbers STATS; it counts how often it is asked."""

    def __init__(self, error: Exception | None = None, delay_s: float = 0.0) -> None:
        self._error = error
        self.delay_s = delay_s
        self.num_asked = 0
        self.paused: list[bool] = []

    async def stats(self) -> ReplayStats:
        self.num_asked += 1
        await asyncio.sleep(self.delay_s)
        if self._error is not None:
            raise self._error
        return STATS

    async def pause_admission(self, paused: bool) -> None:
        self.paused.append(paused)

    async def records(self) -> list[Any]:
        return []

    async def close(self) -> None:
        return


def build(
    replay: Any = None,
    board: FakeBoard | None = None,
    tokens: Tokens | None = None,
    config: RunConfig | None = None,
    run: Path = Path("runs/demo"),
    versions: Sequence[int] = (6,),
) -> FastAPI:
    async def engines() -> list[EngineRecord]:
        return [
            EngineRecord(f"engine-{number}", 1, "float32", [], version, "10.0.0.2")
            for number, version in enumerate(versions, 1)
        ]

    buffer = replay or FakeReplay()
    return api.create_app(
        board or FakeBoard(SECTIONS),
        buffer,
        buffer,
        engines,
        run=run,
        config=config or load(None),
        tokens=tokens,
    )


async def ask(app: FastAPI, path: str, method: str = "GET", **more: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.request(method, path, **more)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


# --- who may come in ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/startupz", "/"])
async def test_probes_and_the_page_need_no_token(path: str):
    assert (await ask(build(tokens=TOKENS), path)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/status", "/metrics", "/v1/openapi.json", "/v1/none", "/v1"])
async def test_without_a_token_nothing_else_answers(path: str):
    answer = await ask(build(tokens=TOKENS), path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Bearer realm="leeway"'
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "given", ["Bearer wrong", "Basic read-token-0123456789", "Bearer", "read-token-0123456789", "é"]
)
async def test_a_wrong_token_is_told_apart_from_a_missing_one(given: str):
    headers = {"authorization": given.encode("latin-1")}
    answer = await ask(build(tokens=TOKENS), "/v1/status", headers=headers)
    assert answer.status_code == 401
    assert "is no token of this run" in answer.json()["detail"]


async def test_the_read_token_reads_and_does_not_control():
    app = build(tokens=TOKENS)
    read = await ask(app, "/v1/status", headers=bearer(TOKENS.read))
    assert (read.status_code, read.headers["leeway-scope"]) == (200, "read")
    refused = await ask(app, "/v1/control/pause", "POST", headers=bearer(TOKENS.read))
    assert refused.status_code == 403
    assert refused.json()["title"] == "The token may not do this"


@pytest.mark.parametrize(
    ("path", "token", "code"),
    [("/v1/status", TOKENS.read, 200), ("/v1/replay", TOKENS.read, 200), ("/v1/status", "x", 401)],
)
async def test_every_answer_with_data_is_what_its_content_type_says(path, token, code):
    answer = await ask(build(tokens=TOKENS), path, headers=bearer(token))
    assert (answer.status_code, answer.headers["x-content-type-options"]) == (code, "nosniff")


async def test_the_control_token_does_both():
    replay = FakeReplay()
    app = build(replay, tokens=TOKENS)
    read = await ask(app, "/v1/status", headers=bearer(TOKENS.control))
    assert (read.status_code, read.headers["leeway-scope"]) == (200, "control")
    assert (await ask(app, "/v1/control/pause", "POST", headers=bearer(TOKENS.control))).is_success
    assert replay.paused == [True]


def test_tokens_are_generated_once_and_only_their_owner_reads_them(tmp_path: Path):
    first, is_new = tokens_of(tmp_path, {})
    assert is_new and first.read != first.control and len(first.read) >= 32
    assert tokens_of(tmp_path, {}) == (first, False)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert first.read not in repr(first)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_new_tokens_are_told_at_a_terminal_and_their_place_everywhere(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    tell_tokens(TOKENS, RunDirectory(tmp_path))
    said = capsys.readouterr().out
    assert [token in said for token in (TOKENS.read, TOKENS.control)] == [is_terminal] * 2
    assert str(tmp_path / FILE) in said


def test_the_file_of_tokens_is_whole_when_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    linked: list[Tokens] = []
    link = os.link

    def watched(source: Path, target: Path) -> None:
        assert not target.exists()
        link(source, target)
        linked.append(msgspec.json.decode(target.read_bytes(), type=Tokens))

    monkeypatch.setattr(os, "link", watched)
    tokens, _ = tokens_of(tmp_path, {})
    assert linked == [tokens]
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_of_two_that_generate_tokens_at_once_the_first_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, _ = tokens_of(tmp_path, {})
    # The second has looked before the first had written.
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert tokens_of(tmp_path, {}) == (first, False)


def test_tokens_of_the_environment_go_before_the_file(tmp_path: Path):
    given = {"LEEWAY_API_READ_TOKEN": "r" * 16, "LEEWAY_API_CONTROL_TOKEN": "c" * 16}
    assert tokens_of(tmp_path, given) == (Tokens("r" * 16, "c" * 16), False)
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    ("read", "control", "words"),
    [("short", "c" * 16, "at least 16"), ("a" * 16, "a" * 16, "are the same")],
)
def test_tokens_that_protect_nothing_are_refused(
    tmp_path: Path, read: str, control: str, words: str
):
    given = {"LEEWAY_API_READ_TOKEN": read, "LEEWAY_API_CONTROL_TOKEN": control}
    with pytest.raises(ConfigurationError, match=words):
        tokens_of(tmp_path, given)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The seconds that the limits see."""
    seconds = [5.9]
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    yield seconds


async def test_the_sixth_request_of_a_second_is_refused_where_five_are_allowed(clock: list[float]):
    app = build(config=load(None, ["api.max_requests_per_s=5"]))
    statuses = [(await ask(app, "/v1/status")).status_code for _ in range(6)]
    assert statuses == [200] * 5 + [429]
    assert (await ask(app, "/livez")).status_code == 200
    clock[0] = 6.0
    assert (await ask(app, "/v1/status")).status_code == 200


async def test_a_flood_without_a_token_does_not_lock_out_who_has_one(clock: list[float]):
    app = build(tokens=TOKENS, config=load(None, ["api.max_requests_per_s=1"]))
    flood = [(await ask(app, "/v1/status")).status_code for _ in range(4)]
    assert flood == [401, 429, 429, 429]
    headers = bearer(TOKENS.read)
    assert (await ask(app, "/v1/status", headers=headers)).status_code == 200
    assert (await ask(app, "/v1/status", headers=headers)).status_code == 429


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:9999"},
    ],
    ids=str,
)
async def test_without_tokens_a_page_of_another_site_changes_nothing(headers: dict[str, str]):
    replay = FakeReplay()
    refused = await ask(build(replay), "/v1/control/pause", "POST", headers=headers)
    assert (refused.status_code, replay.paused) == (403, [])
    assert refused.headers["content-type"] == "application/problem+json"
    assert "another site" in refused.json()["detail"]


@pytest.mark.parametrize(
    "headers", [{}, {"origin": "http://localhost", "sec-fetch-site": "same-origin"}], ids=str
)
async def test_without_tokens_the_dashboard_and_the_shell_change_the_run(headers: dict[str, str]):
    replay = FakeReplay()
    assert (await ask(build(replay), "/v1/control/pause", "POST", headers=headers)).is_success
    assert replay.paused == [True]


@pytest.mark.parametrize(
    ("bound_to", "host", "status"),
    [
        ("127.0.0.1", "127.0.0.1:8080", 200),
        ("127.0.0.1", "[::1]:8080", 200),
        ("127.0.0.1", "evil.example", 403),
        ("127.0.0.1", "[", 403),
        ("localhost", "10.0.0.1", 403),
        ("0.0.0.0", "node-1.example", 200),
    ],
)
async def test_without_tokens_a_loopback_address_answers_to_names_of_this_machine(
    bound_to: str, host: str, status: int
):
    app = build(config=load(None, [f"api.host={bound_to}"]))
    assert (await ask(app, "/v1/status", headers={"host": host})).status_code == status


async def test_with_tokens_any_name_of_the_machine_will_do():
    headers = {**bearer(TOKENS.read), "host": "run.example"}
    assert (await ask(build(tokens=TOKENS), "/v1/status", headers=headers)).status_code == 200


def test_nobody_is_believed_about_the_address_of_a_client():
    assert api.server_settings(build(), grace_s=1).proxy_headers is False


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_above_the_limit_is_413(is_chunked: bool):
    async def chunks():
        yield b"x" * 2000

    app = build(config=load(None, ["api.max_body_bytes=1024"]))
    content = chunks() if is_chunked else b"x" * 2000
    answer = await ask(app, "/v1/slots", "POST", content=content)
    assert answer.status_code == 413
    assert "1024 bytes" in answer.json()["detail"]


def scope_of(path: str) -> Any:
    """What a server hands to the application for a GET."""
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "scheme": "http",
        "server": ("localhost", 80), "root_path": "",
    }  # fmt: skip


async def test_a_client_that_is_gone_before_the_stream_begins_is_no_listener():
    app = build()

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def sent(message: Any) -> None:
        await asyncio.sleep(0)

    async with asyncio.timeout(60):
        await app(scope_of("/v1/events"), gone, sent)
    assert app.state.hub.num_listeners == 0


async def test_a_client_that_takes_nothing_is_no_listener_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(events, "SEND_TIMEOUT_S", 0.05)
    app, sent = build(), list[Any]()

    async def there() -> Any:
        await asyncio.sleep(3600)

    async def full(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.sleep(3600)

    async with asyncio.timeout(60):
        await app(scope_of("/v1/events"), there, full)
    assert app.state.hub.num_listeners == 0
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_a_stream_whose_time_is_up_is_ended_as_answers_are():
    answer = await ask(build(), "/v1/events?wait_s=0")
    assert answer.text.startswith("retry: 2000\n\nid: 5-0.7\nevent: status\n")


# --- the status ---------------------------------------------------------------------------------


async def test_the_status_reads_back_as_what_it_was_made_from():
    answer = await ask(build(), "/v1/status")
    status = models.Status.model_validate_json(answer.content)
    assert (status.learning.reward, status.generated_tokens_per_s) == (0.5, 3000.0)
    assert status.config == {"objective": "so-grpo"}


async def test_two_hundred_at_once_cost_one_read_of_redis():
    replay = FakeReplay(delay_s=0.01)
    app = build(replay)
    answers = await asyncio.gather(*(ask(app, "/v1/status") for _ in range(200)))
    assert {answer.status_code for answer in answers} == {200}
    assert replay.num_asked == 1


async def test_a_fresh_status_is_told_without_the_router_and_counted_as_its_route(
    monkeypatch: pytest.MonkeyPatch,
):
    app = build(tokens=TOKENS)
    first = await ask(app, "/v1/status", headers=bearer(TOKENS.read))

    async def broken(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(app.router, "middleware_stack", broken)
    again = await ask(app, "/v1/status", headers=bearer(TOKENS.read))
    assert (again.content, again.headers) == (first.content, first.headers)
    headers = {**bearer(TOKENS.read), "if-none-match": first.headers["etag"]}
    assert (await ask(app, "/v1/status", headers=headers)).status_code == 304
    assert (await ask(app, "/v1/status")).status_code == 401
    monkeypatch.undo()
    text = (await ask(app, "/metrics", headers=bearer(TOKENS.read))).text
    counted = [line for line in text.splitlines() if 'route="/v1/status"' in line]
    totals = [line for line in counted if line.startswith("leeway_api_requests_total")]
    assert [line.split()[-1] for line in totals if 'status="200"' in line] == ["2.0"]
    assert [line.split()[-1] for line in totals if 'status="304"' in line] == ["1.0"]


async def test_who_keeps_asking_does_not_wait_for_redis(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader, "AHEAD_S", -1.0)
    monkeypatch.setattr(reader, "REFRESH_S", 3600.0)
    replay = FakeReplay()
    app = build(replay)
    await ask(app, "/v1/status")
    replay.delay_s = 3600
    for _ in range(3):
        assert (await ask(app, "/v1/status")).status_code == 200
    await asyncio.sleep(0.01)
    assert replay.num_asked == 2  # the one under way serves all who come meanwhile
    await app.state.reader.close()


async def test_after_a_moment_redis_is_read_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader, "REFRESH_S", 0.0)
    replay = FakeReplay()
    app = build(replay)
    for _ in range(3):
        await ask(app, "/v1/status")
    assert replay.num_asked == 3


@pytest.mark.parametrize(
    "path",
    ["status", "runs", "runs/demo", "rollouts", "policy", "replay", "learner", "learner/steps",
     "trajectories", "control/drain", "sweeps", "openapi.json"],
)  # fmt: skip
async def test_who_has_the_answer_already_gets_304(path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader, "REFRESH_S", 3600.0)
    monkeypatch.setattr(reader, "AHEAD_S", 3600.0)
    board = FakeBoard(SECTIONS)
    await board.ask("drain", "", 1.0)
    app = build(board=board)
    first = await ask(app, f"/v1/{path}")
    assert first.status_code == 200
    again = await ask(app, f"/v1/{path}", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    tag = first.headers["etag"]
    # A proxy that compresses makes a weak tag of it.
    is_there = {'"else"': 200, f'"else", {tag}': 304, f"W/{tag}": 304, "*": 304}
    for given, status in is_there.items():
        answer = await ask(app, f"/v1/{path}", headers={"if-none-match": given})
        assert answer.status_code == status


async def test_a_change_is_never_answered_as_unchanged():
    answer = await ask(build(), "/v1/control/pause", "POST", headers={"if-none-match": "*"})
    assert (answer.status_code, "etag" in answer.headers) == (200, False)


# --- the parts ----------------------------------------------------------------------------------


async def test_two_workers_are_added_up():
    body = (await ask(build(), "/v1/rollouts")).json()
    assert body["num_episodes_in_flight"] == 6
    assert body["episodes_by_stage"] == {"generating": {"10s": 4}, "searching": {"1m": 2}}
    assert body["stop_reasons"] == {"answer": 20, "turns": 4}
    assert body["failures"] == {"timeout": 2}
    assert (body["retriever"], body["workers"][0]["retriever"]["mean_s"]) == ("healthy", 0.5)


async def test_a_retriever_whose_newest_search_failed_is_failing():
    failing = {**WORKER, "retriever": {**WORKER["retriever"], "last_error": "timeout"}}
    board = FakeBoard({**SECTIONS, "rollout": {"worker-0": failing}})
    assert (await ask(build(board=board), "/v1/rollouts")).json()["retriever"] == "failing"


async def test_an_engine_at_6_is_one_behind_a_learner_at_7():
    body = (await ask(build(), "/v1/policy")).json()
    assert body["engines"][0]["num_behind"] == 1
    assert body["live_versions"] == {"6": 1}


async def test_the_buffer_tells_its_wait_split_and_staleness():
    body = (await ask(build(), "/v1/replay")).json()
    assert body["size"] == 6
    assert body["wait_split"]["rollout"] == {
        "waiting_s": 10.0,
        "working_s": 30.0,
        "waiting_share": 0.25,
    }
    assert (body["staleness_histogram"], body["staleness_over"]) == ({"0": 3, "1": 5}, 2)
    assert body["limiter"] == "nobody is held back"
    assert "url" not in body["limits"]


async def test_steps_are_read_page_by_page():
    app = build()
    found, cursor = list[int](), "2"
    for _ in range(2):
        page = (await ask(app, f"/v1/learner/steps?cursor={cursor}&limit=3")).json()
        found += [line["step"] for line in page["items"]]
        cursor = page["next"]
    assert (found, cursor) == ([3, 4, 5, 6, 7], None)
    assert (await ask(app, "/v1/learner/steps?cursor=7")).json() == {"items": [], "next": None}


async def test_every_held_out_evaluation_is_told_by_step():
    learner = (await ask(build(), "/v1/learner")).json()
    assert learner["eval"]["history"] == [
        {"step": 0, "exact_match": 0.31}, {"step": 5, "exact_match": 0.8},
    ]  # fmt: skip
    assert (learner["eval"]["before"], learner["eval"]["latest"]) == (0.31, 0.8)


# --- probes -------------------------------------------------------------------------------------


async def test_ready_is_who_has_an_engine_within_the_window():
    assert (await ask(build(), "/readyz")).status_code == 200


@pytest.mark.parametrize("version", [3, 7, 8])
async def test_an_engine_within_the_bound_or_one_ahead_of_the_buffer_is_ready(version: int):
    assert (await ask(build(versions=[2, version]), "/readyz")).status_code == 200


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ([], "no engine has registered yet"),
        ([2], "engine-1 holds version 2, the learner is at 7 and the bound is 4"),
        ([9], "engine-1 holds version 9, the learner is at 7"),
    ],
)
async def test_an_engine_without_a_version_to_sample_from_is_not_ready(
    versions: list[int], words: str
):
    answer = await ask(build(versions=versions), "/readyz")
    assert answer.status_code == 503
    assert words in answer.json()["reasons"][0]


async def test_what_engines_hold_before_the_learner_has_joined_is_no_version_of_the_run():
    board = FakeBoard({name: value for name, value in SECTIONS.items() if name != "joined"})
    answer = await ask(build(board=board, versions=[7]), "/readyz")
    assert answer.status_code == 503
    assert "the learner has not joined" in answer.json()["reasons"][0]


async def test_a_run_that_was_ready_stays_so_between_a_step_and_its_commit(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(health, "REFRESH_S", -1.0)
    versions = [7]
    app = build(versions=versions)
    assert (await ask(app, "/readyz")).status_code == 200
    versions[:] = [2]
    assert (await ask(app, "/readyz")).status_code == 200
    monkeypatch.setattr(health, "HOLD_S", 0.0)
    assert (await ask(app, "/readyz")).status_code == 503


async def test_a_process_without_redis_lives_and_is_not_ready():
    app = build(FakeReplay(StoreUnavailable("no answer from 10.0.0.1:6379")))
    assert (await ask(app, "/livez")).status_code == 200
    for path in ("/readyz", "/startupz"):
        answer = await ask(app, path)
        assert answer.json() == {
            "status": "not-ready",
            "reasons": ["no answer from 10.0.0.1:6379"],
        }


# --- control and settings -----------------------------------------------------------------------


async def test_a_checkpoint_is_asked_of_the_learner_and_accepted():
    board = FakeBoard(SECTIONS)
    answer = await ask(build(board=board), "/v1/control/checkpoint?wait_s=0", "POST")
    assert answer.status_code == 202
    assert answer.json()["state"] == "waiting"
    assert list(board.asked) == ["checkpoint"]


async def test_a_drain_leaves_admission_to_the_learner_that_takes_it_up():
    replay, board = FakeReplay(), FakeBoard(SECTIONS)
    answer = await ask(build(replay, board), "/v1/control/drain", "POST")
    assert (answer.status_code, replay.paused, list(board.asked)) == (202, [], ["drain"])


async def test_a_drain_that_is_open_is_not_undone_by_a_resumption():
    replay, board = FakeReplay(), FakeBoard(SECTIONS)
    app = build(replay, board)
    await ask(app, "/v1/control/drain", "POST")
    answer = await ask(app, "/v1/control/resume", "POST")
    assert (answer.status_code, replay.paused) == (409, [])
    board.asked["drain"] = msgspec.structs.replace(board.asked["drain"], state="expired")
    assert (await ask(app, "/v1/control/resume", "POST")).status_code == 200
    assert replay.paused == [False]


@pytest.mark.parametrize("phase", ["starting", "evaluating-before", "evaluating-after", "done"])
@pytest.mark.parametrize("action", ["drain", "checkpoint", "publish"])
async def test_a_run_that_does_not_train_takes_no_request(action: str, phase: str):
    board = FakeBoard(SECTIONS, phase=phase)
    answer = await ask(build(board=board), f"/v1/control/{action}", "POST")
    assert (answer.status_code, board.asked) == (409, {})


async def test_a_pause_whose_event_is_lost_is_done_all_the_same():
    replay, board = FakeReplay(), FakeBoard(SECTIONS)
    board.is_mute = True
    answer = await ask(build(replay, board), "/v1/control/pause", "POST")
    assert (answer.status_code, replay.paused) == (200, [True])


async def test_probes_that_come_together_ask_for_the_engines_once():
    num_asked = 0

    async def engines() -> list[EngineRecord]:
        nonlocal num_asked
        num_asked += 1
        await asyncio.sleep(0.01)
        return []

    buffer: Any = FakeReplay()
    app = api.create_app(
        FakeBoard(SECTIONS), buffer, buffer, engines,
        run=Path("runs/demo"), config=load(None), tokens=None,
    )  # fmt: skip
    answers = await asyncio.gather(*(ask(app, "/readyz") for _ in range(20)))
    assert ({answer.status_code for answer in answers}, num_asked) == ({503}, 1)


@pytest.mark.parametrize(
    ("path", "method", "hangs"),
    [
        ("/v1/events", "GET", "events"),
        ("/v1/policy", "GET", "publishes"),
        ("/v1/learner/steps", "GET", "steps"),
        ("/v1/settings", "GET", "settings"),
        ("/v1/control/drain", "GET", "request"),
        ("/v1/control/drain", "POST", "ask"),
        ("/v1/control/resume", "POST", "request"),
    ],
)
async def test_a_board_that_hangs_is_503_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch, path: str, method: str, hangs: str
):
    async def hang(*_: Any, **__: Any) -> None:
        await asyncio.sleep(5)

    board = FakeBoard(SECTIONS)
    monkeypatch.setattr(reader, "ANSWER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(board, hangs, hang)
    assert (await ask(build(board=board), path, method)).status_code == 503


async def test_a_setting_is_checked_as_the_configuration_is():
    board = FakeBoard(SECTIONS)
    body = {"values": {"learner.learning_rate": -1.0}}
    answer = await ask(build(board=board), "/v1/settings", "PATCH", json=body)
    assert answer.status_code == 422
    assert "learner.learning_rate is -1" in answer.json()["detail"]
    assert board.live.revision == 0


async def test_a_key_that_is_fixed_names_those_that_are_not():
    body = {"values": {"rollout.group_size": 4}}
    answer = await ask(build(), "/v1/settings", "PATCH", json=body)
    assert answer.status_code == 422
    assert "learner.learning_rate" in answer.json()["detail"]


async def test_a_change_raises_the_revision_and_becomes_an_event():
    board = FakeBoard(SECTIONS)
    body = {"values": {"learner.num_steps": 80}}
    answer = (await ask(build(board=board), "/v1/settings", "PATCH", json=body)).json()
    steps = next(one for one in answer["settings"] if one["key"] == "learner.num_steps")
    assert (answer["revision"], steps["value"], steps["started_with"]) == (1, 80, 60)
    assert answer["is_applied"] is False
    assert board.told == [("settings", "revision 1: learner.num_steps = 80")]


async def test_a_change_of_settings_that_are_others_by_now_is_412():
    board = FakeBoard(SECTIONS)
    app = build(board=board)
    tag = (await ask(app, "/v1/settings")).headers["etag"]
    body = {"values": {"learner.num_steps": 80}}
    first = await ask(app, "/v1/settings", "PATCH", json=body, headers={"if-match": f"W/{tag}"})
    second = await ask(app, "/v1/settings", "PATCH", json=body, headers={"if-match": tag})
    assert (first.status_code, second.status_code) == (200, 412)


async def test_a_worker_that_applies_a_change_makes_no_other_etag():
    board = FakeBoard(SECTIONS)
    app = build(board=board)
    before = (await ask(app, "/v1/settings")).headers["etag"]
    board.sections["rollout"]["worker-0"] = {**WORKER, "settings_revision": 9}
    after = await ask(build(board=board), "/v1/settings")
    assert (after.json()["applied"]["worker-0"], after.headers["etag"]) == (9, before)


async def test_a_change_that_somebody_forestalls_is_made_of_what_stands_then():
    board = FakeBoard(SECTIONS)
    board.num_lost = 1
    body = {"values": {"learner.num_steps": 80}}
    answer = await ask(build(board=board), "/v1/settings", "PATCH", json=body)
    assert (answer.status_code, answer.json()["revision"]) == (200, 2)
    assert board.live.values == {"learner.checkpoint_every": 7, "learner.num_steps": 80}


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/status", "/metrics", "/v1/replay"])
async def test_no_redis_is_503_with_the_reason(path: str):
    answer = await ask(build(FakeReplay(StoreUnavailable("no answer from 10.0.0.1:6379"))), path)
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"] == "no answer from 10.0.0.1:6379"


async def test_a_redis_that_hangs_is_503_after_the_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader, "ANSWER_TIMEOUT_S", 0.05)
    answer = await ask(build(FakeReplay(delay_s=5)), "/v1/status")
    assert answer.status_code == 503
    assert "0.05 s" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/status", 404),
        ("GET", "/v1/runs/none", 404),
        ("GET", "/v1/trajectories/none", 404),
        ("DELETE", "/v1/status", 405),
        ("GET", "/v1/learner/steps?limit=0", 422),
        ("GET", "/v1/events?after=x", 422),
    ],
)
async def test_every_error_is_a_problem(method: str, path: str, status: int):
    answer = await ask(build(), path, method)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    models.Problem.model_validate_json(answer.content)


async def test_a_redis_that_refuses_the_password_is_no_fault_of_the_request():
    words = "Redis at 10.0.0.1:6379 refuses the user or password in replay.url"
    answer = await ask(build(FakeReplay(ConfigurationError(words))), "/v1/status")
    assert (answer.status_code, answer.json()["detail"]) == (500, words)


async def test_an_unexpected_error_does_not_show_its_message():
    answer = await ask(build(FakeReplay(RuntimeError("redis://:secret@host"))), "/v1/status")
    assert answer.status_code == 500
    assert "secret" not in answer.text


# --- serving ------------------------------------------------------------------------------------


def test_a_served_app_answers_on_a_free_port_and_closes_its_clients_when_it_ends():
    board = FakeBoard(SECTIONS)
    address, stop = api.serve_in_thread(build(board=board), "127.0.0.1", 0)
    assert httpx.get(f"{address}/livez").status_code == 200
    stop()
    assert board.is_closed
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{address}/livez", timeout=1)


def test_a_server_that_is_told_to_end_ends_the_streams_and_waits_for_none():
    address, stop = api.serve_in_thread(build(), "127.0.0.1", 0)
    with httpx.stream("GET", f"{address}/v1/events", timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "retry: 2000"
        threading.Thread(target=stop).start()
        assert any(line == "event: status" for line in lines)  # and no error: the answer is whole


def test_who_connects_before_the_server_runs_waits_for_it():
    with api.listen("127.0.0.1", 0) as listener:
        socket.create_connection(listener.getsockname(), timeout=60).close()


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"api.port = {port} cannot be used"):
            api.serve_in_thread(build(), "127.0.0.1", port)
