"""The retriever as a server, under the HTTP contract of Search-R1 and those who followed it.

POST /retrieve       {"queries": ["..."], "topk": 3, "return_scores": true}   or   {"query": "..."}
                  -> {"result": [[{"document": {"id", "contents"}, "score"}, ...], ...]}
                     a list per query; without scores: {"result": [[{"id", "contents"}, ...], ...]}
GET /healthz      -> {"status": "ok", "kind", "num_documents", "num_waiting", and the counters}
GET /healthz/live    200 while the process answers
GET /healthz/ready   200 while queries are taken, 503 once it shuts down
GET /metrics         the same numbers in Prometheus' text format

Errors are application/problem+json whose `detail` is a sentence: 422 for a request in another
shape, 429 with Retry-After when the queue is full, 503 while shutting down, 504 past the deadline.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from leeway.actors.search.documents import contents_of
from leeway.actors.search.index import Hit, Index
from leeway.actors.search.service import (
    Overloaded,
    RetrievalService,
    SearchTimeout,
    ServiceLimits,
    ShuttingDown,
)

MAX_QUERIES: Final = 512
MAX_TOP_K: Final = 100
MAX_QUERY_CHARS: Final = 4096
MAX_BODY_BYTES: Final = 4 * MAX_QUERIES * MAX_QUERY_CHARS

log = logging.getLogger(__name__)


class _Body(msgspec.Struct):
    """Both request shapes. Other keys are let pass, as the field's servers do."""

    queries: list[str] | None = None
    query: str | None = None
    topk: int | None = None
    return_scores: bool = False


class _BadRequest(Exception):
    """The sentence says what a request must be."""


_DECODER: Final = msgspec.json.Decoder(_Body)
_ENCODER: Final = msgspec.json.Encoder()


def build_app(
    index: Index,
    default_top_k: int = 3,
    limits: ServiceLimits | None = None,
    *,
    service: RetrievalService | None = None,
) -> FastAPI:
    """The application that serves `index`."""
    searches = service or RetrievalService(index, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await searches.close()

    app = FastAPI(title="Leeway retriever", lifespan=lifespan)

    # Read and written by msgspec: with pydantic a list of passages takes longer than the search.
    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        queries, top_k, with_scores = _read(await _body(request), default_top_k)
        hits_of_query = await searches.search(queries, top_k)
        result = [[_entry(hit, with_scores) for hit in hits] for hits in hits_of_query]
        return _json({"result": result})

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        return {
            "status": "ok" if searches.is_ready else "closing",
            "kind": index.kind,
            "num_documents": len(index),
            "num_waiting": searches.num_waiting,
            **msgspec.to_builtins(searches.counters),
        }

    @app.get("/healthz/live")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/healthz/ready")
    async def ready() -> dict[str, str]:
        if not searches.is_ready:
            raise ShuttingDown("the retriever is shutting down")
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(_metrics(searches), media_type="text/plain; version=0.0.4; charset=utf-8")

    _add_error_answers(app)
    return app


async def _body(request: Request) -> bytes:
    """The whole body, given up as soon as it is too long."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise _BadRequest(f"the body has more than {MAX_BODY_BYTES:,} bytes")
    return bytes(content)


def _read(content: bytes, default_top_k: int) -> tuple[list[str], int, bool]:
    """Queries, passages wanted, whether with scores. Raises _BadRequest."""
    try:
        body = _DECODER.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _BadRequest(f"{error}; send {{'queries': ['...'], 'topk': 3}} as JSON") from None
    if (body.queries is None) == (body.query is None):
        raise _BadRequest('send either "queries", a list of texts, or "query", one text')
    queries = body.queries if body.queries is not None else [body.query or ""]
    if not 1 <= len(queries) <= MAX_QUERIES:
        raise _BadRequest(f"{len(queries)} queries, but 1 to {MAX_QUERIES} may be in one request")
    longest = max(map(len, queries))
    if longest > MAX_QUERY_CHARS:
        raise _BadRequest(f"a query has {longest} characters, at most {MAX_QUERY_CHARS} may be")
    top_k = default_top_k if body.topk is None else body.topk
    if not 1 <= top_k <= MAX_TOP_K:
        raise _BadRequest(f"topk is {top_k}, it must be 1 to {MAX_TOP_K}")
    return queries, top_k, body.return_scores


def _entry(hit: Hit, with_score: bool) -> dict[str, Any]:
    document, score = hit
    record = {"id": document.id, "contents": contents_of(document)}
    return {"document": record, "score": score} if with_score else record


def _metrics(searches: RetrievalService) -> str:
    """Counters and gauges, a line of type and a line of value each."""
    lines: list[str] = []
    counts = {
        f"leeway_retriever_{name.removeprefix('num_')}_total": ("counter", value)
        for name, value in msgspec.to_builtins(searches.counters).items()
    }
    counts["leeway_retriever_waiting"] = ("gauge", searches.num_waiting)
    counts["leeway_retriever_documents"] = ("gauge", len(searches.index))
    for name, (kind, value) in counts.items():
        lines += [f"# TYPE {name} {kind}", f"{name} {value}"]
    return "\n".join(lines) + "\n"


# ---- errors


def _add_error_answers(app: FastAPI) -> None:
    @app.exception_handler(_BadRequest)
    async def malformed(request: Request, error: _BadRequest) -> Response:
        return _problem(422, "The request is malformed", str(error))

    @app.exception_handler(Overloaded)
    async def overloaded(request: Request, error: Overloaded) -> Response:
        wait_s = str(max(1, math.ceil(error.retry_after_s)))
        return _problem(429, "The queue is full", str(error), {"Retry-After": wait_s})

    @app.exception_handler(ShuttingDown)
    async def closing(request: Request, error: ShuttingDown) -> Response:
        return _problem(503, "Shutting down", str(error), {"Retry-After": "1"})

    @app.exception_handler(SearchTimeout)
    async def late(request: Request, error: SearchTimeout) -> Response:
        return _problem(504, "Past the deadline", str(error))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        detail = f"{request.method} {request.url.path}: {error.detail}"
        return _problem(error.status_code, str(error.detail), detail, error.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return _problem(500, "Internal error", f"{type(error).__name__}; see the retriever's log")


def _problem(
    status: int, title: str, detail: str, headers: Mapping[str, str] | None = None
) -> Response:
    body = {"title": title, "status": status, "detail": detail}
    return Response(_ENCODER.encode(body), status, headers, "application/problem+json")


def _json(body: Any) -> Response:
    return Response(_ENCODER.encode(body), media_type="application/json")
