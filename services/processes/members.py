"""Who belongs to the crew of a run: a process that can be started any number of times, and watched.

Child processes end with a word on how. One that hangs does not end, so it gives signs of life.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from leeway.replay.server import EmbeddedRedis
from leeway.services import supervision
from leeway.services.supervision import Child, ChildDied

REDIS_LOOK_S: Final = 0.2
BEAT_LOOK_S: Final = 1.0


class Member(Protocol):
    """One process of the crew; it can be started any number of times."""

    name: str
    is_needed: bool
    """Whether the run cannot go on without it."""

    @property
    def pid(self) -> int | None: ...
    async def start(self) -> None: ...
    async def ended(self) -> ChildDied: ...
    async def stop(self) -> int | None: ...


class Pulse:
    """Signs of life of a process: a file that it touches (services/heartbeat.py).

    Nothing inside a process helps once its only thread waits for ever, as it does in the start of
    a thread for which there was no memory.
    """

    def __init__(self, file: Path, limit_s: float) -> None:
        """`limit_s`: the longest silence, of one whose longest so far is shorter than a quarter of
        it; else four times the longest so far."""
        self.file = file
        self._limit_s = limit_s
        self.begin()

    def begin(self) -> None:
        """Of a new process: until its first sign it starts, which may take longer."""
        self.file.unlink(missing_ok=True)
        self._mark: int | None = None
        self._since = time.monotonic()
        self._longest_s = 0.0

    def silence(self) -> str | None:
        """What there is to say of a silence that is too long; None while there is none."""
        now = time.monotonic()
        try:
            # Only compared with itself: the clocks of two processes need not agree.
            mark = self.file.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        if mark != self._mark:
            if self._mark is not None:
                self._longest_s = max(self._longest_s, now - self._since)
            self._mark, self._since = mark, now
            return None
        if now - self._since <= max(self._limit_s, 4 * self._longest_s):
            return None
        return (
            f"gave no sign of life for {now - self._since:,.0f} s "
            f"(supervision.silence_deadline_s = {self._limit_s:g})"
        )


class Command:
    """A process that `leeway NAME` starts."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        grace_s: float,
        is_needed: bool = True,
        pulse: Pulse | None = None,
    ) -> None:
        """`grace_s`: how long it may take to end after SIGTERM. `pulse`: its signs of life; it is
        killed when they stay away."""
        self.name = name
        self.is_needed = is_needed
        self._grace_s = grace_s
        self.arguments = [*arguments]
        """Behind `python -m`, at the next start."""
        self._log = log
        self._environment = environment
        self._pulse = pulse
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        """None before it was started."""
        return None if self._child is None else self._child.process.pid

    async def start(self) -> None:
        """Begin a new process; its output goes behind that of the one before."""
        if self._pulse is not None:
            self._pulse.begin()
        self._child = await supervision.start(
            self.name, self.arguments, self._log, self._environment
        )

    async def ended(self) -> ChildDied:
        """Returns when it is over, as an error that says how; one without a pulse is ended."""
        assert self._child is not None
        child, ended = self._child, asyncio.create_task(self._child.ended())
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=BEAT_LOOK_S)
                silence = self._pulse.silence() if self._pulse and not ended.done() else None
                if silence is not None:
                    await child.kill()
                    return ChildDied(f"the {self.name} process {silence}, so it was ended")
            return ended.result()
        finally:
            ended.cancel()

    async def stop(self) -> int | None:
        """SIGTERM, after `grace_s` SIGKILL; what it started ends with it. Returns its exit code,
        None where it never ran."""
        return None if self._child is None else await self._child.stop(self._grace_s)


class RedisMember:
    """The embedded Redis, already running."""

    name = "redis"
    is_needed = True

    def __init__(self, server: EmbeddedRedis) -> None:
        self._server = server

    @property
    def pid(self) -> int:
        """Of the process that runs, or ran last."""
        return self._server.pid

    @property
    def is_running(self) -> bool:
        """The process is alive."""
        return self._server.is_running

    async def start(self) -> None:
        """Again, in this thread: the kernel ends the server with the thread that started it."""
        self._server.start_again()

    async def ended(self) -> ChildDied:
        """Returns when it is over."""
        while self._server.is_running:
            await asyncio.sleep(REDIS_LOOK_S)
        return ChildDied(
            f"the embedded Redis ended; its log is {self._server.directory / 'redis.log'}"
        )

    async def stop(self) -> int | None:
        """Flush the append-only file and end."""
        await asyncio.to_thread(self._server.stop)
        return 0
