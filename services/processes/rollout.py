"""Rollouts without a learner: `leeway rollout FILE --num-groups N --out ARCHIVE`.

The actors are those of a run. Their buffer admits N groups and no more, whatever their lengths, so
none is left out for having taken long.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leeway.replay.archive_buffer import Exported, OpenBuffer, export_groups
from leeway.replay.board import RunBoard
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import LeewayError, WaitTimeout
from leeway.replay.server import EmbeddedRedis
from leeway.replay.store import Replay
from leeway.services.config import RunConfig, with_values
from leeway.services.layout import RunDirectory
from leeway.services.processes.course import RunFailed
from leeway.services.processes.joining import wait_for_redis
from leeway.services.wiring import actor_spec, started_ray

log = logging.getLogger(__name__)

LOOK_S = 0.5


class RolloutsStopped(LeewayError):
    """SIGTERM or Ctrl-C came before the last group."""


def collect(config: RunConfig, num_groups: int, out: Path, *, overwrite: bool) -> Exported:
    """Play `num_groups` groups with the configured policy and write them to `out`.

    Raises RunFailed when the workers cannot go on, WaitTimeout when no group comes within
    learner.draw_timeout_s, RolloutsStopped after a signal; `out` is written when all are there.
    """
    with tempfile.TemporaryDirectory(prefix="leeway-") as scratch:
        name = f"{config.name}-rollout-{os.getpid()}"
        with _redis(config, Path(scratch), name) as url:
            run = RunDirectory(Path(scratch) / name)
            return asyncio.run(_collect(config, run, url, num_groups, out, overwrite))


@contextmanager
def _redis(config: RunConfig, scratch: Path, name: str) -> Iterator[str]:
    """The one of the configuration, under a run of its own; else one for the while."""
    if config.replay.url is not None:
        yield config.replay.url
        return
    with EmbeddedRedis.start(scratch / "redis", name) as server:
        yield server.url


def buffer_of(replay: ReplayConfig, num_groups: int) -> ReplayConfig:
    """A buffer that admits `num_groups` at version 0, rounded up for its shards, and never more.

    10 groups -> one step of 10 with max_staleness 0: its window is (0 + 1) * 10.
    """
    step = -(-num_groups // replay.num_shards) * replay.num_shards
    return ReplayConfig(
        groups_per_step=step,
        max_staleness=0,
        max_groups=step,
        max_bytes=replay.max_bytes,
        num_shards=replay.num_shards,
        slot_timeout_s=replay.slot_timeout_s,
    )


async def _collect(
    config: RunConfig, run: RunDirectory, url: str, num_groups: int, out: Path, overwrite: bool
) -> Exported:
    stopping = asyncio.Event()
    name = run.root.name
    config = with_values(config, {"replay": buffer_of(config.replay, num_groups)})
    await wait_for_redis(url, name)
    with started_ray():
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        board, buffer = RunBoard(url, name), OpenBuffer(url, name, config.replay)
        try:
            await _play(config, run, url, num_groups, board, buffer.replay, stopping)
            return await export_groups(buffer, out, overwrite)
        finally:
            await buffer.close()
            await board.close()


async def _play(
    config: RunConfig,
    run: RunDirectory,
    url: str,
    num_groups: int,
    board: RunBoard,
    replay: Replay,
    stopping: asyncio.Event,
) -> None:
    """Return when the buffer holds all the groups and the workers have stopped."""
    from leeway.actors.serve_app import deploy, undeploy

    try:
        await deploy(actor_spec(run, config, url))
        await board.set_phase("training")
        await _until_played(config, num_groups, board, replay, stopping)
    finally:
        await board.set_phase("done")
        await asyncio.to_thread(undeploy)


async def _until_played(
    config: RunConfig, num_groups: int, board: RunBoard, replay: Replay, stopping: asyncio.Event
) -> None:
    timeout_s = config.learner.draw_timeout_s
    num_ready, since = 0, time.monotonic()
    while num_ready < num_groups:
        if stopping.is_set():
            raise RolloutsStopped(f"stopped after {num_ready} of {num_groups} groups")
        reason = (await board.get_all()).get("failure", {}).get("reason")
        if reason:
            raise RunFailed(f"rollouts cannot go on: {reason}")
        stats = await replay.stats()
        if stats.num_ready > num_ready:
            num_ready, since = stats.num_ready, time.monotonic()
            log.info("%d of %d groups", num_ready, num_groups)
        elif time.monotonic() - since > timeout_s:
            raise WaitTimeout(
                f"no group within learner.draw_timeout_s = {timeout_s:g} ({num_ready} of "
                f"{num_groups} are there, {stats.num_slots} are being played); dropped: "
                f"{stats.dropped or 'none'}"
            )
        await asyncio.sleep(LOOK_S)
