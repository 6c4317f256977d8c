"""Calls into a worker's process that its engine does not notice.

vLLM carries out a call to its workers between two steps, and waits for what is under way on the
device first. What has nothing to do with a step, such as receiving weights into a place of their
own, comes through here instead: a thread of the worker listens on a Unix socket, and answers one
call after the other. A connection carries one call, in msgpack, to the end of the stream; so does
the answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from leeway.replay.errors import TransferError

log = logging.getLogger(__name__)

READ_S: Final = 5.0
"""Seconds for one side to send what the other waits for."""
RETRY_S: Final = 0.1
_CREDENTIALS: Final = struct.Struct("3i")
"""What SO_PEERCRED says: process, user, group."""


class Answer(msgspec.Struct, frozen=True):
    """What a call brings: a value, or what went wrong."""

    value: Any = None
    error: str | None = None


class SideChannel:
    """The end that is called. It lives as long as its process."""

    def __init__(self, calls: Mapping[str, Callable[..., Any]]) -> None:
        """`calls` are run on the channel's own thread; they take and give what msgpack knows."""
        self._calls = dict(calls)
        # An abstract name leaves no file behind, whatever ends the process.
        self.address = f"leeway-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen()
        threading.Thread(target=self._serve, name="leeway-side", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # too many open files; it may pass
                time.sleep(RETRY_S)
                continue
            with connection, contextlib.suppress(OSError):
                connection.settimeout(READ_S)
                if _user_of(connection) == os.getuid():
                    connection.sendall(self._answer(_all(connection)))

    def _answer(self, call: bytes) -> bytes:
        try:
            name, arguments = msgspec.msgpack.decode(call, type=tuple[str, list[Any]])
            if name not in self._calls:
                raise TransferError(f"there is no call {name}")
            return msgspec.msgpack.encode(Answer(self._calls[name](*arguments)))
        except Exception as error:
            log.debug("a call through the side channel", exc_info=True)
            return msgspec.msgpack.encode(Answer(error=str(error) or type(error).__name__))


def call(address: str, name: str, *arguments: object, timeout_s: float = 2 * READ_S) -> Any:
    """Have the process at `address` carry out a call; blocks.

    Raises TransferError with what went wrong there, or when it does not answer within `timeout_s`.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(f"\0{address}")
            connection.sendall(msgspec.msgpack.encode((name, arguments)))
            connection.shutdown(socket.SHUT_WR)
            answer = msgspec.msgpack.decode(_all(connection), type=Answer)
    except (OSError, msgspec.DecodeError) as error:
        raise TransferError(f"the engine's worker did not answer {name}: {error}") from error
    if answer.error is not None:
        raise TransferError(answer.error)
    return answer.value


def _all(connection: socket.socket) -> bytes:
    pieces: list[bytes] = []
    while piece := connection.recv(65_536):
        pieces.append(piece)
    return b"".join(pieces)


def _user_of(connection: socket.socket) -> int:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)[1]
