"""What the API counts of its own requests; `GET /metrics` tells it with the rest.

It begins at 0 with the process: these are numbers of the API, not of the run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from leeway.replay.histogram import Histogram

RESPONSE_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
METHODS: Final = {"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"}
UNMATCHED: Final = "unmatched"
"""Stands for every path that is no route, so that a stray client makes no new series."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class RequestCounters:
    """Requests since the process started."""

    def __init__(self) -> None:
        self.answered: Counter[tuple[str, str, str]] = Counter()
        """(method, route, status) -> answers begun."""
        self.open: Counter[str] = Counter()
        """Route -> answers that have begun and not ended: of the events, its listeners."""
        self.response_s: dict[str, Histogram] = {}
        """Route -> seconds from the request until its answer began."""

    def begin(self, method: str, route: str, status: int, seconds: float) -> None:
        """An answer begins."""
        known = method if method in METHODS else "other"
        self.answered[known, route, str(status)] += 1
        self.open[route] += 1
        histogram = self.response_s.setdefault(route, Histogram(bounds=RESPONSE_S))
        histogram.observe(seconds)

    def end(self, route: str) -> None:
        """It has been sent, or its client is gone."""
        self.open[route] -= 1


class MeasuredRequests:
    """ASGI middleware that counts; add it last, so that it is outermost."""

    def __init__(self, app: App, counters: RequestCounters) -> None:
        self._app = app
        self._counters = counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        route: str | None = None

        def begin(status: int) -> str:
            found, seconds = _route_of(scope), time.perf_counter() - began
            self._counters.begin(scope["method"], found, status, seconds)
            return found

        async def count(message: MutableMapping[str, Any]) -> None:
            nonlocal route
            if message["type"] == "http.response.start" and route is None:
                route = begin(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, count)
        except Exception:
            # The answer to it is made further out, where no route is known any more.
            route = begin(500) if route is None else route
            raise
        finally:
            if route is not None:
                self._counters.end(route)


def _route_of(scope: Scope) -> str:
    """The route's template, such as /v1/trajectories/{id}; routing has left it in the scope."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else UNMATCHED
