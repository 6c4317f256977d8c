"""Calls whose callers had to go before Redis answered.

A caller leaves at its deadline; what it asked may have been granted, or may yet be: slots or a
lease that nobody knows of would be held until they expire. So it is asked once more, under the ids
that it had, for as long as a call is tried, and the answer is for the next caller.
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
CLOSE_S: Final = 1.0
"""How long what is still asked may take when the store closes."""

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

        `call` asks under the same ids each time, so it is granted once. Raises NoAnswer ANSWER_S
        after the deadline of `wait`.
        """
        while self._left:
            outcome = await self._take(self._left.pop(0), wait)
            if outcome is not None and not isinstance(outcome, self._refused):
                return outcome
        try:
            # No task for each call: they are many, and it would cost a sixth of an admission.
            async with asyncio.timeout(wait.left_s + ANSWER_S):
                return await call()
        except TimeoutError:
            self._ask_again(call)
            raise self._silence(wait) from None
        except asyncio.CancelledError:
            self._ask_again(call)
            raise

    def keep(self, granted: Granted) -> None:
        """For the next caller: more was granted than this one asked for."""
        late: asyncio.Future[Granted | Refused] = asyncio.get_running_loop().create_future()
        late.set_result(granted)
        self._left.append(late)

    async def close(self) -> list[Granted]:
        """End what is under way; what was granted and nobody came for."""
        left, self._left = self._left, []
        if left:
            await asyncio.wait(left, timeout=CLOSE_S)
        for late in left:
            late.cancel()
        outcomes = await asyncio.gather(*left, return_exceptions=True)
        refused = (self._refused, BaseException)
        return cast(list[Granted], [one for one in outcomes if not isinstance(one, refused)])

    def _ask_again(self, call: Callable[[], Awaitable[Granted | Refused]]) -> None:
        late = asyncio.ensure_future(call())
        self._left.append(late)
        # An error that nobody comes for is no fault in the background: the callers were told.
        late.add_done_callback(lambda late: late.cancelled() or late.exception())

    async def _take(
        self, late: asyncio.Future[Granted | Refused], wait: Wait
    ) -> Granted | Refused | None:
        """What an earlier caller asked for; None where that has failed before."""
        if late.done() and (late.cancelled() or late.exception()):
            return None
        try:
            await asyncio.wait({late}, timeout=wait.left_s + ANSWER_S)
        except BaseException:
            self._left.append(late)
            raise
        if not late.done():
            self._left.append(late)
            raise self._silence(wait)
        return late.result()

    def _silence(self, wait: Wait) -> NoAnswer:
        return NoAnswer(
            f"no answer from Redis at {address(self._url)} in {wait.elapsed_s:.1f} s; waiting "
            "for it to run and be reachable"
        )
