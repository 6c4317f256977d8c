"""The REST surface: what it answers, and what it says when Redis does not."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import BaseModel

from leeway.replay.errors import ConfigurationError, StoreUnavailable
from leeway.replay.run_board import Event
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import ReplayStats
from leeway.services.api import app as api
from leeway.services.api import models
from leeway.services.api.metrics import GAUGES
from leeway.services.snapshot import Snapshot

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
    wait_data_s=20.0,
)
SECTIONS: dict[str, dict[str, Any]] = {
    "run": {"name": "demo", "num_steps": 60, "bound": 4, "started_at": 1.0},
    "learner": {
        "step": 7,
        "version": 7,
        "metrics": {"reward_mean": 0.5, "staleness_mean": 1.5, "staleness_max": 3},
    },
    "policy": {"engine-1": {"version": 6, "pause_ms": 12.0, "tokens_per_s": 3000.0}},
    "eval": {
        "before": {"step": 0, "scores": {"exact_match": 0.31}},
        "history": [{"step": 5, "scores": {"exact_match": 0.8}}],
    },
}


class FakeBoard:
    def __init__(self, sections: dict[str, dict[str, Any]]) -> None:
        self.sections = {name: dict(section) for name, section in sections.items()}
        self.is_closed = False

    async def get_all(self) -> dict[str, dict[str, Any]]:
        return self.sections

    async def phase(self) -> str | None:
        return "training" if self.sections else None

    async def events(self, after: str = "", count: int = 100) -> list[Event]:
        return [Event("1-0", 1.0, "checkpoint", "step 5 is on disk")][:count]

    async def close(self) -> None:
        self.is_closed = True


class FakeReplay:
    def __init__(self, failure: Exception | None = None, delay_s: float = 0) -> None:
        self.failure, self.delay_s = failure, delay_s

    async def stats(self) -> ReplayStats:
        await asyncio.sleep(self.delay_s)
        if self.failure:
            raise self.failure
        return STATS

    async def close(self) -> None:
        """Nothing to close."""


async def get(
    path: str,
    replay: FakeReplay | None = None,
    sections: dict[str, dict[str, Any]] = SECTIONS,
) -> httpx.Response:
    app = api.create_app(FakeBoard(sections), replay or FakeReplay(), {"objective": "so-grpo"})
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        return await client.get(path)


async def test_health_is_answered_while_redis_is_away():
    answer = await get("/healthz", FakeReplay(StoreUnavailable("gone")))
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_status_joins_the_board_and_the_buffer():
    body = (await get("/v1/status")).json()
    assert body["run"]["name"] == "demo"
    assert body["run"]["phase"] == "training"
    assert body["run"]["policy_version"] == 7
    assert body["run"]["last_event"] == "step 5 is on disk"
    assert body["engines"][0]["version"] == 6
    assert body["staleness"] == {"mean": 1.5, "max": 3, "max_seen": 3, "bound": 4}
    assert body["replay"]["num_dropped"] == 6
    assert body["eval"] == {"before": 0.31, "latest": 0.8, "latest_step": 5}
    assert body["config"] == {"objective": "so-grpo"}


async def test_status_is_answered_before_any_section_was_written():
    answer = await get("/v1/status", sections={})
    assert answer.status_code == 200
    assert answer.json()["learning"]["reward"] is None


async def test_a_status_reads_back_as_the_snapshot_it_was_made_from():
    answer = await get("/v1/status")
    snapshot = msgspec.json.decode(answer.content, type=Snapshot)
    assert snapshot.learning.reward == 0.5
    assert snapshot.generated_tokens_per_s == 3000.0


def test_the_status_model_has_the_fields_of_the_snapshot():
    for struct, model in _pairs(Snapshot, models.Status):
        extra = {"config"} if model is models.Status else set()
        fields = {field.name for field in msgspec.structs.fields(struct)}
        assert set(model.model_fields) - extra == fields, model.__name__


def _pairs(
    struct: type[msgspec.Struct], model: type[BaseModel]
) -> list[tuple[type[msgspec.Struct], type[BaseModel]]]:
    found: list[tuple[type[msgspec.Struct], type[BaseModel]]] = [(struct, model)]
    for field in msgspec.structs.fields(struct):
        inner = [field.type, *getattr(field.type, "__args__", ())]
        answer = model.model_fields[field.name].annotation
        answers = [answer, *getattr(answer, "__args__", ())]
        for kind in inner:
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                other = next(a for a in answers if isinstance(a, type) and issubclass(a, BaseModel))
                found.append((kind, other))
    return found


@pytest.mark.parametrize("path", ["/v1/status", "/metrics"])
async def test_no_redis_is_503_with_the_reason(path: str):
    answer = await get(path, FakeReplay(StoreUnavailable("no answer from 10.0.0.1:6379")))
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"] == "no answer from 10.0.0.1:6379"


async def test_a_redis_that_hangs_is_503_after_the_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "ANSWER_TIMEOUT_S", 0.05)
    answer = await get("/v1/status", FakeReplay(delay_s=5))
    assert answer.status_code == 503
    assert "0.05 s" in answer.json()["detail"]


async def test_an_unknown_path_is_a_problem_too():
    answer = await get("/v2/status")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"] == "GET /v2/status: Not Found"


async def test_an_unexpected_error_does_not_show_its_message():
    answer = await get("/v1/status", FakeReplay(RuntimeError("redis://:secret@host")))
    assert answer.status_code == 500
    assert "secret" not in answer.text


async def test_metrics_are_prometheus_text():
    text = (await get("/metrics")).text
    assert "leeway_step 7.0\n" in text
    assert 'leeway_engine_pause_seconds{engine="engine-1"} 0.012\n' in text
    assert 'leeway_groups_dropped_total{reason="retriever"} 5.0\n' in text
    assert 'leeway_run_info{name="demo",phase="training"} 1.0\n' in text


async def test_metrics_leave_out_what_is_not_known():
    text = (await get("/metrics", sections={})).text
    assert "leeway_reward" not in text
    assert "leeway_replay_ready 2.0\n" in text


def test_metric_names_carry_the_prefix():
    assert all(name.startswith("leeway_") for name in GAUGES)


def test_a_served_app_answers_on_a_free_port_and_closes_its_clients_when_it_ends():
    board = FakeBoard(SECTIONS)
    app = api.create_app(board, FakeReplay(), {})
    address, stop = api.serve_in_thread(app, "127.0.0.1", 0)
    assert httpx.get(f"{address}/healthz").status_code == 200
    stop()
    assert board.is_closed
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{address}/healthz", timeout=1)


def test_a_taken_port_is_named():
    app = api.create_app(FakeBoard(SECTIONS), FakeReplay(), {})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"api.port = {port} cannot be used"):
            api.serve_in_thread(app, "127.0.0.1", port)
