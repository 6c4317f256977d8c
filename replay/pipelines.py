"""Commands of many callers, sent together.

    submit -> queue -> one turn of the event loop later: a pipeline of everything queued
           -> one connection -> replies in order -> each caller's future

A caller waits for its own future; the task that carries its pipeline settles it. At most
MAX_PIPELINES are under way: while they are, the queue grows and the next pipeline takes more. The
silence that counts as a lost connection bounds each of them, so the queue moves.

Payloads go over several connections at a time. A single one that streams megabytes is read by Redis
in pieces as they come, with a look at everything else, a write of its file and a sleep between two
of them, which costs its one core more than the commands do.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, cast

Command = tuple[str | bytes | int | float, ...]
"""A Redis command in its words: ("SET", key, payload, "NX", "PX", 1000)"""

Packed = list[bytes | memoryview]
"""Commands as they go over the wire."""

MAX_PIPELINES: Final = 8
"""Pipelines of one process to one run that are under way at once, each on its connection."""

MAX_PIPELINE_COMMANDS: Final = 256
"""Commands of one pipeline, unless one call has more."""

MAX_PIPELINE_BYTES: Final = 2**19
"""Bytes of the commands of one pipeline, unless one call has more."""


class PipelineCall:
    """The commands of one caller, and what it waits for."""

    __slots__ = ("commands", "is_alone", "num_bytes", "packed", "result")

    def __init__(
        self,
        commands: Sequence[Command],
        packed: Packed,
        result: asyncio.Future[list[Any]],
        is_alone: bool = False,
    ) -> None:
        self.commands = commands
        self.packed = packed
        """As they go over the wire."""
        self.num_bytes = sum(map(len, packed))
        self.is_alone = is_alone
        """Its replies are large: no other call goes in its pipeline."""
        self.result = result

    def settle(self, replies: list[Any]) -> None:
        """Hand the replies over, or the first error among them."""
        if self.result.done():  # cancelled
            return
        for i, reply in enumerate(replies):
            if type(reply) is memoryview:
                if self.commands[i][0] != "GET":
                    replies[i] = bytes(reply)
            elif isinstance(reply, list):
                # The replies of a transaction come within that of EXEC.
                is_transaction = self.commands[i][0] == "EXEC"
                refused = _first_error(cast("list[Any]", reply)) if is_transaction else None
                if refused is not None:
                    return self.result.set_exception(refused)
            elif isinstance(reply, Exception):
                return self.result.set_exception(reply)
        self.result.set_result(replies)

    def fail(self, error: BaseException) -> None:
        """Raise `error` at the caller, unless it has its replies."""
        if not self.result.done():
            self.result.set_exception(error)


def _first_error(replies: list[Any]) -> Exception | None:
    return next((reply for reply in replies if isinstance(reply, Exception)), None)


Carry = Callable[[list[PipelineCall]], Awaitable[None]]
"""Sends the calls as one pipeline and settles each; what it raises, the others get."""


class Pipelines:
    """The queue of one event loop."""

    def __init__(self, carry: Carry) -> None:
        self._carry = carry
        self._queue: deque[PipelineCall] = deque()
        self._under_way: set[asyncio.Task[None]] = set()
        self._is_flush_due = False
        self._end: Exception | None = None

    def submit(
        self, commands: Sequence[Command], packed: Packed, is_alone: bool = False
    ) -> asyncio.Future[list[Any]]:
        """The replies to come. Cancelling it takes commands back only if they were not sent."""
        if self._end is not None:
            raise self._end
        result: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._queue.append(PipelineCall(commands, packed, result, is_alone))
        self._flush_soon()
        return result

    async def close(self, error: Exception) -> None:
        """End what is under way. Its callers, those queued and later ones get `error`."""
        self._end = error
        while self._queue:
            self._queue.popleft().fail(error)
        tasks = [*self._under_way]
        for task in tasks:
            task.cancel()
        # redis sends with asyncio.wait_for, which in Python 3.11 can lose a cancellation.
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        while self._queue and len(self._under_way) < MAX_PIPELINES:
            calls = self._take()
            if calls:
                task = asyncio.create_task(self._send(calls))
                self._under_way.add(task)
                task.add_done_callback(self._on_end)

    def _take(self) -> list[PipelineCall]:
        """The next calls, as many as one pipeline may hold."""
        calls: list[PipelineCall] = []
        num_commands = num_bytes = 0
        while self._queue:
            call = self._queue[0]
            num_commands += len(call.commands)
            num_bytes += call.num_bytes
            is_full = num_commands > MAX_PIPELINE_COMMANDS or num_bytes > MAX_PIPELINE_BYTES
            if calls and (is_full or call.is_alone or calls[-1].is_alone):
                break
            self._queue.popleft()
            if not call.result.done():  # else it was cancelled before it was sent
                calls.append(call)
        return calls

    async def _send(self, calls: list[PipelineCall]) -> None:
        try:
            await self._carry(calls)
        except Exception as error:  # an event of the callers, who translate it
            for call in calls:
                call.fail(error)
        finally:
            if self._end is not None:
                for call in calls:
                    call.fail(self._end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if self._queue:
            self._flush_soon()
