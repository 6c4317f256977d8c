"""Live events: one reader of the run for all who listen.

    Redis --every POLL_S--> Hub --one queue each--> listener, listener, listener

Messages are encoded once. Each carries an id that names a place in the records of the run, so a
listener who was away gets the events and steps behind its last id from Redis, page by page as it
takes them. `status` and `trajectory` tell of now and are not repeated. A listener who does not take
its messages is ended when MAX_BEHIND wait for it; it comes back with its last id.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from leeway.replay.errors import DataError, LeewayError
from leeway.replay.run_board import Event
from leeway.services.api.reader import Reader
from leeway.services.api.recent import Seen

log = logging.getLogger(__name__)

POLL_S: Final = 0.5
STATUS_S: Final = 1.0
"""Seconds between two `status` messages."""
MAX_BEHIND: Final = 256
AT_ONCE: Final = 200
MAX_REPLAY: Final = 1000
"""Events and steps that a listener who was away gets at most, the latest of each."""
MAX_REPLAYS: Final = 8
"""Pages for listeners who were away that are read at the same time."""
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


class Trajectories(Protocol):
    """What the hub needs of the last trajectories; recent.RecentGroups is the real one."""

    @property
    def num_seen(self) -> int: ...
    async def since(self, number: int) -> Sequence[Seen]: ...


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

    def __init__(self, reader: Reader, records: Records, recent: Trajectories) -> None:
        self._reader = reader
        self._records = records
        self._recent = recent
        self._listeners: set[Listener] = set()
        self._num_taken = 0
        self._place = BEGIN
        self._step = 0
        """Of the run, when it was last looked at."""
        self._trajectory = 0
        self._since_status_s = STATUS_S
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._replays = asyncio.Semaphore(MAX_REPLAYS)

    @property
    def num_listeners(self) -> int:
        """Who listens now, and who is about to."""
        return self._num_taken

    @asynccontextmanager
    async def listen(
        self, after: Place | None
    ) -> AsyncIterator[tuple[AsyncIterator[bytes], Listener]]:
        """What was missed since `after`, a page at a time and the status last, and a listener for
        what is to come. Without `after` there is the status alone. Raises StoreUnavailable, also
        while pages are taken.
        """
        # Before anything is awaited: who comes meanwhile counts this one.
        self._num_taken += 1
        listener = Listener()
        try:
            async with self._starting:
                if self._task is None or self._task.done():
                    await self._begin()
                until = self._place
                self._listeners.add(listener)
            await self._reader.look()
            yield self._missed(after, until), listener
        finally:
            self._num_taken -= 1
            self._listeners.discard(listener)
            if not self._num_taken and self._task is not None:
                self._task.cancel()
                self._task = None

    async def close(self) -> None:
        """End everybody."""
        for listener in list(self._listeners):
            listener.end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _begin(self) -> None:
        last = await self._records.events(count=1)
        look = await self._reader.look()
        self._step = look.snapshot.run.step
        self._place = Place(last[-1].event_id if last else "0-0", self._step)
        self._trajectory = self._recent.num_seen
        self._since_status_s = STATUS_S
        self._task = asyncio.create_task(self._follow())

    async def _missed(self, after: Place | None, until: Place) -> AsyncIterator[bytes]:
        """Events and steps behind `after`, up to `until`: the latest MAX_REPLAY of each."""
        if after is not None:
            async with self._replays:
                place = await self._beginning(after, until)
            while True:
                async with self._replays:
                    place, messages = await self._read(place, until)
                if not messages:
                    break
                yield b"".join(messages)
        look = await self._reader.look()
        yield _message("status", until, look.body)

    async def _beginning(self, after: Place, until: Place) -> Place:
        """`after`, or later if more than MAX_REPLAY events or steps lie behind it. The run may have
        gone back to an earlier step since, or lost its events: then `until`, which is now.
        """
        step = max(min(after.step, until.step), until.step - MAX_REPLAY)
        first = min(after.event_id, until.event_id, key=_order)
        if len(await self._records.events(first, AT_ONCE)) == AT_ONCE:
            latest = await self._records.events(count=MAX_REPLAY + 1)
            if len(latest) > MAX_REPLAY:
                first = max(first, latest[0].event_id, key=_order)
        return Place(first, step)

    async def _follow(self) -> None:
        while True:
            try:
                await self._poll()
            except LeewayError as error:
                log.warning("live events: %s", error)
            except Exception:
                # One bad record must not silence the stream of all who listen.
                log.exception("live events")
            await asyncio.sleep(POLL_S)
            self._since_status_s += POLL_S

    async def _poll(self) -> None:
        """Tell what is new. Nothing is awaited between a step forward and telling of it, so an
        error loses no message: what was not told is read again.
        """
        place, messages = await self._read(self._place)
        self._place = place
        self._tell(messages)
        if self._since_status_s < STATUS_S:
            return
        look = await self._reader.look()
        self._since_status_s = 0.0
        self._tell([_message("status", self._place, look.body)])
        step, before, self._step = look.snapshot.run.step, self._step, look.snapshot.run.step
        if step < before:
            # A resumption at an earlier step writes those behind it anew. A look alone says less:
            # it may be older than the records of steps.
            self._place = place._replace(step=min(place.step, step))
        seen = await self._recent.since(self._trajectory)
        self._trajectory = max([self._trajectory, *(one.number for one in seen)])
        self._tell(
            [
                _message("trajectory", self._place, one.item.model_dump_json().encode())
                for one in seen
            ]
        )

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

    def _tell(self, messages: Sequence[bytes]) -> None:
        if messages:
            together = b"".join(messages)
            for listener in self._listeners:
                listener.put(together)


def _order(event_id: str) -> tuple[int, int]:
    milliseconds, _, number = event_id.partition("-")
    return int(milliseconds), int(number)


def _message(kind: str, place: Place, data: bytes) -> bytes:
    """JSON holds no line break, so one `data:` line carries it."""
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (str(place).encode(), kind.encode(), data)
