"""Calls of one turn of the event loop, done together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batches(Generic[Item, Result]):
    """Gathers what is called in one turn of the loop, and hands it to `run` in one list."""

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Awaitable[Sequence[Result | Exception]]],
        max_weight: int,
        max_items: int,
    ) -> None:
        """`run` gives one result an item, an exception being raised to the item's caller; a batch
        ends with `max_items` of them, or `max_weight` of whatever their callers weigh them by.
        """
        self._run = run
        self._max_weight = max_weight
        self._max_items = max_items
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._weight = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def call(self, item: Item, weight: int) -> asyncio.Future[Result]:
        """The item's own result to come; an error of the batch is raised to each of its callers."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append((item, future))
        self._weight += weight
        if self._weight >= self._max_weight or len(self._waiting) >= self._max_items:
            self._flush()
        return future

    def _flush(self) -> None:
        waiting, self._waiting, self._weight = self._waiting, [], 0
        batch = [(item, future) for item, future in waiting if not future.done()]
        if batch:
            task = asyncio.create_task(self._finish(batch))
            self._tasks.add(task)  # the loop holds tasks weakly
            task.add_done_callback(self._tasks.discard)

    async def _finish(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._run([item for item, _ in batch])
        except BaseException as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        # A caller that was cancelled since waits no longer; its item went in all the same.
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
