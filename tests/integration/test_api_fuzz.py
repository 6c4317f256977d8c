"""The API under requests that nobody would send, drawn from its own openapi.json and beside it: no
5xx, no answer that the document does not name, and no memory that grows.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from leeway.replay.archive_buffer import OpenBuffer
from leeway.replay.board import EngineRecord, RunBoard
from leeway.replay.server import EmbeddedRedis
from leeway.services.api.app import create_app, serve_in_thread
from leeway.services.api.auth import tokens_of
from leeway.services.config import load
from leeway.services.processes.joining import JOINED

load_all_checks()
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
NUM_EXAMPLES = 25
NUM_MALFORMED = 10_000
MAX_GROWTH_BYTES = 8 * 2**20


class Live(NamedTuple):
    """A served API over a run that trains, without its other processes."""

    address: str
    headers: dict[str, str]
    schema: dict[str, Any]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    run = tmp_path_factory.mktemp("runs") / "fuzzed"
    run.mkdir()
    redis = EmbeddedRedis.start(run / "redis", run.name)
    config = load(None, ["api.max_requests_per_s=100000", "api.max_body_bytes=65536"])
    tokens, _ = tokens_of(run, {})
    buffer = OpenBuffer(redis.url, run.name, config.replay)

    async def engines() -> list[EngineRecord]:
        return [EngineRecord("engine-1", 1, "float32", [], 0, "10.0.0.2")]

    app = create_app(
        RunBoard(redis.url, run.name),
        buffer.replay,
        buffer,
        engines,
        run=run,
        config=config,
        tokens=tokens,
    )
    asyncio.run(_begin(redis.url, run))
    address, stop = serve_in_thread(app, "127.0.0.1", 0)
    yield Live(address, {"authorization": f"Bearer {tokens.control}"}, app.openapi())
    stop()
    redis.stop()


async def _begin(url: str, run: Path) -> None:
    board = RunBoard(url, run.name)
    await board.set_phase("training")
    await board.put("run", {"name": run.name, "num_steps": 10, "bound": 4})
    await board.put("policy", {"engine-1": {"version": 0}})
    await board.put(JOINED, {"version": 0})
    await board.append_step({"step": 1, "reward_mean": 0.5})
    await board.append_event("run", "started")
    await board.close()


def _operations() -> list[Any]:
    """What openapi.json names; nothing is connected for it."""
    nothing: Any = None
    app = create_app(
        nothing, nothing, nothing, nothing, run=Path("x"), config=load(None), tokens=None
    )
    found = schemathesis.openapi.from_dict(app.openapi()).get_all_operations()
    return [operation.ok() for operation in found]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("operation", _operations(), ids=lambda operation: operation.label)
def test_no_request_gets_a_5xx_or_an_undocumented_answer(
    operation: Any, mode: GenerationMode, live: Live
):
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any) -> None:
        _wait_for_nothing(case)
        response = case.call(base_url=live.address, headers=live.headers)
        case.validate_response(response, checks=CHECKS, headers=live.headers)

    try:
        send()
    except Unsatisfiable:
        # Without a parameter or a body there is nothing to get wrong.
        assert mode is GenerationMode.NEGATIVE and not _has_input(operation)


def _has_input(operation: Any) -> bool:
    parts = (operation.path_parameters, operation.query, operation.headers, operation.body)
    return any(len(list(part)) for part in parts)


def _wait_for_nothing(case: Any) -> None:
    """What waits is no fault, but takes its time."""
    if case.path == "/v1/events" or case.path.startswith("/v1/control"):
        case.query = {**(case.query or {}), "wait_s": 0}
    if isinstance(case.body, dict) and "wait_s" in case.body:
        case.body["wait_s"] = 0


@pytest.mark.timeout(400)
def test_ten_thousand_malformed_requests_leave_memory_flat(live: Live):
    with httpx.Client(base_url=live.address, timeout=30) as client:
        _send_malformed(client, live, 1000)  # what is loaded once is loaded now
        gc.collect()
        before = _resident_bytes()
        statuses = _send_malformed(client, live, NUM_MALFORMED)
        gc.collect()
        growth = _resident_bytes() - before
    assert len(statuses) == NUM_MALFORMED
    assert set(statuses) <= {400, 401, 404, 405, 413, 422}
    assert growth < MAX_GROWTH_BYTES


def _resident_bytes() -> int:
    """Of this process, which holds client and server."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _send_malformed(client: httpx.Client, live: Live, num: int) -> list[int]:
    bodies = (b"{", b"\xff\xfe", b"[" * 2000, b'{"num": NaN}', b'{"num": "1"}', b"0" * 70_000)
    paths = ("slots", "groups", "settings", "control/none", "trajectories/x", "runs/../x")
    statuses: list[int] = []
    for number, (body, path) in enumerate(itertools.cycle(itertools.product(bodies, paths))):
        if number == num:
            return statuses
        token = live.headers if number % 7 else {"authorization": f"Bearer wrong-{number}"}
        headers = {**token, "content-type": "application/json", "x-odd": f"{number}"}
        method = "PATCH" if path == "settings" else "POST"
        answer = client.request(method, f"/v1/{path}?n={number}", content=body, headers=headers)
        statuses.append(answer.status_code)
    return statuses
