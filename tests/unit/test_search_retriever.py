"""Retrievers: the HTTP contract in both shapes, retries within a deadline, errors kept errors."""

import asyncio
import time
from collections.abc import Callable

import httpx
import pytest
from fastapi.testclient import TestClient

from leeway.actors.failures import RetrievalError
from leeway.actors.search import retriever_app
from leeway.actors.search.documents import Document
from leeway.actors.search.index import Bm25Index
from leeway.actors.search.retriever import HttpRetriever, LocalRetriever, Passage
from leeway.actors.search.retriever_app import build_app

INDEX = Bm25Index(
    [
        Document("no", "Norway", "Its capital is Oslo."),
        Document("se", "Sweden", "Its capital is Stockholm."),
        Document("x", "", "No title here, only Oslo."),
    ]
)
NORWAY = {"id": "no", "contents": '"Norway"\nIts capital is Oslo.'}


@pytest.fixture
def client() -> TestClient:
    return TestClient(build_app(INDEX))


def test_queries_with_scores_answer_documents_with_scores(client: TestClient):
    body = {"queries": ["norway", "zebra"], "topk": 1, "return_scores": True}
    [norway, zebra] = client.post("/retrieve", json=body).json()["result"]
    assert [entry["document"] for entry in norway] == [NORWAY]
    assert norway[0]["score"] > 0
    assert zebra == []


def test_queries_without_scores_answer_plain_documents(client: TestClient):
    response = client.post("/retrieve", json={"queries": ["norway"], "topk": 1})
    assert response.json() == {"result": [[NORWAY]]}


def test_a_single_query_is_a_list_of_one(client: TestClient):
    response = client.post("/retrieve", json={"query": "title", "client_id": "skyrl"})
    untitled = {"id": "x", "contents": "No title here, only Oslo."}
    assert response.json() == {"result": [[untitled]]}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, 'send either "queries", a list of texts, or "query", one text'),
        ({"queries": ["a"], "query": "a"}, 'send either "queries"'),
        ({"queries": []}, "0 queries, but 1 to 512 may be in one request"),
        ({"queries": ["a"] * 513}, "513 queries, but 1 to 512"),
        ({"query": "a", "topk": 0}, "topk is 0, it must be 1 to 100"),
        ({"query": "a", "topk": 101}, "topk is 101"),
        ({"query": "a" * 4097}, "a query has 4097 characters, at most 4096 may be"),
        ({"query": 3}, "Expected `str | null`, got `int` - at `$.query`"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_a_request_in_another_shape_is_refused_in_a_sentence(
    client: TestClient, body: object, sentence: str
):
    answer = client.post("/retrieve", json=body)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert sentence in answer.json()["detail"]


def test_a_body_is_given_up_when_it_is_too_long(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retriever_app, "MAX_BODY_BYTES", 20)
    answer = client.post("/retrieve", json={"query": "a query that is too long"})
    assert (answer.status_code, answer.json()["detail"]) == (422, "the body has more than 20 bytes")


def test_what_is_not_there_is_a_problem_too(client: TestClient):
    assert client.get("/search").json()["detail"] == "GET /search: Not Found"
    assert client.get("/retrieve").status_code == 405


def test_the_health_check_tells_the_size_of_the_corpus(client: TestClient):
    health = client.get("/healthz").json()
    assert (health["status"], health["kind"], health["num_documents"]) == ("ok", "bm25", 3)


async def test_local_and_http_retrievers_find_the_same():
    transport = httpx.ASGITransport(build_app(INDEX))
    over_http = HttpRetriever("http://retriever", transport=transport)
    local = await LocalRetriever(INDEX).search("norway capital", 2)
    assert [passage.id for passage in local] == ["no", "se"]
    assert await over_http.search("norway capital", 2) == local
    await over_http.close()


Answer = Callable[[httpx.Request], httpx.Response]


def retriever(answer: Answer, timeout_s: float = 5.0) -> HttpRetriever:
    return HttpRetriever("http://r/", timeout_s, transport=httpx.MockTransport(answer))


def always(**response: object) -> Answer:
    status = response.pop("status", 200)
    return lambda request: httpx.Response(status, **response)  # type: ignore[arg-type]


async def test_passages_without_scores_are_read_with_score_0():
    found = await retriever(always(json={"result": [[NORWAY]]})).search("q", 3)
    assert found == [Passage(id="no", title="Norway", text="Its capital is Oslo.", score=0.0)]


async def test_more_passages_than_asked_for_are_cut():
    found = await retriever(always(json={"result": [[NORWAY] * 5]})).search("q", 2)
    assert len(found) == 2


async def test_a_server_that_recovers_is_asked_again():
    answers = iter([503, 429, 200])

    def answer(request: httpx.Request) -> httpx.Response:
        status = next(answers)
        if status == 503:
            raise httpx.ConnectError("refused")
        return httpx.Response(status, json={"result": [[NORWAY]]})

    assert len(await retriever(answer).search("q", 3)) == 1


async def test_a_server_is_left_alone_for_as_long_as_it_asks(monkeypatch: pytest.MonkeyPatch):
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    headers = iter([{"Retry-After": "3"}, {}, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}])

    def answer(request: httpx.Request) -> httpx.Response:
        found = next(headers, None)
        return httpx.Response(
            429 if found is not None else 200, headers=found, json={"result": [[]]}
        )

    assert await retriever(answer).search("q", 3) == []
    # the first as asked, and a little later than others; the others at the usual pace
    assert 3.0 < waited[0] < 3.2
    assert max(waited[1:]) < 0.5


async def test_a_server_that_asks_for_longer_than_the_deadline_raises_at_the_deadline():
    answer = always(status=429, headers={"Retry-After": "60"})
    with pytest.raises(
        RetrievalError, match=r"no passages within 0\.2 s \(attempt 1; .*status 429"
    ):
        await retriever(answer, timeout_s=0.2).search("q", 3)


async def test_a_server_that_stays_down_raises_within_the_deadline():
    started = time.monotonic()
    with pytest.raises(RetrievalError, match=r"no passages within 0\.3 s .*status 500.*running"):
        await retriever(always(status=500), timeout_s=0.3).search("q", 3)
    assert time.monotonic() - started < 1.0


async def test_a_server_that_hangs_raises_within_the_deadline():
    async def hang(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        raise AssertionError

    started = time.monotonic()
    with pytest.raises(RetrievalError, match="it has not answered yet"):
        await retriever(hang, timeout_s=0.2).search("q", 3)  # type: ignore[arg-type]
    assert time.monotonic() - started < 1.0


async def test_a_refusal_is_not_tried_again():
    calls: list[httpx.Request] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return httpx.Response(422, text="topk too large")

    with pytest.raises(RetrievalError, match="status 422, 'topk too large'"):
        await retriever(refuse).search("q", 3)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"<html>",
        b'{"error": "x"}',
        b'{"result": []}',
        b'{"result": [["text"]]}',
        b'{"result": [[3]]}',
    ],
)
async def test_an_answer_in_another_shape_is_an_error_never_a_passage(content: bytes):
    with pytest.raises(RetrievalError, match="answered in another shape"):
        await retriever(always(content=content)).search("q", 3)


async def test_a_document_without_any_text_is_another_shape():
    unknown = always(json={"result": [[{"docid": "7", "passage": "Oslo"}]]})
    with pytest.raises(RetrievalError, match='neither "contents" nor "text"'):
        await retriever(unknown).search("q", 3)
