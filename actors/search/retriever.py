"""Where passages come from: the index in this process, or a Search-R1 style server over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

import httpx
import msgspec
import tenacity

from leeway.actors.failures import RetrievalError
from leeway.actors.search.index import Hit, Index
from leeway.actors.search.protocol import split_contents
from leeway.replay import tracing

_INLINE_MS: Final = 1.0
"""A query that takes less is not worth a thread."""
_MAX_CONNECTIONS: Final = 64
"""Requests in flight to one server; more wait their turn within their own deadline."""


class Passage(msgspec.Struct, frozen=True, kw_only=True):
    """One search result."""

    id: str
    title: str
    text: str
    score: float
    """Higher is better; the scale is the retriever's. 0 where the server tells none."""


class Retriever(Protocol):
    """Something that finds passages."""

    async def search(self, query: str, top_k: int) -> list[Passage]:
        """At most `top_k` passages, best first. Raises RetrievalError within its deadline."""
        ...

    async def close(self) -> None:
        """Close what is open."""
        ...


def passages_of(hits: Sequence[Hit]) -> list[Passage]:
    """An index' hits as passages."""
    return [
        Passage(id=document.id, title=document.title, text=document.text, score=score)
        for document, score in hits
    ]


class LocalRetriever:
    """An index in this process."""

    def __init__(self, index: Index) -> None:
        self._index = index

    async def search(self, query: str, top_k: int) -> list[Passage]:
        """The index's best documents."""
        if self._index.query_ms < _INLINE_MS:
            [hits] = self._index.search([query], top_k)
        else:
            [hits] = await asyncio.to_thread(self._index.search, [query], top_k)
        return passages_of(hits)

    async def close(self) -> None:
        """Nothing is open."""


class _Document(msgspec.Struct):
    id: str | int = ""
    contents: str | None = None
    title: str = ""
    text: str = ""


class _Scored(msgspec.Struct):
    document: _Document
    score: float = 0.0


class _Response(msgspec.Struct):
    result: list[list[dict[str, object]]]


class HttpRetriever:
    """POST {url}/retrieve, tried again until `timeout_s` has passed.

    One attempt may take half of it, so that a connection that hangs gets a second chance. A server
    that says when to come back (Retry-After) is left alone until then. A refusal (status 4xx other
    than 408 and 429) and an answer of another shape raise at once: trying again would change
    nothing.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 20.0,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self._timeout_s = timeout_s
        limits = httpx.Limits(
            max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_MAX_CONNECTIONS
        )
        self._client = httpx.AsyncClient(timeout=timeout_s / 2, limits=limits, transport=transport)

    async def search(self, query: str, top_k: int) -> list[Passage]:
        """The server's best passages."""
        retrying = tenacity.AsyncRetrying(
            wait=_wait_s,
            retry=tenacity.retry_if_exception_type(_TRANSIENT),
        )
        num_attempts, last = 0, "it has not answered yet"
        try:
            async with asyncio.timeout(self._timeout_s):
                async for attempt in retrying:
                    with attempt:
                        num_attempts += 1
                        try:
                            return await self._request(query, top_k)
                        except _TRANSIENT as error:
                            last = f"{type(error).__name__}: {error}"
                            raise
        except TimeoutError:
            pass
        raise RetrievalError(
            f"{self._url} gave no passages within {self._timeout_s:g} s (attempt {num_attempts};"
            f" {last}); is the retriever running, and is search.retriever_timeout_s long enough?"
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _request(self, query: str, top_k: int) -> list[Passage]:
        body = {"queries": [query], "topk": top_k, "return_scores": True}
        parent = tracing.traceparent()
        headers = {} if parent is None else {"traceparent": parent}
        response = await self._client.post(self._url, json=body, headers=headers)
        if response.status_code in (408, 429) or response.status_code >= 500:
            raise _BusyServer(f"status {response.status_code}", _retry_after_s(response))
        if response.status_code != 200:
            raise RetrievalError(
                f"{self._url} refused the request: status {response.status_code},"
                f" {response.text[:200]!r}"
            )
        return _read_passages(response.content, self._url)[:top_k]


class _BusyServer(Exception):
    """A status that another attempt may better."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds the server asks to be left alone; 0 where it names none, or a date."""
    value = response.headers.get("retry-after", "").strip()
    return float(value) if value.isdecimal() else 0.0


_backoff: Final = tenacity.wait_exponential_jitter(initial=0.05, max=2.0, jitter=0.05)


def _wait_s(state: tenacity.RetryCallState) -> float:
    """Longer after each attempt, and never less than the server asked for.

    Jitter on top of that as well: those it turned away together must not come back together.
    """
    error = state.outcome.exception() if state.outcome is not None else None
    asked_s = error.retry_after_s if isinstance(error, _BusyServer) else 0.0
    return asked_s + _backoff(state) if asked_s else _backoff(state)


_TRANSIENT: Final = (httpx.RequestError, _BusyServer)


def _read_passages(content: bytes, url: str) -> list[Passage]:
    """The first query's passages, from the response with scores or the one without."""
    try:
        result = msgspec.json.decode(content, type=_Response).result
        [entries] = result
        scored = [
            msgspec.convert(entry, _Scored)
            if "document" in entry
            else _Scored(msgspec.convert(entry, _Document))
            for entry in entries
        ]
        if any(s.document.contents is None and not s.document.text for s in scored):
            raise ValueError('a document has neither "contents" nor "text"')
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise RetrievalError(
            f"{url} answered in another shape ({error}); it must be"
            ' {"result": [[{"document": {"id", "contents"}, "score"}, ...]]}, one list per query'
        ) from error
    return [_passage(entry.document, entry.score) for entry in scored]


def _passage(document: _Document, score: float) -> Passage:
    title, text = document.title, document.text
    if document.contents is not None:
        title, text = split_contents(document.contents)
    return Passage(id=str(document.id), title=title, text=text, score=score)
