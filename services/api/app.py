"""The REST API of one run, put together, and served.

    request -> counted -> Gate (rate, token, scope, size) -> router -> Redis
                              `------------ problem+json <------'

It reads Redis and asks through it: processes of the run may come and go beside it.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from leeway.replay.errors import ConfigurationError, LeewayError
from leeway.replay.store import Replay
from leeway.services.api.auth import Tokens
from leeway.services.api.dashboard import add_dashboard
from leeway.services.api.hub import Hub, place_of
from leeway.services.api.limits import Gate
from leeway.services.api.metrics import CONTENT_TYPE, exposition
from leeway.services.api.models import Problem
from leeway.services.api.problems import add_error_answers, documented, validating
from leeway.services.api.reader import Reader
from leeway.services.api.recent import RecentGroups, StoredGroups
from leeway.services.api.requests import MeasuredRequests, RequestCounters
from leeway.services.api.routes.control import control_router
from leeway.services.api.routes.events import events_router
from leeway.services.api.routes.health import health_router
from leeway.services.api.routes.parts import parts_router
from leeway.services.api.routes.runs import runs_router
from leeway.services.api.routes.settings import PATH as SETTINGS
from leeway.services.api.routes.settings import settings_router
from leeway.services.api.routes.submission import submission_router
from leeway.services.api.routes.trajectories import trajectories_router
from leeway.services.api.served import Board, Engines, Served
from leeway.services.api.shortcut import PATH, Shortcut
from leeway.services.api.sweeps import sweeps_router
from leeway.services.api.tags import JSON, Tagged, tell_of_tag
from leeway.services.config import RunConfig

START_TIMEOUT_S: Final = 10.0
CLIENT_TIMEOUT_MS: Final = 60_000
"""How long a client may leave what it was sent untaken."""
SWEEPS: Final = "sweeps"
"""Folder beside the run directories in which sweeps are looked for."""

_METRICS: Final = '# TYPE leeway_learner_step gauge\nleeway_learner_step{run="demo-1"} 7.0\n'
_ERRORS: Final = (400, 401, 403, 404, 405, 413, 422, 429, 500, 503)
_DESCRIPTION: Final = """One training run: what it does, live, and how to steer it.

Everything below /v1, and /metrics, needs `Authorization: Bearer TOKEN`. The read token may GET;
what changes the run needs the control token. Errors are application/problem+json."""


def connect_app(redis_url: str, run: Path, config: RunConfig, tokens: Tokens | None) -> FastAPI:
    """The application over the run in directory `run`, with connections of its own. `tokens` None
    asks nobody for one.
    """
    from leeway.replay.archive_buffer import OpenBuffer
    from leeway.replay.board import PolicyBoard, RunBoard

    name = run.name
    buffer = OpenBuffer(redis_url, name, config.replay)
    policies = PolicyBoard(redis_url, name)
    return create_app(
        RunBoard(redis_url, name),
        buffer.replay,
        buffer,
        policies.engines,
        run=run,
        config=config,
        tokens=tokens,
        on_close=policies.close,
    )


def create_app(
    board: Board,
    replay: Replay,
    stored: StoredGroups,
    engines: Engines,
    *,
    run: Path,
    config: RunConfig,
    tokens: Tokens | None,
    on_close: Callable[[], Any] | None = None,
) -> FastAPI:
    """The application. It owns the clients: they belong to the loop it is served in, and are
    closed when it ends.
    """
    reader = Reader(board, replay, {"objective": config.learner.objective})
    recent = RecentGroups(stored, config)
    hub = Hub(reader, board, recent)
    served = Served(run, config, board, replay, engines, _secret(tokens, run), reader, recent, hub)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await hub.close()
        await reader.close()
        await board.close()
        await replay.close()
        if on_close is not None:
            await on_close()

    app = FastAPI(
        title="Leeway",
        version="1",
        description=_DESCRIPTION,
        lifespan=lifespan,
        responses=documented(*_ERRORS),
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
    )
    app.state.hub = hub
    app.state.reader = reader
    app.openapi = lambda: _openapi(app)
    add_error_answers(app)
    for build in (
        health_router,
        runs_router,
        parts_router,
        trajectories_router,
        control_router,
        settings_router,
        submission_router,
    ):
        app.include_router(build(served))
    app.include_router(events_router(served), dependencies=[Depends(_known_place)])
    app.include_router(sweeps_router(run.parent / SWEEPS))
    requests = RequestCounters()
    _add_metrics(app, served, requests)
    add_dashboard(app)
    status = next(route for route in app.routes if getattr(route, "path", None) == PATH)
    app.add_middleware(Tagged)
    app.add_middleware(Shortcut, reader=reader, route=status)
    app.add_middleware(Gate, config=config.api, tokens=tokens)
    app.add_middleware(MeasuredRequests, counters=requests)
    return app


async def _known_place(request: Request) -> None:
    """An id that is none of an event of this API is the fault of the request."""
    given = request.headers.get("last-event-id") or request.query_params.get("after")
    with validating():
        if given:
            place_of(given)


def _secret(tokens: Tokens | None, run: Path) -> bytes:
    """The same in every API of a run that has tokens. Without them anybody may do anything, and
    the tickets of slots only keep honest agents from mistakes.
    """
    words = tokens.control if tokens else str(run.name)
    return hashlib.sha256(b"slots " + words.encode()).digest()


def _add_metrics(app: FastAPI, served: Served, requests: RequestCounters) -> None:
    text: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/plain": {"schema": {"type": "string"}, "example": _METRICS}}}
    }

    @app.get("/metrics", response_class=Response, responses=text, tags=["metrics"])
    async def metrics() -> Response:
        """The run for Prometheus."""
        look = await served.reader.look()
        body = exposition(look.sections, look.stats, look.phase, now=time.time(), requests=requests)
        return Response(body, media_type=CONTENT_TYPE)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Routes with their errors as problem+json, and the tokens; built once."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        parts = schema["components"]["schemas"]
        parts["Problem"] = Problem.model_json_schema()
        for name in ("HTTPValidationError", "ValidationError"):
            parts.pop(name, None)
        schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, operations in schema["paths"].items():
            if path.startswith("/v1") or path == "/metrics":
                for operation in operations.values():
                    operation["security"] = [{"token": []}]
            for method, operation in operations.items():
                # The settings have a tag of their own, which says less than the answer does.
                is_own = path == SETTINGS
                is_read = method == "get" and path.startswith("/v1")
                if is_own or (is_read and JSON in _content(operation)):
                    tell_of_tag(operation, is_polled=not is_own)
        app.openapi_schema = schema
    return app.openapi_schema


def _content(operation: dict[str, Any]) -> dict[str, Any]:
    """Of a good answer, by its kind."""
    return operation["responses"]["200"].get("content", {})


# --- serving ------------------------------------------------------------------------------------


def serve_in_thread(app: FastAPI, host: str, port: int) -> tuple[str, Callable[[], None]]:
    """Serve beside other work; returns the address (http://host:port) and a function that ends it.

    Port 0 takes a free one. Raises ConfigurationError when the port is taken.
    """
    listener = listen(host, port)
    server = Server(server_settings(app, grace_s=2))
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

    return address_of(host, listener.getsockname()[1]), stop


class Server(uvicorn.Server):
    """Ends the streams of events first: uvicorn waits for answers, and these never end."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called in the loop when the server is told to end."""
        app: Any = self.config.app
        await app.state.hub.close()
        await super().shutdown(sockets)


def server_settings(app: FastAPI, grace_s: int) -> uvicorn.Config:
    """How the application is served; answers under way may take `grace_s` seconds at the end.

    Nobody is believed about the address of a client: X-Forwarded-For would get round its rate.
    """
    return uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        log_config=None,
        access_log=False,
        lifespan="on",
        proxy_headers=False,
        timeout_graceful_shutdown=grace_s,
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at the address: who connects before the server runs waits for it.
    Raises ConfigurationError when the address is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it: one whose client takes nothing would stay for ever.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, CLIENT_TIMEOUT_MS)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"api.port = {port} cannot be used on {host} ({error.strerror}); "
            "name another, or 0 for a free one"
        ) from None
    return listener


def address_of(host: str, port: int) -> str:
    """What a client on this machine connects to: 0.0.0.0 becomes 127.0.0.1."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
