"""Live events: one reader of the run for all who listen.

    Redis --every TICK_S--> Hub --one piece of bytes for all--> listener, listener, listener

What a tick found is encoded once and joined once: the events, steps and trajectories that are new,
and the status behind them. Listeners are told AT_A_TIME, and the loop turns between, so that who
asks something else meanwhile does not wait for all of them.

Each message carries an id that names a place in the records of the run, so a listener who was away
gets the events and steps behind its last id from Redis, page by page as it takes them. `status` and
`trajectory` tell of now and are not repeated. A listener who takes nothing for a while gets all
events and steps of the ticks it missed, and the last status alone. It is ended when MAX_BEHIND
ticks or MAX_BEHIND_BYTES wait for it, and comes back with its last id.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from leeway.replay.errors import DataError, LeewayError
from leeway.replay.run_board import Event
from leeway.services.api.reader import Reader, answer_deadline
from leeway.services.api.recent import Seen

log = logging.getLogger(__name__)

TICK_S: Final = 1.0
"""Seconds between two looks at the run, each of which ends in one message to every listener."""
AT_A_TIME: Final = 25
"""Listeners who are told in one pass of the loop: some 40 microseconds each."""
MAX_BEHIND: Final = 60
MAX_BEHIND_BYTES: Final = 4 * 2**20
MAX_TRAJECTORIES: Final = 20
"""Trajectories of one tick, the newest; the others are at /v1/trajectories."""
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


class Tick(NamedTuple):
    """What one look found, for all who listen."""

    kept: bytes
    """Messages that a listener must not miss."""
    status: bytes
    """The newer one serves in its place."""
    whole: bytes
    """Both, joined."""


class Listener:
    """One who listens."""

    def __init__(self) -> None:
        self._waiting: list[Tick] = []
        self._num_bytes = 0
        self._news = asyncio.Event()
        self.has_ended = False

    def put(self, tick: Tick) -> None:
        """Without waiting; one that is too far behind is ended."""
        if self.has_ended:
            return
        self._waiting.append(tick)
        self._num_bytes += len(tick.kept)
        self._news.set()
        if len(self._waiting) > MAX_BEHIND or self._num_bytes > MAX_BEHIND_BYTES:
            self.end()

    def end(self) -> None:
        """Behind what it has been sent."""
        self.has_ended = True
        self._news.set()

    async def take(self) -> bytes:
        """All that waits, joined, with the last status alone; empty at the end."""
        if not self.has_ended:
            await self._news.wait()
        self._news.clear()
        ticks, self._waiting, self._num_bytes = self._waiting, [], 0
        if len(ticks) == 1:
            return ticks[0].whole
        status = next((tick.status for tick in reversed(ticks) if tick.status), b"")
        return b"".join([*(tick.kept for tick in ticks), status])


@dataclass
class _Found:
    """What a tick has found so far; an error in one part leaves what came before it."""

    place: Place
    kept: list[bytes] = field(default_factory=list[bytes])
    status: bytes = b""


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
        self._told_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[Sequence[Seen]] | None = None
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
            async with answer_deadline(), self._starting:
                if self._task is None or self._task.done():
                    await self._begin()
                until = self._place
                self._listeners.add(listener)
            await self._reader.look()
            yield self._missed(after, until), listener
        finally:
            self._num_taken -= 1
            self._listeners.discard(listener)
            if not self._num_taken:
                self._stop()

    async def close(self) -> None:
        """End everybody."""
        for listener in list(self._listeners):
            listener.end()
        await asyncio.gather(*self._stop(), return_exceptions=True)

    def _stop(self) -> list[asyncio.Task[Any]]:
        """Read no more."""
        tasks = [task for task in (self._task, self._looking) if task is not None]
        for task in tasks:
            task.cancel()
        self._task = self._looking = None
        return tasks

    async def _begin(self) -> None:
        last = await self._records.events(count=1)
        look = await self._reader.look()
        self._step = look.snapshot.run.step
        self._place = Place(last[-1].event_id if last else "0-0", self._step)
        self._trajectory = self._recent.num_seen
        self._told_at = time.monotonic()
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
            await asyncio.sleep(TICK_S)
            found = _Found(self._place)
            try:
                async with answer_deadline():
                    await self._look(found)
            except LeewayError as error:
                log.warning("live events: %s", error)
            except Exception:
                # One bad record must not silence the stream of all who listen.
                log.exception("live events")
            await self._tell(found)

    async def _look(self, found: _Found) -> None:
        """What is new."""
        found.place, found.kept = await self._read(self._place)
        look = await self._reader.look()
        step, before, self._step = look.snapshot.run.step, self._step, look.snapshot.run.step
        if step < before:
            # A resumption at an earlier step writes those behind it anew. A look alone says less:
            # it may be older than the records of steps.
            found.place = found.place._replace(step=min(found.place.step, step))
        found.status = _message("status", found.place, look.body)
        found.kept += [
            _message("trajectory", found.place, one.item.model_dump_json().encode())
            for one in (await self._seen())[-MAX_TRAJECTORIES:]
        ]

    async def _seen(self) -> Sequence[Seen]:
        """Trajectories that are new. The first look loads the questions, which may take longer than
        a tick: nobody waits for it, and what it finds is told when it has ended.
        """
        if self._looking is None:
            self._looking = asyncio.create_task(self._recent.since(self._trajectory))
        await asyncio.wait({self._looking}, timeout=TICK_S)
        if not self._looking.done():
            return ()
        done, self._looking = self._looking, None
        seen = done.result()
        self._trajectory = max([self._trajectory, *(one.number for one in seen)])
        return seen

    async def _tell(self, found: _Found) -> None:
        """The step forward and the list of who is told of it are one: whoever comes later reads
        from the new place on, and whoever was there is told.
        """
        listeners, self._place = tuple(self._listeners), found.place
        kept, now = b"".join(found.kept), time.monotonic()
        if kept or found.status:
            tick = Tick(kept, found.status, kept + found.status)
        elif now - self._told_at >= SILENT_S:
            tick = Tick(ALIVE, b"", ALIVE)
        else:
            return
        self._told_at = now
        for number, listener in enumerate(listeners, 1):
            listener.put(tick)
            if number % AT_A_TIME == 0:
                await asyncio.sleep(0)

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


def _order(event_id: str) -> tuple[int, int]:
    milliseconds, _, number = event_id.partition("-")
    return int(milliseconds), int(number)


def _message(kind: str, place: Place, data: bytes) -> bytes:
    """JSON holds no line break, so one `data:` line carries it."""
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (str(place).encode(), kind.encode(), data)
