"""Replies of Redis read where they are wanted: a parser for the connections of the redis library.

The library connects, authenticates and sends; what comes back is read here, because its own reader
copies each reply several times, and a group is a large one. A large text is received into the very
buffer that is handed out.

    socket ──> small buffer ──> replies (numbers, short texts, lists, errors)
       └─────> a buffer of its own for the rest of a text of LARGE_BYTES or more

It needs a transport of asyncio, whose protocol it takes over; TLS, Unix sockets and TCP have one.
"""

# redis-py leaves much of its inside untyped, and a parser is given the connection itself.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, Final

import numpy as np
from redis._parsers import BaseParser
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError, DataError, InvalidResponse, TimeoutError

SMALL_BYTES: Final = 1 << 13
"""Of the buffer that headers and short replies are read from. The start of a large text lands in
it too and is copied, so it is not larger."""

LARGE_BYTES: Final = 1 << 12
"""A text of this size that has not come whole is read into a buffer of its own."""

MAX_ROW_BYTES: Final = 1 << 20
"""Of large texts read in one turn of the event loop, about."""

MAX_VECTORS: Final = 1024
"""Parts that one call of the system may write."""

_CLOSED: Final = "Connection closed by server."
_ERROR, _STATUS, _NUMBER, _TEXT, _LIST = b"-+:$*"


def pack(commands: Iterable[Sequence[object]]) -> list[bytes | memoryview]:
    """Commands as they go over the wire; a large word is a part by itself, which nobody copies.

    [("SET", "a", 1)] -> [b"*3\\r\\n$3\\r\\nSET\\r\\n$1\\r\\na\\r\\n$1\\r\\n1\\r\\n"]

    Raises DataError for a word that is not text, bytes or a number.
    """
    parts: list[bytes | memoryview] = []
    small: list[bytes] = []
    for command in commands:
        small.append(b"*%d\r\n" % len(command))
        for word in command:
            packed = _packed_word(word)
            if len(packed) < LARGE_BYTES:
                small.append(b"$%d\r\n%b\r\n" % (len(packed), packed))
            else:
                small.append(b"$%d\r\n" % len(packed))
                parts += (b"".join(small), packed)
                small = [b"\r\n"]
    parts.append(b"".join(small))
    return parts


def _packed_word(word: object) -> bytes | memoryview:
    if type(word) is str:
        return word.encode()
    if type(word) is bytes:
        return word
    if type(word) is int:
        return b"%d" % word
    if type(word) is float:
        return repr(word).encode()
    if isinstance(word, memoryview):
        return word.cast("B")
    if isinstance(word, str) and not isinstance(word, Enum):
        return str.encode(word)
    raise DataError(f"a {type(word).__name__} is no word of a Redis command")


class WireParser(BaseParser):
    """The replies of one connection. Texts come as bytes; a large one that is a reply by itself as
    a read-only memoryview of what was received, which nobody else holds."""

    def __init__(self, socket_read_size: int) -> None:
        """The library names the size in which it would read; this one reads what there is."""
        self._wire: _Wire | None = None

    def on_connect(self, connection: AbstractConnection) -> None:
        """Take the transport over from the library's reader."""
        assert connection._writer is not None
        self._wire = _Wire(connection._writer.transport)

    def on_disconnect(self) -> None:
        """Whoever waits for a reply learns that none will come."""
        if self._wire is not None:
            self._wire.end(ConnectionError(_CLOSED))
            self._wire = None

    async def can_read(self) -> bool:
        """Whether the connection holds what nobody asked for, or has ended: it is of no use."""
        return self._wire is None or self._wire.is_dirty

    async def read_response(self, disable_decoding: bool = False) -> Any:
        """The next reply, as the library reads it: an error is returned, a lost link raised."""
        reply: Any = (await self._connected.replies(1, None))[0]
        if isinstance(reply, ConnectionError):
            raise reply
        return bytes(reply) if type(reply) is memoryview else reply

    async def exchange(
        self, packed: Sequence[bytes | memoryview], num_replies: int, silence_s: float
    ) -> list[Any]:
        """Send packed commands and return their replies, errors among them.

        Raises TimeoutError when nothing moved for `silence_s`, ConnectionError when the link ends.
        Either leaves the connection unfit for use, as does cancelling.
        """
        wire = self._connected
        if wire.is_dirty:  # its descriptor may be another's by now
            raise ConnectionError(_CLOSED)
        replies = wire.replies(num_replies, silence_s)
        wire.send(packed)
        return await replies

    @property
    def _connected(self) -> _Wire:
        if self._wire is None:
            raise ConnectionError(_CLOSED)
        return self._wire


class _Wire(asyncio.BufferedProtocol):
    """One transport: parses what it receives and settles the one future that may wait for it."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        is_plain = transport.get_extra_info("sslcontext") is None
        self._descriptor = transport.get_extra_info("socket").fileno() if is_plain else None
        """Of a socket that takes what is written as it is."""
        self._before = transport.get_protocol()
        """The library's. It goes on being told when the transport may be written to."""
        self._small = bytearray(SMALL_BYTES)
        self._start = self._stop = 0
        """Unread part of the small buffer."""
        self._large: memoryview | None = None
        """Being received: the text and the line end behind it."""
        self._filled = 0
        self._open: list[tuple[list[Any], int]] = []
        """Lists whose elements are still to come, and how many each has, outermost first."""
        self._replies: deque[Any] = deque()
        self._waiting: asyncio.Future[list[Any]] | None = None
        self._num_awaited = 0
        self._timer: asyncio.TimerHandle | None = None
        self._num_received = 0
        """Bytes, to know whether anything moves."""
        self._error: Exception | None = None
        transport.set_protocol(self)

    @property
    def is_dirty(self) -> bool:
        is_read = not self._replies and self._start == self._stop and self._large is None
        return self._error is not None or not is_read or bool(self._open)

    def send(self, packed: Sequence[bytes | memoryview]) -> None:
        """Straight to the socket while nothing is queued before it: asyncio of Python 3.11 would
        first copy all of it into one text."""
        sent = 0
        if self._descriptor is not None and not self._transport.get_write_buffer_size():
            with suppress(BlockingIOError, InterruptedError):
                sent = os.writev(self._descriptor, packed[:MAX_VECTORS])
        for part in packed:
            if sent < len(part):
                self._transport.write(memoryview(part)[sent:])
            sent = max(0, sent - len(part))

    def replies(self, num: int, silence_s: float | None) -> asyncio.Future[list[Any]]:
        """The next `num`; None lets the caller keep the deadline."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Any]] = loop.create_future()
        if self._error is not None:
            future.set_exception(self._error)
            return future
        self._waiting, self._num_awaited = future, num
        if silence_s is not None:
            self._watch(silence_s, None)
        self._settle()
        return future

    def end(self, error: Exception) -> None:
        """No reply will come any more."""
        self._error = self._error or error
        if self._timer is not None:
            self._timer.cancel()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(self._error)
        self._waiting = None

    # --- what the transport calls ---

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return self._large[self._filled :]
        if self._stop == len(self._small):
            self._make_room()
        return memoryview(self._small)[self._stop :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._take(nbytes)
            if self._large is not None and self._descriptor is not None:
                self._read_on(self._descriptor)
        except Exception as error:  # whoever waits hears of it; the transport could not
            self.end(error)
            self._transport.abort()
            return
        self._settle()

    def eof_received(self) -> bool:
        self.end(ConnectionError(_CLOSED))
        self._before.eof_received()  # pyright: ignore[reportAttributeAccessIssue]
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(ConnectionError(str(exc) if exc else _CLOSED))
        self._before.connection_lost(exc)

    def pause_writing(self) -> None:
        self._before.pause_writing()

    def resume_writing(self) -> None:
        self._before.resume_writing()

    # --- parsing ---

    def _read_on(self, descriptor: int) -> None:
        """Read what else has come of a row of large texts: a call of the system for each, where the
        event loop would take two turns. It stops where nothing more has come, or after enough that
        others had to wait."""
        num_left = MAX_ROW_BYTES
        while self._large is not None and num_left > 0:
            rest = self._large[self._filled :]
            try:
                num_read = os.readv(descriptor, (rest, self._small))
            except OSError:  # nothing there, or the end of the link, which the transport will meet
                return
            self._take(num_read)
            num_left -= num_read
            if num_read < len(rest):
                return

    def _take(self, num_read: int) -> None:
        """So many bytes came: the rest of a large text first, then what follows it."""
        self._num_received += num_read
        if self._large is not None:
            num_taken = min(num_read, len(self._large) - self._filled)
            self._filled += num_taken
            if self._filled < len(self._large):
                return
            self._close_large()
            num_read -= num_taken
        self._stop += num_read
        self._parse()

    def _make_room(self) -> None:
        """Move what is unread to the front; a line longer than the buffer doubles it."""
        unread = self._small[self._start : self._stop]
        size = len(self._small) * (2 if len(unread) == len(self._small) else 1)
        # Anew, since a view that was handed to the transport forbids resizing.
        self._small = bytearray(size)
        self._small[: len(unread)] = unread
        self._start, self._stop = 0, len(unread)

    def _parse(self) -> None:
        while self._start < self._stop and self._large is None:
            line_end = self._small.find(b"\r\n", self._start, self._stop)
            if line_end < 0:
                return
            kind, line = self._small[self._start], self._small[self._start + 1 : line_end]
            if kind == _TEXT:
                if not self._parse_text(int(line), line_end + 2):
                    return
                continue
            self._start = line_end + 2
            if kind == _LIST:
                self._parse_list(int(line))
            elif kind == _NUMBER:
                self._put(int(line))
            elif kind == _STATUS:
                self._put(bytes(line))
            elif kind == _ERROR:
                self._put(WireParser.parse_error(line.decode(errors="replace")))
            else:
                raise InvalidResponse(f"Protocol Error: {chr(kind)}{line.decode(errors='replace')}")
        if self._start == self._stop:
            self._start = self._stop = 0

    def _parse_list(self, size: int) -> None:
        if size < 0:
            self._put(None)
        elif size == 0:
            self._put([])
        else:
            self._open.append(([], size))

    def _parse_text(self, size: int, start: int) -> bool:
        """Read a text that begins at `start`; False where the rest of a short one is to come."""
        if size < 0:
            self._start = start
            self._put(None)
            return True
        stop = start + size
        if self._stop >= stop + 2:
            self._start = stop + 2
            self._put(bytes(memoryview(self._small)[start:stop]))
            return True
        if size < LARGE_BYTES:
            return False
        have = self._stop - start
        # Not cleared first, as a bytearray would be.
        self._large = np.empty(size + 2, np.uint8).data
        self._large[:have] = memoryview(self._small)[start : self._stop]
        self._filled = have
        self._start = self._stop = 0
        return True

    def _close_large(self) -> None:
        assert self._large is not None
        text = self._large[:-2].toreadonly()
        self._large = None
        self._put(bytes(text) if self._open else text)

    def _put(self, value: Any) -> None:
        """A value that is whole: an element of the innermost open list, or a reply."""
        while self._open:
            elements, size = self._open[-1]
            elements.append(value)
            if len(elements) < size:
                return
            self._open.pop()
            value = elements
        self._replies.append(value)

    # --- waiting ---

    def _settle(self) -> None:
        waiting = self._waiting
        if waiting is None or len(self._replies) < self._num_awaited:
            return
        self._waiting = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        taken = [self._replies.popleft() for _ in range(self._num_awaited)]
        if not waiting.done():
            waiting.set_result(taken)

    def _watch(self, silence_s: float, before: tuple[int, int] | None) -> None:
        """End the wait if nothing was received or sent since the last look."""
        now = self._num_received, self._transport.get_write_buffer_size()
        if now == before:
            self.end(TimeoutError("Timeout reading from socket"))
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(silence_s, self._watch, silence_s, now)
