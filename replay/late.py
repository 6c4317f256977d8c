"""Calls whose callers had to go before Redis answered.

A caller leaves at its deadline; what it asked is under way, and may yet be granted: slots or a
lease that nobody knows of would be held until they expire. So the call goes on, as long as it is
tried at all, and the next caller waits for its answer instead of asking anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar, cast

from leeway.replay.connection import Link, address
from leeway.replay.errors import NoAnswer
from leeway.replay.waiting import Refusal, Shortage, Wait

ANSWER_S: Final = 2.0
"""How long beyond the deadline of its caller Redis may take to answer. A caller that will not wait
for room or groups asks once all the same, and a disk that writes may hold the answer up."""

Granted = TypeVar("Granted")
Refused = TypeVar("Refused", Refusal, Shortage)


class Late(Generic[Granted, Refused]):
    """Callers of one process that ask for the same."""

    def __init__(self, link: Link, refused: type[Refused]) -> None:
        self._url = link.url
        self._refused = refused
        self._left: list[asyncio.Future[Granted | Refused]] = []

    async def ask(
        self, call: Callable[[], Awaitable[Granted | Refused]], wait: Wait
    ) -> Granted | Refused:
        """The outcome of `call`, or what another caller was granted behind its deadline.

        Raises NoAnswer ANSWER_S after the deadline of `wait`.
        """
        while self._left:
            late = self._left.pop(0)
            if late.done() and (late.cancelled() or late.exception()):
                continue  # so it was then
            outcome = await self._outcome(late, wait)
            if not isinstance(outcome, self._refused):
                return outcome
        return await self._outcome(asyncio.ensure_future(call()), wait)

    def keep(self, granted: Granted) -> None:
        """For the next caller: more was granted than this one asked for."""
        late: asyncio.Future[Granted | Refused] = asyncio.get_running_loop().create_future()
        late.set_result(granted)
        self._left.append(late)

    async def close(self) -> list[Granted]:
        """End what is under way; what was granted and nobody came for."""
        left, self._left = self._left, []
        for late in left:
            late.cancel()
        outcomes = await asyncio.gather(*left, return_exceptions=True)
        refused = (self._refused, BaseException)
        return cast(list[Granted], [one for one in outcomes if not isinstance(one, refused)])

    async def _outcome(
        self, call: asyncio.Future[Granted | Refused], wait: Wait
    ) -> Granted | Refused:
        try:
            await asyncio.wait({call}, timeout=wait.left_s + ANSWER_S)
        except BaseException:
            self._leave(call)
            raise
        if not call.done():
            self._leave(call)
            raise NoAnswer(
                f"no answer from Redis at {address(self._url)} in {wait.elapsed_s:.1f} s; waiting "
                "for it to run and be reachable"
            )
        return call.result()

    def _leave(self, call: asyncio.Future[Granted | Refused]) -> None:
        self._left.append(call)
        # An error that nobody comes for is no fault in the background: the callers were told.
        call.add_done_callback(lambda late: late.cancelled() or late.exception())
