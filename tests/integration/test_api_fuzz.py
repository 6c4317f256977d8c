"""The API under requests that nobody would send, drawn from its own openapi.json and beside it: no
5xx, no answer that the document does not name, and no memory that grows.

Half of the requests name what there is: a trajectory of one of several groups, a run, a sweep, the
ticket of a slot. Names drawn at random never do, and would end at "there is no such thing".
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
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from leeway.actors.config import model_dir
from leeway.actors.tokens import Tokens
from leeway.replay.archive_buffer import OpenBuffer
from leeway.replay.board import EngineRecord, RunBoard
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.sharded_store import connect_replay
from leeway.replay.synthetic import build_group
from leeway.services.api.app import create_app, serve_in_thread
from leeway.services.api.auth import tokens_of
from leeway.services.config import load
from leeway.services.processes.joining import JOINED
from tests.unit.sweep_results import arm, leave

load_all_checks()
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
NUM_EXAMPLES = 25
NUM_GROUPS = 6
ARMS = [(lag, seed) for lag in (0, 2) for seed in (0, 1)]
NUM_MALFORMED = 10_000
MAX_GROWTH_BYTES = 8 * 2**20


class Live(NamedTuple):
    """A served API over a run that trains, without its other processes."""

    address: str
    headers: dict[str, str]
    known: dict[str, list[str]]
    """What there is, by the name of the parameter or key that asks for it."""


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
    leave(run.parent / "sweeps" / "lags", [arm(lag=lag, seed=seed) for lag, seed in ARMS])
    leave(run.parent / "sweeps" / "begun", [])
    address, stop = serve_in_thread(app, "127.0.0.1", 0)
    headers = {"authorization": f"Bearer {tokens.control}"}
    yield Live(address, headers, _known(address, headers))
    stop()
    redis.stop()


async def _begin(url: str, run: Path) -> None:
    config = load(None)
    replay = connect_replay(url, run.name, config.replay)
    num_known = Tokens.load(model_dir(config.model)).vocab_size
    for seed, slot in enumerate(await replay.admit(NUM_GROUPS, PolicyVersion(0), 30.0)):
        group = build_group(slot, None, config.rollout.group_size, 64, seed=seed)
        for trajectory in group.trajectories:
            trajectory.token_ids[:] %= num_known
        await replay.add(slot, group)
    await replay.close()
    board = RunBoard(url, run.name)
    await board.set_phase("training")
    await board.put("run", {"name": run.name, "num_steps": 10, "bound": 4})
    await board.put("policy", {"engine-1": {"version": 0}})
    await board.put("eval", {"before": {"step": 0, "scores": {"exact_match": 0.31}}})
    await board.put(JOINED, {"version": 0})
    for step in range(1, 8):
        await board.append_step({"step": step, "reward_mean": 0.5})
    await board.append_event("run", "started")
    await board.close()


def _known(address: str, headers: dict[str, str]) -> dict[str, list[str]]:
    with httpx.Client(base_url=f"{address}/v1", headers=headers, timeout=60) as api:
        played = api.get("trajectories?limit=200").json()["items"]
        tickets = [one["ticket"] for one in api.post("slots", json={"num": 2}).json()["items"]]
        api.post("control/checkpoint?wait_s=0")
    assert len({one["group_id"] for one in played}) == NUM_GROUPS
    assert len(tickets) == 2
    return {
        "trajectory_id": [one["trajectory_id"] for one in played],
        "name": ["lags", "begun", "fuzzed"],
        "action": ["checkpoint"],
        "ticket": tickets,
        "cursor": ["1", "lags", "fuzzed", "grpo-lag2-seed0"],
    }


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
    @given(case=operation.as_strategy(generation_mode=mode), place=st.integers(0, 2**16))
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any, place: int) -> None:
        _wait_for_nothing(case)
        if place % 2:
            _name_what_there_is(case, live.known, place // 2)
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


def _name_what_there_is(case: Any, known: dict[str, list[str]], place: int) -> None:
    parts = (case.path_parameters, case.query, case.body)
    for part in (part for part in parts if isinstance(part, dict)):
        for name in part.keys() & known.keys():
            part[name] = known[name][place % len(known[name])]


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
