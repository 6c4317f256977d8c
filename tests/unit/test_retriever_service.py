"""The service before an index: batches, cache, bounds, deadlines; and what it answers over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import httpx
import pytest

from leeway.actors.search.documents import Document
from leeway.actors.search.index import Bm25Index, Hit
from leeway.actors.search.retriever_app import build_app
from leeway.actors.search.service import (
    Overloaded,
    RetrievalService,
    SearchTimeout,
    ServiceLimits,
    ShuttingDown,
)


class GatedIndex:
    """Answers a query with itself, in a thread, once the gate is open."""

    kind = "bm25"
    query_ms = 5.0

    def __init__(self) -> None:
        self.documents: list[Document] = []
        self.gate = threading.Event()
        self.batches: list[list[str]] = []

    def __len__(self) -> int:
        return 0

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        self.batches.append(list(queries))
        assert self.gate.wait(timeout=20), "the test never opened the gate"
        if "bad" in queries:
            raise RuntimeError("the index broke")
        return [
            [(Document(query, "", query), 1.0 / k) for k in range(1, top_k + 1)]
            for query in queries
        ]


@pytest.fixture
def index() -> GatedIndex:
    return GatedIndex()


def ids(found: list[list[Hit]]) -> list[str]:
    return [hits[0][0].id for hits in found]


async def held_back(
    service: RetrievalService, *queries: str
) -> list[asyncio.Task[list[list[Hit]]]]:
    """A request for each query, all of them with the service; the first is with the index."""
    tasks = [asyncio.create_task(service.search([query], 1)) for query in queries]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


# ---- batches


async def test_what_waits_while_a_batch_is_searched_is_the_next_batch(index: GatedIndex):
    service = RetrievalService(index, ServiceLimits(max_batch=3))
    tasks = await held_back(service, "a", "b", "c", "d", "e")
    index.gate.set()
    assert [ids(found) for found in await asyncio.gather(*tasks)] == [
        ["a"],
        ["b"],
        ["c"],
        ["d"],
        ["e"],
    ]
    assert index.batches == [["a"], ["b", "c", "d"], ["e"]]
    counters = service.counters
    assert (counters.num_queries, counters.num_searched, counters.num_batches) == (5, 5, 3)
    await service.close()


async def test_a_batch_of_mixed_sizes_gives_everybody_as_many_as_asked_for(index: GatedIndex):
    service = RetrievalService(index)
    first = await held_back(service, "first")
    tasks = [asyncio.create_task(service.search(["a"], k)) for k in (1, 3)]
    await asyncio.sleep(0)
    index.gate.set()
    assert [len(found[0]) for found in await asyncio.gather(*tasks)] == [1, 3]
    await asyncio.gather(*first)
    await service.close()


async def test_a_fast_index_is_searched_in_the_event_loop():
    where: list[str] = []

    class Fast(Bm25Index):
        def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
            where.append(threading.current_thread().name)
            return super().search(queries, top_k)

    service = RetrievalService(Fast([Document("a", "", "oslo"), Document("b", "", "rome")]))
    found = await asyncio.gather(*(service.search([q], 1) for q in ("oslo", "rome", "zebra")))
    assert [[d.id for d, _ in hits] for [hits] in found] == [["a"], ["b"], []]
    assert where == [threading.current_thread().name]  # one batch
    await service.close()


# ---- cache


async def test_an_answer_is_kept_and_the_least_recent_goes_first(index: GatedIndex):
    index.gate.set()
    service = RetrievalService(index, ServiceLimits(max_cached=2))
    for query in ("a", "b", "a", "c", "a", "b"):
        await service.search([query], 1)
    # c pushed b out, for a had been asked again
    assert index.batches == [["a"], ["b"], ["c"], ["b"]]
    assert service.counters.num_cache_hits == 2
    await service.close()


async def test_another_number_of_passages_is_another_answer(index: GatedIndex):
    index.gate.set()
    service = RetrievalService(index)
    assert [len((await service.search(["a"], k))[0]) for k in (1, 2)] == [1, 2]
    await service.close()


async def test_a_cache_of_none_keeps_none(index: GatedIndex):
    index.gate.set()
    service = RetrievalService(index, ServiceLimits(max_cached=0))
    for _ in range(2):
        await service.search(["a"], 1)
    assert len(index.batches) == 2
    await service.close()


async def test_siblings_that_ask_the_same_share_one_search(index: GatedIndex):
    service = RetrievalService(index)
    tasks = await held_back(service, "first", "same", "same", "same")
    index.gate.set()
    assert ids([found[0] for found in await asyncio.gather(*tasks)]) == ["first", *["same"] * 3]
    assert index.batches == [["first"], ["same"]]
    assert service.counters.num_shared == 2
    await service.close()


async def test_a_query_twice_in_a_request_is_searched_once(index: GatedIndex):
    index.gate.set()
    service = RetrievalService(index)
    assert ids(await service.search(["a", "b", "a"], 1)) == ["a", "b", "a"]
    assert sorted(index.batches[0]) == ["a", "b"]
    await service.close()


# ---- bounds and faults


async def test_a_full_queue_refuses_whole_requests_and_says_when_to_come_back(index: GatedIndex):
    service = RetrievalService(index, ServiceLimits(max_queue=3))
    tasks = await held_back(service, "searched", "1", "2")
    with pytest.raises(Overloaded, match="2 queries wait and at most 3 may") as refused:
        await service.search(["3", "4"], 1)
    assert refused.value.retry_after_s == 1.0  # nothing has been measured yet
    assert (service.num_waiting, service.counters.num_refused) == (2, 2)
    last = await held_back(service, "3")
    index.gate.set()
    await asyncio.gather(*tasks, *last)
    await service.close()


def test_the_time_to_come_back_is_that_of_the_queue_at_the_measured_speed(index: GatedIndex):
    service = RetrievalService(index)
    service._recent.extend([(0.5, 100), (1.5, 300)])  # 200 queries a second
    service._queue.extend((str(i), 1) for i in range(50))
    assert service._retry_after_s() == 0.25


async def test_a_caller_goes_at_its_deadline_and_the_answer_is_kept(index: GatedIndex):
    service = RetrievalService(index, ServiceLimits(timeout_s=0.05))
    with pytest.raises(SearchTimeout, match=r"1 of 1 queries were not answered within 0\.05 s"):
        await service.search(["a"], 1)
    index.gate.set()
    async with asyncio.timeout(10):
        while not service.counters.num_searched:
            await asyncio.sleep(0.001)
    assert ids(await service.search(["a"], 1)) == ["a"]
    assert (service.counters.num_timed_out, service.counters.num_cache_hits) == (1, 1)
    await service.close()


async def test_a_batch_that_fails_fails_its_callers_only(index: GatedIndex):
    index.gate.set()
    service = RetrievalService(index)
    with pytest.raises(RuntimeError, match="the index broke"):
        await service.search(["bad"], 1)
    assert ids(await service.search(["good"], 1)) == ["good"]
    assert service.counters.num_failed == 1
    await service.close()


async def test_closing_answers_who_waits_and_refuses_who_comes(index: GatedIndex):
    service = RetrievalService(index)
    tasks = await held_back(service, "a", "b")
    closing = asyncio.create_task(service.close())
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        await service.search(["c"], 1)
    index.gate.set()
    await closing
    assert [ids(found) for found in await asyncio.gather(*tasks)] == [["a"], ["b"]]


# ---- over HTTP


def client(index: GatedIndex, limits: ServiceLimits) -> tuple[httpx.AsyncClient, RetrievalService]:
    service = RetrievalService(index, limits)
    transport = httpx.ASGITransport(build_app(index, service=service))
    return httpx.AsyncClient(transport=transport, base_url="http://retriever"), service


async def test_overload_is_429_with_retry_after(index: GatedIndex):
    http, service = client(index, ServiceLimits(max_queue=1))
    tasks = await held_back(service, "searched", "waiting")
    answer = await http.post("/retrieve", json={"query": "one more"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.headers["content-type"] == "application/problem+json"
    assert "1 queries wait and at most 1 may" in answer.json()["detail"]
    index.gate.set()
    await asyncio.gather(*tasks)
    await service.close()


async def test_a_broken_index_is_500_and_its_message_stays_in_the_log(index: GatedIndex):
    index.gate.set()
    transport = httpx.ASGITransport(build_app(index), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://retriever") as http:
        answer = await http.post("/retrieve", json={"query": "bad"})
    assert answer.status_code == 500
    assert answer.json()["detail"] == "RuntimeError; see the retriever's log"


async def test_a_late_answer_is_504(index: GatedIndex):
    http, service = client(index, ServiceLimits(timeout_s=0.02))
    answer = await http.post("/retrieve", json={"query": "a"})
    assert (answer.status_code, answer.json()["title"]) == (504, "Past the deadline")
    index.gate.set()
    await service.close()


async def test_a_server_that_ends_is_not_ready_but_alive(index: GatedIndex):
    http, service = client(index, ServiceLimits())
    assert (await http.get("/healthz/ready")).status_code == 200
    await service.close()
    assert (await http.get("/healthz/ready")).status_code == 503
    assert (await http.get("/healthz/live")).status_code == 200
    assert (await http.get("/healthz")).json()["status"] == "closing"
    answer = await http.post("/retrieve", json={"query": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_health_and_metrics_count_the_same(index: GatedIndex):
    http, service = client(index, ServiceLimits())
    index.gate.set()
    for query in ("a", "b", "a"):
        await http.post("/retrieve", json={"query": query})
    health = (await http.get("/healthz")).json()
    assert (health["num_queries"], health["num_searched"], health["num_cache_hits"]) == (3, 2, 1)
    lines = (await http.get("/metrics")).text.splitlines()
    assert "leeway_retriever_queries_total 3" in lines
    assert "leeway_retriever_cache_hits_total 1" in lines
    assert "# TYPE leeway_retriever_waiting gauge" in lines
    await service.close()
