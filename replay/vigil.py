"""What goes wrong in the background of a process is said: in its log, and as an event of the run.

A task that fails while nobody awaits it, a thread that ends by an exception, and a callback that
raises are silent in Python, or one line of a log. A process that keeps a vigil tells the run of
each, and how late its event loop wakes (loop_lag.py).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from leeway.replay.errors import LeewayError
from leeway.replay.loop_lag import report_lag
from leeway.replay.run_board import RunBoard

log = logging.getLogger(__name__)

T = TypeVar("T")
KIND: Final = "fault"
"""Of the events."""


class Vigil:
    """Of one process and its event loop; made inside the loop. `end` before the board is closed."""

    def __init__(self, board: RunBoard, process: str, *, owns_loop: bool = True) -> None:
        """`process` is what events and the section `loop:...` call it. Where the loop is another's,
        as in a Serve replica, only tasks started here are heard of."""
        self._board = board
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._telling: set[asyncio.Task[None]] = set()
        self._threads_before = threading.excepthook
        self._owns_loop = owns_loop
        if owns_loop:
            self._loop.set_exception_handler(self._on_callback)
            threading.excepthook = self._on_thread
        self._lag = self.start(report_lag(board, process), "measuring its event loop")

    def start(self, work: Coroutine[Any, Any, T], what: str) -> asyncio.Task[T]:
        """A task for `work` that is to last as long as its owner; its end by itself is told."""
        task = asyncio.create_task(work, name=what)
        task.add_done_callback(self._on_end)
        return task

    async def end(self) -> None:
        """Hear no more."""
        if self._owns_loop:
            self._loop.set_exception_handler(None)
            threading.excepthook = self._threads_before
        self._lag.cancel()
        await asyncio.gather(self._lag, *self._telling, return_exceptions=True)

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        self._say(f"{task.get_name()} has ended{_why(error)}", error)

    def _on_callback(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._say(f"{context['message']}{_why(error)}", error)

    def _on_thread(self, arguments: threading.ExceptHookArgs) -> None:
        name = arguments.thread.name if arguments.thread else "of which nothing is known"
        error = arguments.exc_value
        self._loop.call_soon_threadsafe(
            self._say, f"the thread {name} has ended{_why(error)}", error
        )

    def _say(self, sentence: str, error: BaseException | None) -> None:
        log.error("%s", sentence, exc_info=error)
        if self._loop.is_closed():
            return
        telling = self._loop.create_task(self._tell(f"{self._process}: {sentence}"))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _tell(self, sentence: str) -> None:
        try:
            await self._board.append_event(KIND, sentence)
        except LeewayError as error:
            log.error("the run could not be told: %s", error)


def _why(error: BaseException | None) -> str:
    return "" if error is None else f": {type(error).__name__}: {error}"
