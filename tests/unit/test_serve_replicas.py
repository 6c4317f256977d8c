"""What each replica keeps doing beside its requests, begun and ended as Serve does it."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from leeway.actors import serve_replicas
from leeway.actors.policy import Completion, CompletionRequest
from leeway.replay import free_pages
from leeway.replay.board import RunBoard
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.services.config import load
from leeway.services.layout import RunDirectory
from leeway.services.step_records import ENGINE_TOTALS
from leeway.services.wiring import actor_spec

AMPLE_S = 60.0


class Engine:
    """As far as a replica asks it where nobody publishes."""

    num_ranks, dtype = 1, "float32"
    gpus: ClassVar[list[str]] = []

    async def version(self) -> PolicyVersion:
        return PolicyVersion(0)

    async def complete(self, request: CompletionRequest) -> Completion:
        """Two tokens; all of the prompt but its last one had been computed; one was in vain."""
        return Completion(
            token_ids=[1, 2],
            logprobs=[-1.0, -1.0],
            versions=[0, 0],
            finish="stop",
            num_cached=len(request.prompt_ids) - 1,
            num_discarded=1,
        )

    async def close(self) -> None: ...


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def without_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_policy(spec: serve_replicas.ActorSpec) -> Engine:
        return Engine()

    async def application_handle(name: str, timeout_s: float) -> Any:
        return object()

    place = types.SimpleNamespace(rank=types.SimpleNamespace(rank=0))
    monkeypatch.setattr(serve_replicas, "start_policy", start_policy)
    monkeypatch.setattr(serve_replicas, "application_handle", application_handle)
    monkeypatch.setattr(serve_replicas.serve, "get_replica_context", lambda: place)


def uncollected(deployed: Any) -> Any:
    """Serve awaits a replica's `__del__`; collecting it would only call it."""
    return type("Replica", (deployed,), {"__del__": lambda self: None})


@pytest.mark.usefixtures("without_serve")
@pytest.mark.parametrize("name", ["PolicyServer", "RetrieverServer", "RolloutServer"])
async def test_every_replica_gives_free_memory_back_until_it_ends(
    name: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given, ended = asyncio.Event(), asyncio.Event()

    async def keep_giving_back() -> None:
        given.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(free_pages, "keep_giving_back", keep_giving_back)
    deployed = getattr(serve_replicas, name).func_or_class
    kind = uncollected(deployed)
    replica = object.__new__(kind)
    await replica.__init__(actor_spec(RunDirectory(tmp_path / name), load(None), url))
    await asyncio.wait_for(given.wait(), AMPLE_S)
    assert not ended.is_set()
    await deployed.__del__(replica)
    await asyncio.wait_for(ended.wait(), AMPLE_S)


@pytest.mark.usefixtures("without_serve")
async def test_an_engine_tells_what_its_turns_took(url: str, tmp_path: Path):
    deployed = serve_replicas.PolicyServer.func_or_class
    replica = object.__new__(uncollected(deployed))
    spec = actor_spec(RunDirectory(tmp_path / "counting"), load(None), url)
    await replica.__init__(spec)
    board = RunBoard(url, spec.run)
    name = f"policy:{replica.engine_id}"
    try:
        for length in (4, 6):
            prompt = list(range(length))
            await replica.complete(
                CompletionRequest(request_id=f"r{length}", prompt_ids=prompt, max_tokens=2)
            )
        async with asyncio.timeout(AMPLE_S):
            while (await board.get_all()).get(name, {}).get("num_requests") != 2:
                await asyncio.sleep(0.05)
        section = (await board.get_all())[name]
    finally:
        await board.close()
        await deployed.__del__(replica)
    totals = {of: section[key] for of, key in ENGINE_TOTALS.items() if not of.endswith("_s")}
    assert totals == {
        "engine_tokens": 4,
        "engine_discarded_tokens": 2,
        "engine_prompt_tokens": 10,
        "engine_cached_tokens": 8,
    }
    assert 0 <= section["busy_s"] <= section["up_s"]


async def test_an_engine_of_torch_has_the_threads_that_are_asked(tmp_path: Path):
    before = torch.get_num_threads()
    keys = ["policy.backend=torch", f"policy.num_threads={before + 1}", "policy.max_num_seqs=1"]
    policy = await serve_replicas.start_policy(
        actor_spec(RunDirectory(tmp_path / "threads"), load(None, keys), "redis://unused")
    )
    try:
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
        await policy.close()
