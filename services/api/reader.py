"""One look at the run for all who ask within a moment: sections, buffer, phase, newest event.

Two hundred requests a second cost one read of Redis every AHEAD_S. It begins before the last look
is too old, so nobody waits for it while they keep coming, unless Redis is slow. Who comes when the
last look is too old waits for the read that is under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, Protocol

from leeway.replay.errors import StoreUnavailable
from leeway.replay.store import ReplayStats
from leeway.services.api.models import Status
from leeway.services.api.tags import tag_of
from leeway.services.snapshot import Section, build_snapshot, gathered

REFRESH_S: Final = 0.5
"""How old a look may be."""
AHEAD_S: Final = 0.25
"""Who asks when it is older than this begins a read, and does not wait for it."""
ANSWER_TIMEOUT_S: Final = 5.0
"""Seconds Redis may take before a request is answered with 503."""


@asynccontextmanager
async def answer_deadline(more_s: float = 0.0) -> AsyncIterator[None]:
    """Everything that a route asks of Redis is asked inside. Raises StoreUnavailable when it takes
    longer than ANSWER_TIMEOUT_S, and `more_s` where the request itself says how long to wait.
    """
    deadline_s = ANSWER_TIMEOUT_S + more_s
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError:
        raise StoreUnavailable(f"Redis gave no answer within {deadline_s:g} s") from None


class HasText(Protocol):
    """An event, of which the status shows the text."""

    @property
    def text(self) -> str: ...


class RunSections(Protocol):
    """What a look needs of the run board; replay.run_board.RunBoard is the real one."""

    async def get_all(self) -> dict[str, dict[str, Any]]: ...
    async def phase(self) -> str | None: ...
    async def events(self, after: str = "", count: int = 100) -> Sequence[HasText]: ...


class BufferStats(Protocol):
    """What a look needs of the replay buffer; replay.store.Replay is one."""

    async def stats(self) -> ReplayStats: ...


class Look(NamedTuple):
    """The run at one moment."""

    taken_at: float
    """Monotonic seconds."""
    sections: Mapping[str, Section]
    """As written; the phase is in `run`."""
    members: Mapping[str, Section]
    """Those of workers and engines brought together, the silent ones left out."""
    stats: ReplayStats
    phase: str | None
    snapshot: Status
    body: bytes
    """Of GET /v1/status."""
    tag: str
    """Its ETag."""

    def section(self, name: str) -> Section:
        """Empty where nobody has written it yet."""
        return self.members.get(name, {})

    def each(self, part: str) -> list[tuple[str, Section]]:
        """Workers ("rollout") or engines ("policy") by name, whoever is alive."""
        found = self.section(part).items()
        return sorted((name, value) for name, value in found if isinstance(value, Mapping))


class Reader:
    """Looks at one run. One per event loop."""

    def __init__(
        self, board: RunSections, replay: BufferStats, config_summary: Mapping[str, Any]
    ) -> None:
        self._board = board
        self._replay = replay
        self._summary = dict(config_summary)
        self._last: Look | None = None
        self._reading: asyncio.Task[Look] | None = None
        self.num_reads = 0
        """Reads of Redis since the start."""
        self.has_answered = False
        """Whether Redis has ever answered."""

    async def look(self, max_age_s: float | None = None) -> Look:
        """A look of at most `max_age_s`, REFRESH_S unless told. Raises StoreUnavailable when Redis
        gives no answer within ANSWER_TIMEOUT_S.
        """
        last = self.fresh(max_age_s)
        if last is not None:
            return last
        # Who asks may go away; the others still wait for the same read.
        return await asyncio.shield(self._begin())

    def fresh(self, max_age_s: float | None = None) -> Look | None:
        """The last look, if it is not older than that; the next one may begin."""
        last = self._last
        if last is None:
            return None
        age_s = time.monotonic() - last.taken_at
        if age_s > (REFRESH_S if max_age_s is None else max_age_s):
            return None
        if age_s > AHEAD_S:
            self._begin()
        return last

    def _begin(self) -> asyncio.Task[Look]:
        """The read that is under way."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
            # Maybe nobody waits for it; whoever comes when the last look is too old reads anew.
            self._reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._reading

    async def close(self) -> None:
        """End a read that is under way."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> Look:
        self.num_reads += 1
        taken_at = time.monotonic()
        async with answer_deadline():
            sections, phase, events, stats = await asyncio.gather(
                self._board.get_all(),
                self._board.phase(),
                self._board.events(count=1),
                self._replay.stats(),
            )
        if phase is not None:
            sections.setdefault("run", {})["phase"] = phase
        snapshot = build_snapshot(sections, stats, last_event=events[-1].text if events else None)
        snapshot.config = self._summary
        body = snapshot.model_dump_json().encode()
        members = gathered(sections, time.time())
        tag = tag_of(body)
        self._last = Look(taken_at, sections, members, stats, phase, snapshot, body, tag)
        self.has_answered = True
        return self._last
