"""Long work of many callers in portions, so that the event loop sends what is done meanwhile."""

from __future__ import annotations

import asyncio


class Portions:
    """Each turn of the loop takes up no more work once `size` of it is done.

    Groups that end together are encoded one behind the other. Were it done in one turn, Redis
    would wait for the last of them before it saw the first.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._done = 0
        self._waiting: list[asyncio.Future[None]] = []

    async def turn(self) -> None:
        """Wait, in order, until this turn of the loop may take up more."""
        while self._done >= self._size:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    def spend(self, amount: int) -> None:
        """Work that was done in this turn, above 0."""
        if not self._done:
            asyncio.get_running_loop().call_soon(self._renew)
        self._done += amount

    def _renew(self) -> None:
        waiting, self._waiting, self._done = self._waiting, [], 0
        for future in waiting:
            if not future.done():
                future.set_result(None)
