"""Live events: one reader of the run for all who listen.

    Redis --every POLL_S--> Hub --one queue each--> listener, listener, listener

Messages are encoded once. Each carries an id that names a place in the records of the run, so a
listener who was away gets the events and steps behind its last id from Redis. `status` and
`trajectory` tell of now and are not repeated. A listener who does not take its messages is ended
when MAX_BEHIND wait for it; it comes back with its last id.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from leeway.replay.errors import DataError, LeewayError
from leeway.replay.run_board import Event
from leeway.services.api.reader import Reader
from leeway.services.api.resources import TrajectoryItem

log = logging.getLogger(__name__)

POLL_S: Final = 0.5
STATUS_S: Final = 1.0
"""Seconds between two `status` messages."""
MAX_BEHIND: Final = 256
AT_ONCE: Final = 200
MAX_REPLAY: Final = 1000
"""Events and steps that a listener who was away gets at most, the latest."""
SILENT_S: Final = 10.0
"""After so long without a message a comment is sent, so that both ends know the other lives."""
ALIVE: Final = b": alive\n\n"

_ID: Final = re.compile(r"(\d{1,16}-\d{1,16})\.(\d{1,9})")


class Records(Protocol):
    """What the hub reads of the run board."""

    async def events(self, after: str = "", count: int = 100) -> Sequence[Event]: ...
    async def steps(self, after: int = 0, count: int = 100) -> list[dict[str, Any]]: ...


class Place(NamedTuple):
    """How far somebody has read: the newest event and the newest step."""

    event_id: str
    step: int

    def __str__(self) -> str:
        return f"{self.event_id}.{self.step}"


BEGIN: Final = Place("0-0", 0)

Newest = Callable[[], Awaitable[Sequence[TrajectoryItem]]]
"""The trajectories since it was last asked."""


def place_of(text: str) -> Place:
    """The place that an id names: 1764-0.17 -> event 1764-0, step 17. Raises DataError."""
    found = _ID.fullmatch(text)
    if found is None:
        raise DataError(f"{text[:80]!r} is no id of an event of this API; leave it out")
    return Place(found[1], int(found[2]))


class Listener:
    """One who listens."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.has_ended = False

    def put(self, message: bytes) -> None:
        """Without waiting; one that is too far behind is ended."""
        if self.has_ended:
            return
        if self._queue.qsize() >= MAX_BEHIND:
            self.end()
        else:
            self._queue.put_nowait(message)

    def end(self) -> None:
        """Behind what it has been sent."""
        self.has_ended = True
        self._queue.put_nowait(None)

    async def take(self, timeout_s: float) -> bytes | None:
        """All that waits, joined; ALIVE if nothing comes in time; None at the end."""
        try:
            async with asyncio.timeout(timeout_s):
                first = await self._queue.get()
        except TimeoutError:
            return ALIVE
        if first is None:
            return None
        found = [first]
        while not self._queue.empty():
            following = self._queue.get_nowait()
            if following is None:
                self._queue.put_nowait(None)
                break
            found.append(following)
        return b"".join(found)


class Hub:
    """Reads the run while somebody listens. One per event loop."""

    def __init__(self, reader: Reader, records: Records, newest: Newest) -> None:
        self._reader = reader
        self._records = records
        self._newest = newest
        self._listeners: set[Listener] = set()
        self._place = BEGIN
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    @property
    def num_listeners(self) -> int:
        """Who listens now."""
        return len(self._listeners)

    @asynccontextmanager
    async def listen(self, after: Place | None) -> AsyncIterator[tuple[list[bytes], Listener]]:
        """Messages that were missed since `after`, and a listener for those to come. Without
        `after` the first message is the status. Raises StoreUnavailable.
        """
        listener = Listener()
        async with self._starting:
            if self._task is None or self._task.done():
                self._place = await self._now()
                self._task = asyncio.create_task(self._follow())
            until = self._place
            self._listeners.add(listener)
        try:
            missed = [] if after is None else await self._between(after, until)
            look = await self._reader.look()
            yield [*missed, _message("status", until, look.body)], listener
        finally:
            self._listeners.discard(listener)
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None

    async def close(self) -> None:
        """End everybody."""
        for listener in list(self._listeners):
            listener.end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _now(self) -> Place:
        last = await self._records.events(count=1)
        look = await self._reader.look()
        return Place(last[-1].event_id if last else "0-0", look.snapshot.run.step)

    async def _between(self, after: Place, until: Place) -> list[bytes]:
        """Events and steps behind `after`, up to `until`; the latest 1000 of each."""
        place, found = after._replace(step=max(after.step, until.step - MAX_REPLAY)), list[bytes]()
        for _ in range(MAX_REPLAY // AT_ONCE):
            place, messages = await self._read(place, until)
            found += messages
            if not messages:
                break
        return found

    async def _follow(self) -> None:
        since_status_s = STATUS_S
        while True:
            try:
                self._place, messages = await self._read(self._place)
                if since_status_s >= STATUS_S:
                    since_status_s = 0.0
                    look = await self._reader.look()
                    messages.append(_message("status", self._place, look.body))
                    messages += await self._trajectories()
                    # A resumption at an earlier step writes those behind it anew.
                    self._place = self._place._replace(
                        step=min(self._place.step, look.snapshot.run.step)
                    )
                self._tell(b"".join(messages))
            except LeewayError as error:
                log.warning("live events: %s", error)
            await asyncio.sleep(POLL_S)
            since_status_s += POLL_S

    async def _trajectories(self) -> list[bytes]:
        return [
            _message("trajectory", self._place, item.model_dump_json().encode())
            for item in await self._newest()
        ]

    async def _read(self, after: Place, until: Place | None = None) -> tuple[Place, list[bytes]]:
        """What is behind `after`, and not behind `until`: that comes by the queue."""
        place, messages = after, list[bytes]()
        for event in await self._records.events(after.event_id, AT_ONCE):
            if until is not None and _order(event.event_id) > _order(until.event_id):
                break
            place = place._replace(event_id=event.event_id)
            messages.append(_message("event", place, msgspec.json.encode(event)))
        for line in await self._records.steps(after.step, AT_ONCE):
            if until is not None and line["step"] > until.step:
                break
            place = place._replace(step=int(line["step"]))
            messages.append(_message("step", place, msgspec.json.encode(line)))
        return place, messages

    def _tell(self, message: bytes) -> None:
        if message:
            for listener in self._listeners:
                listener.put(message)


def _order(event_id: str) -> tuple[int, int]:
    milliseconds, _, number = event_id.partition("-")
    return int(milliseconds), int(number)


def _message(kind: str, place: Place, data: bytes) -> bytes:
    """JSON holds no line break, so one `data:` line carries it."""
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (str(place).encode(), kind.encode(), data)
