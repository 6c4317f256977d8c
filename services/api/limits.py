"""What stands in front of every route: who may come in, how often, and with how much.

    request -> path of /v1 or /metrics? -> token -> rate of its client -> scope -> size of the body

Who has a token is counted apart from who has none, so that a flood of guesses does not lock those
out who come from the same address. Where no token is asked for, origins.py looks at the request.

GET, HEAD and OPTIONS need the read scope, every other method the control scope. A request is
refused before its body is read or its path is looked up.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from leeway.services.api.auth import Scope as TokenScope
from leeway.services.api.auth import Tokens
from leeway.services.api.origins import READING, complaint
from leeway.services.api.problems import problem
from leeway.services.config import ApiConfig

SCOPE_HEADER: Final = b"leeway-scope"
"""Names the scope of the token in every answer, so that a page knows which buttons to show."""

_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="leeway"'}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Rate:
    """Requests of each client in the second that is running, and none of those before.

    Our own: the storage in memory of the library `limits` starts a thread for nearly every request.
    """

    def __init__(self, max_per_s: int) -> None:
        self._max_per_s = max_per_s
        self._second = 0
        self._counts: dict[tuple[str, str], int] = {}

    def takes(self, client: str, kind: str) -> bool:
        """Count one more; whether it is within the bound."""
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._counts = second, {}
        count = self._counts.get((client, kind), 0) + 1
        self._counts[client, kind] = count
        return count <= self._max_per_s


_AS_IT_SAYS = (b"x-content-type-options", b"nosniff")
"""A browser takes an answer for what its content type says and for nothing else."""


class Gate:
    """ASGI middleware. `tokens` None lets everybody in, with the control scope."""

    def __init__(self, app: App, config: ApiConfig, tokens: Tokens | None) -> None:
        self._app = app
        self._tokens = tokens
        self._host = config.host
        self._max_body_bytes = int(config.max_body_bytes)
        self._max_per_s = config.max_requests_per_s
        self._rate = Rate(config.max_requests_per_s)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_guarded(scope["path"]):
            await self._app(scope, receive, send)
            return
        send = _marked(send, _AS_IT_SAYS)
        headers, method = Headers(scope=scope), scope["method"]
        authorization = headers.get("authorization")
        found = "control" if self._tokens is None else self._tokens.scope_of(authorization)
        client = scope["client"][0] if scope.get("client") else "unknown"
        if not self._rate.takes(client, found or "no token"):
            detail = f"more than {self._max_per_s} requests a second (api.max_requests_per_s)"
            await problem(429, detail, {"Retry-After": "1"})(scope, receive, send)
            return
        wrong = None
        if self._tokens is None:
            wrong = complaint(method, headers, self._host)
        if wrong is not None:
            title = "Another site may not do this"
            await problem(403, wrong, title=title)(scope, receive, send)
            return
        if found is None:
            what = "is no token of this run" if authorization else "is missing"
            detail = f"the header Authorization: Bearer TOKEN {what}"
            await problem(401, detail, _CHALLENGE)(scope, receive, send)
            return
        if found == "read" and method not in READING:
            detail = "this token may read; what changes the run needs the control token"
            await problem(403, detail)(scope, receive, _scoped(send, found))
            return
        await self._let_in(scope, headers, receive, _scoped(send, found))

    async def _let_in(
        self, scope: MutableMapping[str, Any], headers: Headers, receive: Receive, send: Send
    ) -> None:
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._max_body_bytes:
            await self._refuse_body(scope, receive, send)
            return
        await self._app(scope, _limited(receive, self._max_body_bytes), send)

    async def _refuse_body(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        detail = _size_sentence(self._max_body_bytes)
        # What is left of the body is not read: the connection cannot serve another request.
        await problem(413, detail, {"Connection": "close"})(scope, receive, send)


def _size_sentence(max_bytes: int) -> str:
    return f"a body may have {max_bytes} bytes (api.max_body_bytes)"


def _is_guarded(path: str) -> bool:
    return path == "/metrics" or path == "/v1" or path.startswith("/v1/")


def _scoped(send: Send, found: TokenScope) -> Send:
    return _marked(send, (SCOPE_HEADER, found.encode()))


def _marked(send: Send, header: tuple[bytes, bytes]) -> Send:
    async def forward(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), header]
        await send(message)

    return forward


def _limited(receive: Receive, max_bytes: int) -> Receive:
    num_bytes = 0

    async def forward() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise HTTPException(413, _size_sentence(max_bytes), {"Connection": "close"})
        return message

    return forward
