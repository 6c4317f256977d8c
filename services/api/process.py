"""The API as a process of its own: `leeway api FILE --run-dir DIR`."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI

from leeway.replay.board import RunBoard
from leeway.replay.vigil import Vigil
from leeway.services.api.app import Server, address_of, connect_app, listen, server_settings
from leeway.services.api.auth import FILE, Tokens, tokens_of
from leeway.services.api.priority import step_back
from leeway.services.api.served import PROCESS
from leeway.services.config import RunConfig
from leeway.services.layout import RunDirectory, RunState
from leeway.services.processes.joining import redis_url_of

log = logging.getLogger(__name__)

GRACE_S: Final = 5
"""How long answers under way may take after SIGTERM; streams end then."""


def serve_api(config: RunConfig, run: RunDirectory) -> int:
    """Serve on `api.host` and `api.port` until SIGTERM or Ctrl-C; exit code 0. It needs no Redis to
    start: `/readyz` says whether one answers. Raises ConfigurationError for a port that is taken.

    Once it serves, the process steps back behind the others of the run.
    """
    tokens, are_new = tokens_of(run.root) if config.api.auth else (None, False)
    app = connect_app(redis_url_of(config), run.root, config, tokens)
    _keep_vigil(app, redis_url_of(config), run.root.name)
    app.openapi()  # its first reader would hold up all others for a fifth of a second
    # What is there now stays. A collection that looks at all of it holds up answers for 50 ms.
    gc.collect()
    gc.freeze()
    listener = listen(config.api.host, config.api.port)
    address = address_of(config.api.host, listener.getsockname()[1])
    _write_state(config, run, address)
    log.info("the API listens on %s", address)
    if tokens is not None and are_new:
        tell_tokens(tokens, run)
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again when it has ended, for the handler that was here before.
        signal.signal(number, lambda *_: None)
    step_back()
    Server(server_settings(app, GRACE_S)).run(sockets=[listener])
    return 0


def tell_tokens(tokens: Tokens, run: RunDirectory) -> None:
    """Once, to who started it at a terminal. A log keeps no token: it is told where they are."""
    if sys.stdout.isatty():
        print(f"read token     {tokens.read}\ncontrol token  {tokens.control}", flush=True)
    print(f"both tokens are kept in {run.root / FILE}", flush=True)


def _keep_vigil(app: FastAPI, url: str, name: str) -> None:
    """For as long as the application lives, in its loop."""
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def watched(app: FastAPI) -> AsyncIterator[Any]:
        board = RunBoard(url, name)
        vigil = Vigil(board, PROCESS)
        try:
            async with lifespan(app) as state:
                yield state
        finally:
            await vigil.end()
            await board.close()

    app.router.lifespan_context = watched


def _write_state(config: RunConfig, run: RunDirectory, address: str) -> None:
    """So that `leeway status DIR` finds it."""
    before = run.read_state()
    run.write_state(
        RunState(
            name=config.name,
            started_at=before.started_at if before else time.time(),
            pids={**(before.pids if before else {}), PROCESS: os.getpid()},
            api_address=address,
        )
    )
