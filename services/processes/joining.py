"""What every process of a run does first: find Redis, and say on the run board what run this is.

The processes know each other by Redis alone. Each may start before the others, and again.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from leeway.replay.board import RunBoard
from leeway.replay.errors import ConfigurationError, StoreUnavailable
from leeway.services.config import REDIS_URL, RunConfig

log = logging.getLogger(__name__)

REDIS_START_S: Final = 300.0
"""How long a process waits for a Redis that does not answer yet: it may be starting, too, or load
an append-only file."""
JOINED: Final = "joined"
"""Section of the run board that the learner writes when it has brought buffer and engines to its
version: only then is what an engine holds a version of the run."""


def redis_url_of(config: RunConfig) -> str:
    """The Redis that all processes of the run reach. Raises ConfigurationError without one."""
    if config.replay.url is None:
        raise ConfigurationError(
            "the processes of a run meet in a Redis that each of them reaches: set replay.url or "
            f"{REDIS_URL}; leeway train is what starts one of its own"
        )
    return config.replay.url


async def wait_for_redis(url: str, run: str, timeout_s: float = REDIS_START_S) -> None:
    """Return when Redis answers. Raises StoreUnavailable after `timeout_s`, and at once
    ConfigurationError for a password or certificate that it refuses."""
    board = RunBoard(url, run, retry_s=timeout_s)
    log.info("waiting up to %g s for Redis", timeout_s)
    try:
        await board.phase()
    except StoreUnavailable as error:
        raise StoreUnavailable(
            f"no Redis within {timeout_s:g} s ({error}); start it, or correct {REDIS_URL} or "
            "replay.url"
        ) from error
    finally:
        await board.close()


def run_section(config: RunConfig, name: str, started_at: float) -> dict[str, Any]:
    """The section `run` of the run board; `started_at` is Unix time."""
    return {
        "name": name,
        "started_at": started_at,
        "num_steps": config.learner.num_steps,
        "bound": config.replay.max_staleness,
        "objective": config.learner.objective,
    }


async def begin(board: RunBoard, config: RunConfig, name: str, version: int) -> None:
    """The learner, at `version`, goes on with the run: forget a request to stop, and open a run
    anew that was at its end but has steps left, as after learner.num_steps was raised."""
    await board.clear_stop()
    known = (await board.get_all()).get("run", {})
    await board.put("run", run_section(config, name, known.get("started_at", time.time())))
    has_ended = await board.phase() in (None, "evaluating-after", "done")
    if has_ended and version < config.learner.num_steps:
        await board.set_phase("starting")
