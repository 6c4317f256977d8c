"""The buffer for callers without an event loop: notebooks, plain threads, scripts.

    caller's thread ── coroutine ─> loop thread: the asyncio store ── result or error ─> caller

One daemon thread runs one event loop; every store is used in it alone. A caller waits for its own
call, so a draw of one thread is woken by an add of another. Ctrl-C in a waiting caller cancels its
call; `close` ends every waiting call with StoreError.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

from leeway.replay.config import ReplayConfig
from leeway.replay.errors import StoreError
from leeway.replay.schema import Group, GroupId, PolicyVersion
from leeway.replay.sharded_store import connect_replay
from leeway.replay.store import Lease, Replay, ReplayStats, Slot, VersionSource

T = TypeVar("T")

PlainSource = Callable[[], PolicyVersion | None]
"""As VersionSource, an ordinary function. It is called in a thread of its own."""

END_TIMEOUT_S: Final = 10.0
"""How long a call that was cancelled may take to end, and the store to close."""


class BlockingReplay:
    """The operations of Replay under the same names, deadlines and errors, without asyncio.

    Any number of threads may share one. A call from a thread whose event loop is running raises
    StoreError, since it would stop that loop: use the asyncio store there. After `close` every call
    raises StoreError.
    """

    def __init__(self, replay: Replay) -> None:
        """Wrap a store that was not used before; from here on it belongs to the loop thread.

        One that must be made inside an event loop is made by `connect`.
        """
        self._start()
        self._replay = replay

    @classmethod
    def connect(cls, url: str, run: str, config: ReplayConfig, retry_s: float = 30.0) -> Self:
        """The buffer of `run` in the Redis at `url`. Raises ConfigurationError for a bad URL."""

        async def build() -> Replay:
            return connect_replay(url, run, config, retry_s)

        blocking = cls.__new__(cls)
        blocking._start()
        try:
            blocking._replay = blocking._call(build)
        except BaseException:
            blocking._end_loop()
            raise
        return blocking

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def admit(self, n: int, version: PolicyVersion | PlainSource, timeout_s: float) -> list[Slot]:
        """See Replay. A version source is an ordinary function here."""
        source = _awaited(version) if callable(version) else version
        return self._call(lambda: self._replay.admit(n, source, timeout_s))

    def add(self, slot: Slot, group: Group) -> None:
        """See Replay."""
        self._call(lambda: self._replay.add(slot, group))

    def drop(self, slot: Slot, reason: str) -> None:
        """See Replay."""
        self._call(lambda: self._replay.drop(slot, reason))

    def draw(self, timeout_s: float) -> Lease:
        """See Replay."""
        return self._call(lambda: self._replay.draw(timeout_s))

    def acknowledge(self, lease: Lease, version: PolicyVersion) -> None:
        """See Replay."""
        self._call(lambda: self._replay.acknowledge(lease, version))

    def release(self, lease: Lease) -> None:
        """See Replay."""
        self._call(lambda: self._replay.release(lease))

    def update_priorities(self, priorities: Mapping[str, float]) -> int:
        """See Replay."""
        return self._call(lambda: self._replay.update_priorities(priorities))

    def restore_version(self, version: PolicyVersion) -> int:
        """See Replay."""
        return self._call(lambda: self._replay.restore_version(version))

    def pause_admission(self, paused: bool) -> None:
        """See Replay."""
        self._call(lambda: self._replay.pause_admission(paused))

    def stats(self) -> ReplayStats:
        """See Replay."""
        return self._call(lambda: self._replay.stats())

    def group_ids(self) -> list[GroupId]:
        """See Replay."""
        return self._call(lambda: self._replay.group_ids())

    def close(self) -> None:
        """See Replay. Calls that wait raise StoreError; a second close does nothing."""
        _check_no_loop()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        try:
            ending.result()
        finally:
            self._end_loop()

    # ---- the loop thread

    def _start(self) -> None:
        self._lock = threading.Lock()
        """Between a call that comes and `close`: no call is started behind it."""
        self._is_closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="leeway-replay", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_the_rest())
        self._loop.close()

    def _call(self, operation: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `operation`, run in the loop thread."""
        _check_no_loop()
        future: concurrent.futures.Future[T] | None = None
        try:
            with self._lock:
                if self._is_closed:
                    raise StoreError("this buffer was closed; connect anew")
                future = asyncio.run_coroutine_threadsafe(self._noted(operation), self._loop)
            return future.result()
        except concurrent.futures.CancelledError:
            raise StoreError("the buffer was closed while this call waited for it") from None
        except BaseException:  # KeyboardInterrupt above all: nobody waits for the call any more
            if future is not None:
                future.cancel()
            raise

    async def _noted(self, operation: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await operation()
        finally:
            self._tasks.discard(task)

    async def _end(self) -> None:
        """Cancel every call, and close the store when they have ended."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_TIMEOUT_S)
        await self._replay.close()

    def _end_loop(self) -> None:
        with suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_TIMEOUT_S)


async def _cancel_the_rest() -> None:
    """Whatever still waits must hear of the end, or its caller would wait for ever."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _check_no_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise StoreError(
        "a blocking call would stop the event loop that runs in this thread; use RedisReplay or "
        "MemoryReplay with await, or call from another thread"
    )


def _awaited(source: PlainSource) -> VersionSource:
    async def ask() -> PolicyVersion | None:
        return await asyncio.to_thread(source)

    return ask
