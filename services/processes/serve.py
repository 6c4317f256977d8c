"""The serving process: Ray, the Serve applications, and the course of a run.

`leeway serve FILE --run-dir DIR`. It starts a Ray of this machine, or joins that of RAY_ADDRESS.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from leeway.replay.board import RunBoard
from leeway.replay.errors import LeewayError
from leeway.replay.free_pages import FEW_ARENAS, keep_giving_back
from leeway.replay.sharded_store import connect_replay
from leeway.replay.vigil import Vigil
from leeway.services.config import RunConfig
from leeway.services.layout import RunDirectory
from leeway.services.processes.course import Course
from leeway.services.processes.joining import redis_url_of, wait_for_redis
from leeway.services.watch import WATCHED, Watchdog, evidence_of, until_one_fails
from leeway.services.wiring import actor_spec, started_ray

log = logging.getLogger(__name__)

T = TypeVar("T")


def serve(config: RunConfig, run: RunDirectory) -> int:
    """Exit code 0 when stopped by SIGTERM or Ctrl-C; raises LeewayError for what failed."""
    try:
        asyncio.run(_serve(config, run))
    except LeewayError:
        log.info("why, in full", exc_info=True)
        raise
    return 0


async def _serve(config: RunConfig, run: RunDirectory) -> None:
    """Deploy, evaluate, follow the run; at SIGTERM, done or not, take all down again."""
    stopping, url = asyncio.Event(), redis_url_of(config)
    _listen(stopping)
    await _unless(stopping, wait_for_redis(url, run.root.name))
    if stopping.is_set():
        return
    # Ray's processes inherit it; this one has begun without.
    os.environ.update({**FEW_ARENAS, **os.environ})
    with started_ray(config.metrics.ray_port):
        _listen(stopping)  # again: Ray sets handlers of its own when it starts
        await asyncio.sleep(0.05)  # a signal that came while Ray started is seen now
        if not stopping.is_set():
            await _deploy_and_follow(config, run, url, stopping)


def _listen(stopping: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)


async def _deploy_and_follow(
    config: RunConfig, run: RunDirectory, url: str, stopping: asyncio.Event
) -> None:
    from leeway.actors.serve_app import deploy, undeploy

    rollouts = await _unless(stopping, deploy(actor_spec(run, config, url)))
    if rollouts is None:
        return  # replicas that still load have nothing to hand over; they end with Ray
    board = RunBoard(url, run.root.name)
    replay = connect_replay(url, run.root.name, config.replay)
    course = Course(board, config, rollouts.evaluate)
    works: list[Coroutine[Any, Any, None]] = [course.keep(), keep_giving_back()]
    if WATCHED not in os.environ:
        works.append(Watchdog(board, replay, config, evidence_of(run)).keep())
    vigil = Vigil(board, "serve")
    try:
        await _unless(stopping, until_one_fails(*works))
    finally:
        await asyncio.to_thread(undeploy)
        await vigil.end()
        await replay.close()
        await board.close()


async def _unless(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None when the stop comes first, and `work` is cancelled."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        stopped.cancel()
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None
