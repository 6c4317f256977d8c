"""Waiting for a Redis stream to grow, without polling and without losing a wake-up.

    seen = wakeups.seen          # before trying
    ... try, and fail ...
    await wakeups.wait(seen, t)  # returns at once if anything was signalled since

However many callers wait, one read is in flight: a task that blocks in XREAD for at most BLOCK_MS
and ends by itself. The waiters start the next one.
"""

from __future__ import annotations

import asyncio

from leeway.replay.connection import BLOCK_MS, Link, stream_entries


class Wakeups:
    """One stream, shared by the waiters of one process."""

    def __init__(self, link: Link, stream: str) -> None:
        self._link = link
        self._stream = stream
        self._last_id = "0-0"  # the first wait returns at once if the stream was ever written
        self._reader: asyncio.Task[None] | None = None

    @property
    def seen(self) -> str:
        """The id of the last entry read; take it before trying what may have to wait."""
        return self._last_id

    async def wait(self, seen: str, timeout_s: float) -> None:
        """Return when the stream has entries after `seen`, or after `timeout_s`, or a little early.

        Callers try again whenever it returns, so an early return costs one try.
        """
        if self._last_id != seen or timeout_s <= 0:
            return
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        done, _ = await asyncio.wait({self._reader}, timeout=timeout_s)
        for task in done:
            task.result()

    async def close(self) -> None:
        """End the read in flight."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        reply = await self._link.call(
            lambda: self._link.client.xread({self._stream: self._last_id}, block=BLOCK_MS)
        )
        entries = stream_entries(reply)
        if entries:
            self._last_id = entries[-1][0].decode()
