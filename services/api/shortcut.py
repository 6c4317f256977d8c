"""`GET /v1/status` without the way through the router: what a run is asked most, by everybody.

The way costs several times what the answer does. It is left to who comes when the last look is too
old: the first after a pause, and everybody while Redis is slow. They wait for the read, in the
route. While requests keep coming none does, as the next look is read ahead (reader.py).
"""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from leeway.services.api.reader import Reader
from leeway.services.api.tags import answer

PATH: Final = "/v1/status"


class Shortcut:
    """ASGI middleware; behind the gate, in front of the router."""

    def __init__(self, app: ASGIApp, reader: Reader, route: BaseRoute) -> None:
        """`route` is the one of PATH: requests are counted under its name, whoever answers."""
        self._app = app
        self._reader = reader
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_meant = scope["type"] == "http" and scope["path"] == PATH and scope["method"] == "GET"
        look = self._reader.fresh() if is_meant else None
        if look is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = self._route
        await answer(Headers(scope=scope), look.body, look.tag)(scope, receive, send)
