"""Turns are worked on one at a time, and the event loop looks around between two of them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NewType

Ticket = NewType("Ticket", int)


class Turnstile:
    """Lets one task through in each pass of the event loop.

    An engine may answer hundreds of episodes at once. Their tasks would then all run in one pass of
    the loop: at 0.4 ms a turn, 1,024 of them keep timers, heartbeats and everybody else on the loop
    waiting for 0.4 s. Through the turnstile they run in as many passes, in the order they came.

        pass 1   a, b, c come: a goes on at once
        pass 2   timers and sockets, b
        pass 3   timers and sockets, c

    A task waits for those before it only, each of which works until it next awaits something. One
    that is cancelled while it waits is passed over. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._is_open = True
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._latest = Ticket(0)

    async def enter(self) -> Ticket:
        """Wait for a turn; the ticket is for `enter_again`."""
        if self._is_open:
            self._is_open = False
            asyncio.get_running_loop().call_soon(self._let_next)
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        self._latest = Ticket(self._latest + 1)
        return self._latest

    async def enter_again(self, ticket: Ticket) -> Ticket:
        """Wait for another turn if somebody has come through since; go on at once if not, as a task
        does that awaited something which was ready."""
        return ticket if ticket == self._latest else await self.enter()

    def _let_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                # The task runs in the next pass; so does this, behind it.
                asyncio.get_running_loop().call_soon(self._let_next)
                return
        self._is_open = True
