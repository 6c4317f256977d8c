"""Live events as server-sent events."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, Final

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from leeway.replay.errors import LeewayError
from leeway.services.api.examples import example
from leeway.services.api.hub import ALIVE, SILENT_S, Listener, place_of
from leeway.services.api.problems import problem
from leeway.services.api.served import Served

log = logging.getLogger(__name__)

RETRY_MS: Final = 2000
"""What a listener that lost its stream waits before it comes back."""
_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def events_router(served: Served) -> APIRouter:
    """`/v1/events`."""
    router = APIRouter(prefix="/v1", tags=["events"])

    @router.get("/events", response_class=StreamingResponse, responses=example("events"))
    async def events(
        last_event_id: Annotated[str | None, Header(max_length=100)] = None,
        after: Annotated[str | None, Query(max_length=100)] = None,
        wait_s: Annotated[float | None, Query(ge=0, le=86400)] = None,
    ) -> Response:
        """What happens, as it happens: `event`, `status`, `step`, `trajectory`, each with an id.

        With `Last-Event-ID` (or `after`) the events and steps behind that id come first, the latest
        1000 of each; `0-0.0` names the beginning. `wait_s` ends the stream after so long.
        """
        given = last_event_id or after
        place = place_of(given) if given else None
        if served.hub.num_listeners >= served.config.api.max_listeners:
            detail = f"{served.hub.num_listeners} listen already (api.max_listeners)"
            return problem(429, detail, {"Retry-After": "10"})
        stack = AsyncExitStack()
        missed, listener = await stack.enter_async_context(served.hub.listen(place))
        return _Events(_stream(missed, listener, wait_s), stack)

    return router


class _Events(StreamingResponse):
    """Lets go of its listener however it is left: a client may be gone before the first byte."""

    def __init__(self, stream: AsyncIterator[bytes], listening: AsyncExitStack) -> None:
        super().__init__(stream, headers=_HEADERS, media_type="text/event-stream")
        self._listening = listening

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._listening:
            await super().__call__(scope, receive, send)


async def _stream(
    missed: AsyncIterator[bytes], listener: Listener, wait_s: float | None
) -> AsyncIterator[bytes]:
    ends_at = None if wait_s is None else time.monotonic() + wait_s
    yield b"retry: %d\n\n" % RETRY_MS
    try:
        async for page in missed:
            yield page
    except LeewayError as error:
        # The answer has begun, so its end is all that can be said; the listener comes back.
        log.warning("a stream of events ends early: %s", error)
        return
    while True:
        left_s = SILENT_S if ends_at is None else ends_at - time.monotonic()
        if left_s <= 0:
            return
        message = await listener.take(min(SILENT_S, left_s))
        if message is None:
            return
        if message is not ALIVE or left_s >= SILENT_S:
            yield message
