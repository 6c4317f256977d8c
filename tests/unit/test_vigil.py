"""What fails in the background is told: tasks, threads, callbacks; and how late the loop wakes."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from leeway.replay import loop_lag
from leeway.replay.errors import StoreUnavailable
from leeway.replay.vigil import Vigil


class Board:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.sections: dict[str, dict[str, Any]] = {}
        self.num_away = 0

    async def append_event(self, kind: str, text: str) -> None:
        self.events.append((kind, text))

    async def put(self, name: str, section: dict[str, Any]) -> None:
        if self.num_away:
            self.num_away -= 1
            raise StoreUnavailable("Redis is away")
        self.sections[name] = section


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
async def vigil(board: Board) -> AsyncIterator[Vigil]:
    kept = Vigil(board, "learner")  # type: ignore[arg-type]
    yield kept
    await kept.end()


async def told(board: Board) -> str:
    """The one event."""
    async with asyncio.timeout(60):
        while not board.events:
            await asyncio.sleep(0.01)
    ((kind, text),) = board.events
    assert kind == "fault"
    return text


async def fail() -> None:
    raise ValueError("no such thing")


async def test_a_task_that_fails_is_told(board: Board, vigil: Vigil):
    vigil.start(fail(), "copying events")
    assert await told(board) == "learner: copying events has ended: ValueError: no such thing"


async def test_a_task_that_ends_though_it_should_not_is_told(board: Board, vigil: Vigil):
    vigil.start(asyncio.sleep(0), "copying events")
    assert await told(board) == "learner: copying events has ended"


async def test_a_task_that_is_cancelled_was_asked_to_end(board: Board, vigil: Vigil):
    task = vigil.start(asyncio.sleep(60), "copying events")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.05)
    assert board.events == []


async def test_a_task_that_nobody_kept_is_told(board: Board, vigil: Vigil):
    task = asyncio.create_task(fail())
    await asyncio.wait({task})
    del task
    gc.collect()
    assert await told(board) == (
        "learner: Task exception was never retrieved: ValueError: no such thing"
    )


async def test_a_thread_that_fails_is_told(board: Board, vigil: Vigil):
    def work() -> None:
        raise ValueError("no such thing")

    threading.Thread(target=work, name="checkpoint").start()
    assert await told(board) == (
        "learner: the thread checkpoint has ended: ValueError: no such thing"
    )


async def test_a_callback_that_raises_is_told(board: Board, vigil: Vigil):
    def call() -> None:
        raise ValueError("no such thing")

    asyncio.get_running_loop().call_soon(call)
    assert "ValueError: no such thing" in await told(board)


async def test_a_loop_that_is_another_s_keeps_its_handlers(board: Board):
    loop, before = asyncio.get_running_loop(), threading.excepthook
    mine = lambda loop, context: None  # noqa: E731
    loop.set_exception_handler(mine)
    vigil = Vigil(board, "engine-1", owns_loop=False)  # type: ignore[arg-type]
    assert (loop.get_exception_handler(), threading.excepthook) == (mine, before)
    await vigil.end()
    assert (loop.get_exception_handler(), threading.excepthook) == (mine, before)


async def test_a_loop_that_was_blocked_for_half_a_second_says_so_also_behind_an_outage(
    board: Board, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loop_lag, "PUT_S", 0.2)
    board.num_away = 1
    vigil = Vigil(board, "serve")  # type: ignore[arg-type]
    await asyncio.sleep(0.05)
    time.sleep(0.5)
    async with asyncio.timeout(60):
        while "loop:serve" not in board.sections:
            await asyncio.sleep(0.02)
    await vigil.end()
    assert board.sections["loop:serve"]["lag_s"] > 0.2
    assert board.events == []
