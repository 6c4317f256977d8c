"""A proxy between the processes that are killed and Redis: it knows what a call has reached.

    process ── its own port ──> Between ──> Redis

One `Aim` at a time makes it stand still at a chosen place of a call; the process, or Redis, is then
killed there. It runs in a process of its own: a fork of the tests' would keep its connections open.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import re
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Literal, NamedTuple

from leeway.replay.connection import ScriptSet

FORK: Final = multiprocessing.get_context("fork")
"""A new interpreter would take a second; a copy of this one has everything imported."""
PR_SET_PDEATHSIG: Final = 1

Place = Literal["request", "reply", "payloads", "script"]
"""Where a call stands still: half of the request has reached Redis; its script has run and nobody
knows; the lease is known and its payloads are not read; the script has written some of its keys."""

RAN: Final = {
    "add": re.compile(rb"\r\nadded\r\n"),
    "draw": re.compile(rb"ramp_version"),
    "acknowledge": re.compile(rb"(\+|\r\n)ok\r\n"),
}
"""What the reply of each script holds when it did what it is for."""
NAME: Final = {
    "add": re.compile(rb"payload:([0-9a-f]{32})"),
    "draw": re.compile(rb"lease_id\xd9\x20([0-9a-f]{32})"),
    "acknowledge": re.compile(rb"lease_id\xd9\x20([0-9a-f]{32})"),
}
"""The group or lease that a request is about."""
GET: Final = b"$3\r\nGET\r\n"


class Aim(NamedTuple):
    """Where to stand still."""

    script: str
    place: Place
    process: str | None = None
    """None: whoever calls the script next."""
    part: float = 0.0
    """How much of the request passes, at place "request"."""
    sha: str = ""
    """Of the script that takes the place of the one called, at place "script"."""
    lease: str = ""
    """Known by now, at place "payloads"."""


class Landed(NamedTuple):
    """A call that stands still."""

    script: str
    place: Place
    name: str
    """The group's or lease's id."""


def sha_of(script: str) -> str:
    """The name by which Redis knows a script of the buffer."""
    scripts: Any = ScriptSet(None, "", is_of_buffer=True)  # type: ignore[arg-type]
    return scripts._script(script)[1]


@dataclass
class Call:
    """One that is aimed at: its reply is kept until it is clear what it says."""

    aim: Aim
    name: str
    kept: bytes = b""

    @property
    def has_run(self) -> bool | None:
        """Whether the script did what it is for; None: the reply is not whole."""
        if self.aim.place == "payloads" and self.aim.lease:
            return True
        if RAN[self.aim.script].search(self.kept):
            return True
        # An add's first reply is that of SET, which can come alone.
        is_whole = self.kept.endswith(b"\r\n") and self.kept not in (b"+OK\r\n", b"$-1\r\n")
        return False if is_whole else None


class Between:
    """The proxy's own process."""

    def __init__(self, redis_port: int, pipe: Connection) -> None:
        self._redis_port = redis_port
        self._pipe = pipe
        self._aim: Aim | None = None
        self._shas = {script: sha_of(script).encode() for script in RAN}
        self._seen: set[tuple[str, str]] = set()
        self._servers: dict[str, asyncio.Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the other end of the pipe is gone."""
        end = asyncio.Event()

        def on_order() -> None:
            try:
                order = self._pipe.recv()
            except EOFError:
                return end.set()
            task = asyncio.create_task(self._follow(*order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        asyncio.get_running_loop().add_reader(self._pipe.fileno(), on_order)
        await end.wait()

    async def _follow(self, verb: str, argument: Any) -> None:
        if verb == "aim":
            self._aim = argument
        elif verb == "close":
            self._servers.pop(argument).close()
        else:
            server = await asyncio.start_server(
                lambda r, w: self._carry(argument, r, w), "127.0.0.1", 0
            )
            self._servers[argument] = server
            self._pipe.send(server.sockets[0].getsockname()[1])

    async def _carry(
        self, process: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            from_redis, to_redis = await asyncio.open_connection("127.0.0.1", self._redis_port)
        except OSError:
            return writer.close()
        line = Line(self, process, from_redis, writer)
        replies = asyncio.create_task(line.carry_replies())
        try:
            while data := await reader.read(2**20):
                to_redis.write(line.on_request(data))
        except OSError:
            pass  # it was killed, or Redis was
        to_redis.close()
        replies.cancel() if line.stands_still else await replies

    def take_aim(self, process: str, data: bytes) -> Call | None:
        """The call that `data` holds, if it is aimed at. Nobody else is until it missed."""
        called = self._called(data)
        is_new = called is not None and called not in self._seen
        self._seen |= {called} if called else set()
        aim = self._aim
        if aim is None or aim.process not in (None, process):
            return None
        if aim.lease:
            name = aim.lease if GET in data else None
        else:
            name = called[1] if called and called[0] == aim.script else None
        # What is sent again may have happened before, whatever becomes of this request.
        if name is None or (aim.place == "request" and not is_new):
            return None
        self._aim = None
        return Call(aim, name)

    def _called(self, data: bytes) -> tuple[str, str] | None:
        """The script that a request calls, and the group or lease that it is about."""
        for script, sha in self._shas.items():
            found = NAME[script].search(data) if sha in data else None
            if found:
                return script, found[1].decode()
        return None

    def altered(self, aim: Aim, data: bytes) -> bytes:
        """The request with the script of the aim in place of the one it names."""
        return data.replace(self._shas[aim.script], aim.sha.encode())

    def take_back(self, call: Call) -> None:
        """The call missed: the next one is aimed at."""
        self._aim = call.aim

    def aim_at_payloads(self, call: Call) -> None:
        """The lease is known: what reads it is aimed at."""
        self._aim = call.aim._replace(lease=call.name)

    def report(self, call: Call) -> None:
        self._pipe.send(Landed(call.aim.script, call.aim.place, call.name))


class Line:
    """One connection."""

    def __init__(
        self,
        between: Between,
        process: str,
        from_redis: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._between = between
        self._process = process
        self._from_redis = from_redis
        self._writer = writer
        self._call: Call | None = None
        self.stands_still = False

    def on_request(self, data: bytes) -> bytes:
        """What of it goes on to Redis."""
        if self.stands_still:
            return b""
        call = self._between.take_aim(self._process, data)
        if call is None:
            return data
        if call.aim.place == "request":
            self._stand_still(call)
            return data[: int(len(data) * call.aim.part)]
        self._call = call
        return self._between.altered(call.aim, data) if call.aim.place == "script" else data

    async def carry_replies(self) -> None:
        try:
            while data := await self._from_redis.read(2**16):
                if not self.stands_still:
                    self._writer.write(self._on_reply(data))
        except OSError:
            pass
        self._writer.close()

    def _on_reply(self, data: bytes) -> bytes:
        """What of it goes on to the process."""
        call = self._call
        if call is None:
            return data
        call.kept += data
        has_run = call.has_run
        if has_run is None:
            return b""
        self._call = None
        if not has_run or call.aim.place == "script":
            self._between.take_back(call)
        elif call.aim.place == "payloads" and not call.aim.lease:
            self._between.aim_at_payloads(call)
        else:
            self._stand_still(call)
            return b""
        return call.kept

    def _stand_still(self, call: Call) -> None:
        self.stands_still = True
        self._between.report(call)


class BetweenProcess:
    """The proxy as its user has it."""

    def __init__(self, redis_port: int) -> None:
        self._pipe, other = FORK.Pipe()
        self._process = FORK.Process(
            target=_serve, args=(redis_port, other, self._pipe), name="between", daemon=True
        )
        self._process.start()
        other.close()

    def open(self, process: str) -> int:
        """A port for this process."""
        self._pipe.send(("open", process))
        assert self._pipe.poll(10), "the proxy does not answer"
        return self._pipe.recv()

    def close(self, process: str) -> None:
        """It is gone."""
        self._pipe.send(("close", process))

    def aim(self, aim: Aim | None) -> None:
        """None: let everything pass."""
        self._pipe.send(("aim", aim))

    def landed(self, timeout_s: float) -> Landed | None:
        """The call that stands still; None if there is none within the time."""
        return self._pipe.recv() if self._pipe.poll(timeout_s) else None

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(redis_port: int, pipe: Connection, other: Connection) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    other.close()
    asyncio.run(Between(redis_port, pipe).run())
