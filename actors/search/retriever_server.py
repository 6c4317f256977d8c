"""The retriever as a process of its own: uvicorn, on one port, until it is told to end.

SIGTERM and Ctrl-C stop it alike: no new connection is taken, requests under way are answered (for
GRACE_S at most), then `serve` returns.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from fastapi import FastAPI

from leeway.replay.errors import ConfigurationError

GRACE_S: Final = 10
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_BACKLOG: Final = 2048


def serve(app: FastAPI, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until a signal; `announce` gets the address once requests are answered.

    Port 0 takes a free one. Raises ConfigurationError when the port cannot be used, and
    KeyboardInterrupt after Ctrl-C.
    """
    listener = _listen(host, port)
    server = _Server(app, lambda: announce(_address(listener)))
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
    if server.was_interrupted:
        raise KeyboardInterrupt


class _Server(uvicorn.Server):
    """Does not raise the signal that ended it a second time: an orderly end has exit code 0."""

    def __init__(self, app: FastAPI, announce: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._announce = announce
        self.was_interrupted = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, action in before.items():
                signal.signal(number, action)

    def _on_signal(self, number: int, frame: object) -> None:
        self.was_interrupted = self.was_interrupted or number == signal.SIGINT
        self.force_exit = self.should_exit and number == signal.SIGINT
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"port {port} cannot be used on {host} ({reason}); name another --port, or 0 for a "
            "free one, and 127.0.0.1 or 0.0.0.0 as --host"
        ) from None
    return listener


def _address(listener: socket.socket) -> str:
    """What a client on this machine connects to: 0.0.0.0 becomes 127.0.0.1."""
    host, port = str(listener.getsockname()[0]), listener.getsockname()[1]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
