"""A retriever that is counted, and whose searches show in traces."""

from __future__ import annotations

import time

from leeway.actors.counters import RetrieverCounters
from leeway.actors.failures import RetrievalError
from leeway.actors.search.retriever import Passage, Retriever
from leeway.replay import tracing


class MeasuredRetriever:
    """A Retriever over another."""

    def __init__(self, retriever: Retriever, counters: RetrieverCounters) -> None:
        self._retriever = retriever
        self._counters = counters

    async def search(self, query: str, top_k: int) -> list[Passage]:
        """See Retriever.search."""
        counters = self._counters
        began = time.monotonic()
        counters.num_searches += 1
        counters.num_in_flight += 1
        try:
            with tracing.span("retriever.search", {"leeway.top_k": top_k}):
                found = await self._retriever.search(query, top_k)
        except RetrievalError as error:
            counters.num_failed += 1
            counters.last_error = str(error)
            raise
        finally:
            counters.num_in_flight -= 1
            counters.search_s.observe(time.monotonic() - began)
        counters.last_success_at = time.time()
        return found

    async def close(self) -> None:
        """See Retriever.close."""
        await self._retriever.close()
