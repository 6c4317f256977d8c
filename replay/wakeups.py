"""Waiting for a Redis stream to grow, without polling and without losing a wake-up.

    ... try, and be refused, with the id of the last signal before that
    await wakeups.wait(signal, t)  # returns at once if anything was signalled since

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
        self._last = (0, 0)
        self._reader: asyncio.Task[None] | None = None

    @property
    def heard(self) -> str:
        """The id of the last entry read. For who has no other signal: take it before the try."""
        return f"{self._last[0]}-{self._last[1]}"

    def is_last(self, signal: str) -> bool:
        """Whether somebody listens, and nothing was heard after `signal`.

        What is signalled from now on will then be heard.
        """
        is_listening = self._reader is not None and not self._reader.done()
        return is_listening and self._last <= number_of(signal)

    async def wait(self, signal: str, timeout_s: float) -> None:
        """Return when the stream has entries after `signal`, or after `timeout_s`, or a little
        early.

        Callers try again whenever it returns, so an early return costs one try.
        """
        if self._last > number_of(signal) or timeout_s <= 0:
            return
        if self._reader is None or self._reader.done():
            self._last = number_of(signal)
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
        after = self.heard
        reply = await self._link.call(
            lambda: self._link.client.xread({self._stream: after}, block=BLOCK_MS)
        )
        entries = stream_entries(reply)
        if entries:
            self._last = number_of(entries[-1][0].decode())


def number_of(signal: str) -> tuple[int, int]:
    """The id of an entry, "1764288000000-2", in the order of time."""
    milliseconds, _, sequence = signal.partition("-")
    return int(milliseconds), int(sequence)
