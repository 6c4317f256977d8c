"""The Serve applications by import path, for a Ray Serve configuration file or a RayService.

    applications:
      - name: policy                       # and retriever, rollout, course
        import_path: leeway.services.serve_application:policy
        route_prefix: null
        args: {config: /etc/leeway/config.toml, run_dir: /var/lib/leeway/runs/first}

They are what `leeway serve` starts, and `course` is what it does besides. Every machine of the Ray
cluster must see the configuration file, and model and data under the same paths.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from ray import serve

from leeway.actors.serve_app import (
    policy_application,
    retriever_application,
    rollout_application,
)
from leeway.actors.serve_handles import HandleRollouts, application_handle
from leeway.actors.serve_replicas import ActorSpec
from leeway.replay.board import RunBoard
from leeway.replay.errors import ConfigurationError
from leeway.replay.sharded_store import connect_replay
from leeway.services.config import RunConfig, load
from leeway.services.layout import RunDirectory
from leeway.services.processes.course import Course
from leeway.services.processes.joining import redis_url_of, wait_for_redis
from leeway.services.watch import Watchdog, evidence_of, until_one_fails
from leeway.services.wiring import actor_spec

ARGUMENTS = {"config", "run_dir"}


def policy(args: Mapping[str, str]) -> serve.Application:
    """Engines."""
    return policy_application(_spec(args))


def retriever(args: Mapping[str, str]) -> serve.Application:
    """The index. Leave this application out where `search.retriever_url` names a server."""
    spec = _spec(args)
    if spec.search.retriever_url is not None:
        raise ConfigurationError(
            f"search.retriever_url = {spec.search.retriever_url} serves the passages: leave the "
            "application retriever out, or remove the key"
        )
    return retriever_application(spec)


def rollout(args: Mapping[str, str]) -> serve.Application:
    """Rollout workers."""
    return rollout_application(_spec(args))


def course(args: Mapping[str, str]) -> serve.Application:
    """The course of the run: phases and evaluations."""
    config, run = _read(args)
    return CourseServer.bind(config, redis_url_of(config), run)


def _spec(args: Mapping[str, str]) -> ActorSpec:
    config, run = _read(args)
    return actor_spec(run, config, redis_url_of(config))


def _read(args: Mapping[str, str]) -> tuple[RunConfig, RunDirectory]:
    """The configuration, and the run directory, which need not exist on this machine."""
    if set(args) != ARGUMENTS:
        raise ConfigurationError(
            f"the args of a leeway application are config and run_dir, not {', '.join(args)}"
            if args
            else "a leeway application needs args: config (a TOML file) and run_dir"
        )
    return load(args["config"]), RunDirectory(Path(args["run_dir"]))


@serve.deployment(num_replicas=1, health_check_period_s=5, ray_actor_options={"num_cpus": 0})
class CourseServer:
    """Moves the run through its phases, and watches it. Serve starts it again when it fails."""

    def __init__(self, config: RunConfig, redis_url: str, run: RunDirectory) -> None:
        logging.basicConfig(level=logging.INFO)
        self._task = asyncio.create_task(self._keep(config, redis_url, run))

    async def _keep(self, config: RunConfig, redis_url: str, run: RunDirectory) -> None:
        name = run.root.name
        await wait_for_redis(redis_url, name)
        board = RunBoard(redis_url, name)
        replay = connect_replay(redis_url, name, config.replay)
        try:
            workers = await application_handle("rollout", config.policy.start_timeout_s)
            course = Course(board, config, HandleRollouts(workers).evaluate)
            dog = Watchdog(board, replay, config, evidence_of(run))
            await until_one_fails(course.keep(), dog.keep())
        finally:
            await replay.close()
            await board.close()

    async def check_health(self) -> None:
        """Raises what ended the course."""
        if self._task.done():
            self._task.result()

    async def __del__(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
