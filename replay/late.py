"""Calls whose callers had to go before Redis answered.

A caller leaves at its deadline; what it asked may have been granted, or may yet be: slots or a
lease that nobody knows of would be held until they expire. So it is asked once more, under the ids
that it had, for as long as a call is tried, and the answer is for the next caller. What may have
run out by then is for nobody: its groups may be another's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, NamedTuple, TypeVar, cast

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


class Given(NamedTuple, Generic[Granted]):
    """What was granted, and since when at the earliest."""

    granted: Granted
    asked_s: float
    """When it was first asked for; `time.monotonic`."""


class _Asked(NamedTuple, Generic[Granted, Refused]):
    answer: asyncio.Future[Granted | Refused]
    asked_s: float


class Late(Generic[Granted, Refused]):
    """Callers of one process that ask for the same."""

    def __init__(
        self,
        link: Link,
        refused: type[Refused],
        lives_s: float,
        undo: Callable[[Granted], Awaitable[None]],
    ) -> None:
        """What is granted runs out after `lives_s` seconds; `undo` gives it back."""
        self._url = link.url
        self._refused = refused
        self._lives_s = lives_s
        self._undo = undo
        self._left: list[_Asked[Granted, Refused]] = []

    async def ask(
        self, new_call: Callable[[], Callable[[], Awaitable[Granted | Refused]]], wait: Wait
    ) -> Given[Granted] | Refused:
        """The outcome of a new call, or what another caller was granted behind its deadline.

        A call asks under the same ids each time, so it is granted once. Raises NoAnswer ANSWER_S
        after the deadline of `wait`, and behind it where what was granted may have run out before
        it was here.
        """
        while True:
            while self._left:
                asked = self._left.pop(0)
                outcome = await self._take(asked, wait)
                if outcome is None or isinstance(outcome, self._refused):
                    continue
                if not self._may_have_run_out(asked.asked_s):
                    return Given(outcome, asked.asked_s)
                await self._undo(outcome)
            call, asked_s = new_call(), time.monotonic()
            try:
                # No task for each call: they are many, and it would cost a sixth of an admission.
                async with asyncio.timeout(wait.left_s + ANSWER_S):
                    outcome = await call()
            except TimeoutError:
                self._ask_again(call, asked_s)
                raise self._silence(wait) from None
            except asyncio.CancelledError:
                self._ask_again(call, asked_s)
                raise
            if isinstance(outcome, self._refused):
                return outcome
            if not self._may_have_run_out(asked_s):
                return Given(outcome, asked_s)
            await self._undo(outcome)
            if wait.is_over:
                raise NoAnswer(
                    f"Redis at {address(self._url)} took longer to answer than the "
                    f"{self._lives_s:g} s for which it grants a slot or a lease; waiting for it to "
                    "be faster, or set replay.slot_timeout_s and replay.lease_timeout_s higher"
                )

    def _may_have_run_out(self, asked_s: float) -> bool:
        """Nobody knows when between question and answer it was granted."""
        return time.monotonic() - asked_s >= self._lives_s

    def keep(self, given: Given[Granted]) -> None:
        """For the next caller: more was granted than this one asked for."""
        answer: asyncio.Future[Granted | Refused] = asyncio.get_running_loop().create_future()
        answer.set_result(given.granted)
        self._left.append(_Asked(answer, given.asked_s))

    async def close(self) -> list[Granted]:
        """End what is under way; what was granted and nobody came for."""
        left, self._left = [asked.answer for asked in self._left], []
        if left:
            await asyncio.wait(left, timeout=CLOSE_S)
        for answer in left:
            answer.cancel()
        outcomes = await asyncio.gather(*left, return_exceptions=True)
        refused = (self._refused, BaseException)
        return cast(list[Granted], [one for one in outcomes if not isinstance(one, refused)])

    def _ask_again(self, call: Callable[[], Awaitable[Granted | Refused]], asked_s: float) -> None:
        answer = asyncio.ensure_future(call())
        self._left.append(_Asked(answer, asked_s))
        # An error that nobody comes for is no fault in the background: the callers were told.
        answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())

    async def _take(self, asked: _Asked[Granted, Refused], wait: Wait) -> Granted | Refused | None:
        """What an earlier caller asked for; None where that has failed before."""
        answer = asked.answer
        if answer.done() and (answer.cancelled() or answer.exception()):
            return None
        try:
            await asyncio.wait({answer}, timeout=wait.left_s + ANSWER_S)
        except BaseException:
            self._left.append(asked)
            raise
        if not answer.done():
            self._left.append(asked)
            raise self._silence(wait)
        return answer.result()

    def _silence(self, wait: Wait) -> NoAnswer:
        return NoAnswer(
            f"no answer from Redis at {address(self._url)} in {wait.elapsed_s:.1f} s; waiting "
            "for it to run and be reachable"
        )
