"""Live events as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Final

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from leeway.replay.errors import LeewayError
from leeway.services.api.examples import example
from leeway.services.api.hub import Listener, place_of
from leeway.services.api.parameters import After, LastEventId, StreamS
from leeway.services.api.problems import problem
from leeway.services.api.served import Served

log = logging.getLogger(__name__)

RETRY_MS: Final = 2000
"""What a listener that lost its stream waits before it comes back."""
SEND_TIMEOUT_S: Final = 30.0
"""A listener that takes nothing for so long is ended."""
_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def events_router(served: Served) -> APIRouter:
    """`/v1/events`."""
    router = APIRouter(prefix="/v1", tags=["events"])

    @router.get("/events", response_class=StreamingResponse, responses=example("events"))
    async def events(
        last_event_id: LastEventId = None,
        after: After = None,
        wait_s: StreamS = None,
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
        return _Events(missed, listener, wait_s, stack)

    return router


class _Events(Response):
    """Sends what was missed, then what comes, until the client is gone or the listener ended. It
    lets go of its listener however it is left: a client may be gone before the first byte.

    No generator and no queue stands between a message and the socket: with hundreds of listeners
    each step on the way counts.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        missed: AsyncIterator[bytes],
        listener: Listener,
        wait_s: float | None,
        listening: AsyncExitStack,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._missed = missed
        self._listener = listener
        self._wait_s = wait_s
        self._listening = listening

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._listening:
            sending = asyncio.create_task(self._send(send))
            gone = asyncio.create_task(_gone(receive))
            try:
                await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                sending.cancel()
                gone.cancel()
                await asyncio.gather(sending, gone, return_exceptions=True)
            if not sending.cancelled():
                sending.result()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        ends_at = None if self._wait_s is None else asyncio.get_running_loop().time() + self._wait_s
        try:
            if await self._send_missed(send):
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(ends_at):
                        while message := await self._listener.take():
                            await _put(send, message)
        except _TakesNothing:
            # Nothing can be said to it any more, not even that this is the end.
            log.warning("a listener took nothing for %g s; its stream ends", SEND_TIMEOUT_S)
            return
        await send({"type": "http.response.body", "body": b""})

    async def _send_missed(self, send: Send) -> bool:
        """Whether all of it was read."""
        await _put(send, b"retry: %d\n\n" % RETRY_MS)
        try:
            async for page in self._missed:
                await _put(send, page)
        except LeewayError as error:
            # The answer has begun, so its end is all that can be said; the listener comes back.
            log.warning("a stream of events ends early: %s", error)
            return False
        return True


class _TakesNothing(Exception):
    """The client of a stream does not read."""


async def _put(send: Send, body: bytes) -> None:
    """Waits until the client has taken what was sent before. Raises _TakesNothing."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": body, "more_body": True})
    except TimeoutError:
        raise _TakesNothing from None


async def _gone(receive: Receive) -> None:
    """Until the client is."""
    while (await receive())["type"] != "http.disconnect":
        pass
