"""ETags: who asks again for what has not changed gets 304, without a body.

Every JSON answer to a GET below /v1 carries one, whatever route it comes from; a route that sets
its own, as that of the settings does, keeps it.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

JSON: Final = "application/json"

_HEADERS: Final = {"ETag": {"description": "Names this answer", "schema": {"type": "string"}}}
_IF_NONE_MATCH: Final = {
    "name": "If-None-Match",
    "in": "header",
    "required": False,
    "description": "ETag of an answer that is there already; 304 while it is still right.",
    "schema": {"type": "string", "examples": ['"8c1f6e0a5b7d4c2e9f301122"']},
}
_UNCHANGED: Final = {
    "description": "Unchanged since the answer whose ETag If-None-Match names",
    "headers": _HEADERS,
}


def tell_of_tag(operation: dict[str, Any], is_polled: bool) -> None:
    """In openapi.json: that a good answer has an ETag, and where `is_polled` may be a 304."""
    operation["responses"]["200"]["headers"] = _HEADERS
    if is_polled:
        operation.setdefault("parameters", []).append(_IF_NONE_MATCH)
        operation["responses"]["304"] = _UNCHANGED


def tag_of(body: bytes) -> str:
    """The ETag of a body."""
    return f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'


def answer(headers: Headers, body: bytes, tag: str) -> Response:
    """JSON with its ETag; 304 where `headers` say it is there already."""
    own = {"ETag": tag, "Cache-Control": "no-cache"}
    if _has(headers, tag):
        return Response(status_code=304, headers=own)
    return Response(body, headers=own, media_type=JSON)


def _has(headers: Headers, tag: str) -> bool:
    given = headers.get("if-none-match")
    return given is not None and names(given, tag)


def names(given: str, tag: str) -> bool:
    """Whether a header If-Match or If-None-Match names `tag`: W/"a", "b" names "a".

    A proxy that compresses an answer makes its tag a weak one. What it stands for is the same.
    """
    found = (one.strip().removeprefix("W/") for one in given.split(","))
    return not {tag, "*"}.isdisjoint(found)


class Tagged:
    """ASGI middleware, in front of the router."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or not _is_ours(scope["path"]):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Tagging(Headers(scope=scope), scope, receive, send).send)


class _Tagging:
    """Holds the head of one answer back until its body is there."""

    def __init__(self, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        self._asked = headers
        self._scope = scope
        self._receive = receive
        self._send = send
        self._start: Message | None = None

    async def send(self, message: Message) -> None:
        """In place of the server's."""
        if message["type"] == "http.response.start" and _is_tagged(message):
            self._start = message
            return
        start, self._start = self._start, None
        if start is None:
            await self._send(message)
            return
        assert not message.get("more_body"), "JSON comes in one piece"
        whole = answer(self._asked, message["body"], tag_of(message["body"]))
        await whole(self._scope, self._receive, self._send)


def _is_ours(path: str) -> bool:
    return path.startswith("/v1/")


def _is_tagged(start: Message) -> bool:
    headers = MutableHeaders(raw=list(start.get("headers", ())))
    return start["status"] == 200 and headers.get("content-type") == JSON and "etag" not in headers
