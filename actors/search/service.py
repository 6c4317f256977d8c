"""Searches of many callers over one index: batched, cached, bounded, each with a deadline.

    caller ── cached? ──────────────────────────────────────────▶ hits
       │  being searched already? ── waits for that ────────────▶ hits
       └─ queue (max_queue queries; full: Overloaded) ─▶ the index, max_batch queries at a time

A batch is whatever waits when the one before is done: nothing is held back to fill it. An index
whose queries take less than a millisecond is searched in the event loop itself, a few milliseconds
at a time, because a thread would cost more: it fights the loop for the interpreter.

A caller waits for the batches of its queries, timeout_s at most, and then raises SearchTimeout.
Batches are never cancelled: their answers are kept for whoever asks next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from leeway.actors.search.index import Hit, Index
from leeway.replay.errors import LeewayError, WaitTimeout

INLINE_MS: Final = 1.0
"""An index whose queries take less is searched in the event loop."""
INLINE_BATCH_MS: Final = 4.0
"""About how long a batch may hold the event loop."""
_RECENT_BATCHES: Final = 16
"""Batches over which the speed is measured that Retry-After tells."""

_Key = tuple[str, int]

log = logging.getLogger(__name__)


class Overloaded(LeewayError):
    """The queue is full; `retry_after_s` is about how long it takes to empty."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SearchTimeout(WaitTimeout):
    """The queries were not answered within the deadline."""


class ShuttingDown(LeewayError):
    """The service takes no more queries."""


class ServiceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a service."""

    max_batch: int = 64
    """Queries searched in one go."""
    max_queue: int = 1024
    """Queries that may wait; more are refused."""
    timeout_s: float = 10.0
    """Seconds a caller waits for its queries."""
    max_cached: int = 2048
    """Answers kept, the least recently used go first; 0 keeps none. Who asks the same again does so
    soon: the episodes of a group within seconds, an evaluation within some steps."""


class Counters(msgspec.Struct):
    """What a service did since it started. Queries, but for `num_batches`."""

    num_queries: int = 0
    num_cache_hits: int = 0
    num_shared: int = 0
    """Waited for the same query of another caller."""
    num_searched: int = 0
    num_batches: int = 0
    num_refused: int = 0
    """The queue was full."""
    num_timed_out: int = 0
    num_failed: int = 0
    """The index raised."""


class RetrievalService:
    """See the top of the file. Used from one event loop."""

    def __init__(self, index: Index, limits: ServiceLimits | None = None) -> None:
        self.index = index
        self.limits = limits or ServiceLimits()
        self.counters = Counters()
        self._cache: OrderedDict[_Key, list[Hit]] = OrderedDict()
        self._pending: dict[_Key, asyncio.Future[list[Hit]]] = {}
        self._queue: deque[_Key] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._is_searching = False
        self._is_closing = False
        self._began = 0.0
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_BATCHES)
        """(seconds, queries) of the last batches."""

    @property
    def num_waiting(self) -> int:
        """Queries in the queue, those that are searched right now left out."""
        return len(self._queue)

    @property
    def is_ready(self) -> bool:
        """Whether queries are taken."""
        return not self._is_closing

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Per query its hits. Raises Overloaded, SearchTimeout, ShuttingDown, or the index' own.

        All or nothing: a request whose queries do not fit into the queue adds none of them.
        """
        if self._is_closing:
            raise ShuttingDown("the retriever is shutting down; send the request again")
        keys = [(query, top_k) for query in queries]
        self.counters.num_queries += len(keys)
        # The caller's own references: an answer may leave the cache while it waits for others.
        answers = {key: found for key in keys if (found := self._cached(key)) is not None}
        missing = [key for key in dict.fromkeys(keys) if key not in answers]
        if missing:
            waiting = self._enqueue(missing)
            answers |= await self._collect(waiting)
        return [answers[key] for key in keys]

    async def close(self, grace_s: float = 5.0) -> None:
        """Take no more queries, and let those that wait be answered, for `grace_s` at most."""
        self._is_closing = True
        if self._pending:
            await asyncio.wait(list(self._pending.values()), timeout=grace_s)
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- cache and queue

    def _cached(self, key: _Key) -> list[Hit] | None:
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            self.counters.num_cache_hits += 1
        return found

    def _keep(self, key: _Key, hits: list[Hit]) -> None:
        self._cache[key] = hits
        if len(self._cache) > self.limits.max_cached:
            self._cache.popitem(last=False)

    def _enqueue(self, missing: Sequence[_Key]) -> dict[_Key, asyncio.Future[list[Hit]]]:
        new = [key for key in missing if key not in self._pending]
        if len(self._queue) + len(new) > self.limits.max_queue:
            self.counters.num_refused += len(missing)
            raise Overloaded(
                f"{len(self._queue)} queries wait and at most {self.limits.max_queue} may; "
                "send the request again later, or with fewer queries",
                self._retry_after_s(),
            )
        self.counters.num_shared += len(missing) - len(new)
        loop = asyncio.get_running_loop()
        for key in new:
            self._pending[key] = loop.create_future()
        self._queue.extend(new)
        self._start_batch()
        return {key: self._pending[key] for key in missing if key in self._pending}

    async def _collect(
        self, waiting: dict[_Key, asyncio.Future[list[Hit]]]
    ) -> dict[_Key, list[Hit]]:
        done, late = await asyncio.wait(waiting.values(), timeout=self.limits.timeout_s)
        if late:
            self.counters.num_timed_out += len(late)
            raise SearchTimeout(
                f"{len(late)} of {len(waiting)} queries were not answered within "
                f"{self.limits.timeout_s:g} s; {len(self._queue)} wait before the index"
            )
        for future in done:
            future.result()
        return {key: future.result() for key, future in waiting.items()}

    def _retry_after_s(self) -> float:
        """How long the queue takes at the speed of the last queries; 1 s before there are any."""
        if not self._recent:
            return 1.0
        seconds, numbers = zip(*self._recent, strict=True)
        return len(self._queue) * sum(seconds) / sum(numbers)

    # ---- batches

    def _start_batch(self) -> None:
        """Search what waits, unless a batch is under way, which will start the next one."""
        if self._is_searching or not self._queue:
            return
        self._is_searching = True
        loop = asyncio.get_running_loop()
        if self.index.query_ms < INLINE_MS:
            # After the callers that are ready to run: they may have more for this batch.
            loop.call_soon(self._search_here)
            return
        batch = self._take(self.limits.max_batch)
        done = loop.run_in_executor(self._thread, self._search, batch)
        done.add_done_callback(lambda done: self._deliver(batch, done.result, done.cancelled()))

    def _take(self, most: int) -> list[_Key]:
        self._began = time.monotonic()
        return [self._queue.popleft() for _ in range(min(len(self._queue), most))]

    def _search_here(self) -> None:
        """A batch short enough to leave the event loop to others every few milliseconds."""
        most = max(1, int(INLINE_BATCH_MS / self.index.query_ms))
        batch = self._take(min(most, self.limits.max_batch))
        self._deliver(batch, lambda: self._search(batch))

    def _search(self, batch: Sequence[_Key]) -> list[list[Hit]]:
        """One call of the index for those that want equally many hits, as nearly all do."""
        top_k = max(top_k for _, top_k in batch)
        found = self.index.search([query for query, _ in batch], top_k)
        return [hits[:wanted] for hits, (_, wanted) in zip(found, batch, strict=True)]

    def _deliver(
        self,
        batch: Sequence[_Key],
        result: Callable[[], list[list[Hit]]],
        is_cancelled: bool = False,
    ) -> None:
        """Answer everybody who waits for the batch, and start the next one."""
        self._is_searching = False
        futures = [self._pending.pop(key) for key in batch]
        try:
            if is_cancelled:
                raise ShuttingDown("the retriever was shut down")
            found = result()
        except Exception as error:
            self.counters.num_failed += len(batch)
            log.error("a batch of %d queries failed: %s", len(batch), error)
            for future in futures:
                future.set_exception(error)
                future.exception()  # whoever waited may have gone by its deadline
        else:
            self.counters.num_batches += 1
            self.counters.num_searched += len(batch)
            for key, future, hits in zip(batch, futures, found, strict=True):
                self._keep(key, hits)
                future.set_result(hits)
            self._recent.append((time.monotonic() - self._began, len(batch)))
        self._start_batch()
