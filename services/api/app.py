"""REST over a run: health, status, metrics. It reads Redis and changes nothing.

Errors are application/problem+json; a Redis that does not answer is 503 with the reason.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from leeway.replay.config import ReplayConfig
from leeway.replay.errors import ConfigurationError, LeewayError, StoreUnavailable
from leeway.replay.store import ReplayStats
from leeway.services.api.metrics import CONTENT_TYPE, exposition
from leeway.services.api.models import Health, Problem, Status
from leeway.services.snapshot import Snapshot, build_snapshot

ANSWER_TIMEOUT_S: Final = 5.0
"""Seconds Redis may take before a request is answered with 503."""

START_TIMEOUT_S: Final = 10.0


class RunSections(Protocol):
    """What the API reads of the run board; replay.run_board.RunBoard is the real one."""

    async def get_all(self) -> dict[str, dict[str, Any]]: ...
    async def phase(self) -> str | None: ...
    async def events(self, after: str = "", count: int = 100) -> Sequence[HasText]: ...
    async def close(self) -> None: ...


class HasText(Protocol):
    """An event, of which the status shows the text."""

    @property
    def text(self) -> str: ...


class BufferStats(Protocol):
    """What the API reads of the replay buffer; replay.store.Replay is one."""

    async def stats(self) -> ReplayStats: ...
    async def close(self) -> None: ...


def connect_app(
    redis_url: str, run: str, replay: ReplayConfig, config_summary: Mapping[str, Any]
) -> FastAPI:
    """The application over a run in Redis, with connections of its own."""
    from leeway.replay.run_board import RunBoard
    from leeway.replay.sharded_store import connect_replay

    buffer = connect_replay(redis_url, run, replay)
    return create_app(RunBoard(redis_url, run), buffer, config_summary)


def create_app(
    run_board: RunSections, replay: BufferStats, config_summary: Mapping[str, Any]
) -> FastAPI:
    """The application. It owns the two clients: they belong to the loop it is served in, and are
    closed when it ends.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_board.close()
        await replay.close()

    app = FastAPI(
        title="Leeway",
        description="The state of one training run.",
        lifespan=lifespan,
        responses={503: {"model": Problem, "description": "Redis does not answer"}},
    )
    _add_error_answers(app)

    @app.get("/healthz")
    async def healthz() -> Health:
        """The process answers; says nothing about Redis, whose faults no restart of this heals."""
        return Health()

    @app.get("/v1/status")
    async def status() -> Status:
        """The run at this moment."""
        snapshot = await _read(run_board, replay)
        found = Status.model_validate(snapshot)
        return found.model_copy(update={"config": dict(config_summary)})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """The same for Prometheus."""
        return Response(exposition(await _read(run_board, replay)), media_type=CONTENT_TYPE)

    return app


async def _read(run_board: RunSections, replay: BufferStats) -> Snapshot:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            sections, phase, events, stats = await asyncio.gather(
                run_board.get_all(), run_board.phase(), run_board.events(count=1), replay.stats()
            )
    except TimeoutError:
        raise StoreUnavailable(f"Redis gave no answer within {ANSWER_TIMEOUT_S:g} s") from None
    if phase is not None:
        sections.setdefault("run", {})["phase"] = phase
    return build_snapshot(sections, stats, last_event=events[-1].text if events else None)


# --- errors -------------------------------------------------------------------------------------


def _add_error_answers(app: FastAPI) -> None:
    @app.exception_handler(StoreUnavailable)
    async def unavailable(request: Request, error: StoreUnavailable) -> Response:
        return _problem(503, "The replay buffer does not answer", str(error))

    @app.exception_handler(LeewayError)
    async def failed(request: Request, error: LeewayError) -> Response:
        return _problem(500, type(error).__name__, str(error))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        detail = f"{request.method} {request.url.path}: {error.detail}"
        return _problem(error.status_code, str(error.detail), detail, error.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return _problem(422, "The request is malformed", f"{where}: {first['msg']}")

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return _problem(500, "Internal error", f"{type(error).__name__}; see the log of the API")


def _problem(
    status: int, title: str, detail: str, headers: Mapping[str, str] | None = None
) -> Response:
    body = Problem(title=title, status=status, detail=detail).model_dump()
    return JSONResponse(body, status, headers, media_type="application/problem+json")


# --- serving ------------------------------------------------------------------------------------


def serve_in_thread(app: FastAPI, host: str, port: int) -> tuple[str, Callable[[], None]]:
    """Serve beside other work; returns the address (http://host:port) and a function that ends it.

    Port 0 takes a free one. Raises ConfigurationError when the port is taken.
    """
    listener = _listen(host, port)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="leeway-api", daemon=True
    )
    thread.start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            listener.close()
            raise LeewayError(f"the API did not start on {host}:{port}")
        time.sleep(0.01)

    def stop() -> None:
        server.should_exit = True
        thread.join(timeout=5)
        if thread.is_alive():
            server.force_exit = True
            thread.join(timeout=5)
        listener.close()

    return _address(host, listener.getsockname()[1]), stop


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"api.port = {port} cannot be used on {host} ({error.strerror}); "
            "name another, or 0 for a free one"
        ) from None
    return listener


def _address(host: str, port: int) -> str:
    """What a client on this machine connects to: 0.0.0.0 becomes 127.0.0.1."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
