"""The thread on which the learner's side of a transfer blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

from leeway.replay.errors import TransferError

GRACE_S = 5.0
"""A transfer ends itself at its deadline; so much later nobody waits for it any longer."""

_Order = tuple[Callable[[], Any], Future[Any]]


class Sender:
    """A thread for what blocks, that the end of this process does not wait for.

    It is started once: a thread that is started while memory is short may die before it says that
    it lives, and `Thread.start` then waits for ever, with the event loop. NCCL can hang where no
    deadline of its own reaches it; a thread that is late is left behind, and another takes over.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        Thread(target=_serve, args=[self._orders], name="leeway-publish", daemon=True).start()

    async def run(self, work: Callable[[], Any], timeout_s: float) -> Any:
        """The result of `work`. Raises TransferError GRACE_S after its own deadline."""
        done: Future[Any] = Future()
        self._orders.put((work, done))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), timeout_s + GRACE_S)
        except TimeoutError:
            self._replace()
            raise TransferError(f"nothing came of it within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            # The publish as a whole is late; the thread may be, too.
            self._replace()
            raise

    def _replace(self) -> None:
        self._orders.put(None)
        self._start()


def _serve(orders: SimpleQueue[_Order | None]) -> None:
    while (order := orders.get()) is not None:
        work, done = order
        # Whoever asked may have given up; a future that was cancelled takes no result.
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
        # They hold the weights that were sent, and must not until the next order comes.
        del order, work, done
