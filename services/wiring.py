"""From a RunConfig to what the Serve applications are made of, and the Ray that they run in."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from leeway.actors.config import model_dir
from leeway.services.closed_ray import close_ray
from leeway.services.config import RunConfig
from leeway.services.layout import RunDirectory

if TYPE_CHECKING:
    from leeway.actors.serve_replicas import ActorSpec


def actor_spec(run: RunDirectory, config: RunConfig, redis_url: str) -> ActorSpec:
    """What the Serve applications need to know."""
    from leeway.actors.serve_replicas import ActorSpec

    return ActorSpec(
        run=run.root.name,
        redis_url=redis_url,
        model=str(model_dir(config.model)),
        checkpoints=str(run.checkpoints),
        seed=config.seed,
        policy=config.engine,
        environment=config.environment,
        search=config.search,
        reward=config.reward,
        data=config.data,
        rollout=config.rollout,
        replay=config.replay,
        tracing=config.tracing,
    )


@contextmanager
def started_ray(metrics_port: int = 0) -> Iterator[None]:
    """A Ray of this machine alone, in a temporary folder that goes with it. It exports its metrics
    at `metrics_port`; 0 takes a free one.

    RAY_ADDRESS, where it is set, joins that cluster instead and ends nothing there. Ray's daemons
    outlive a driver that is killed: a command that calls this begins with `foster.fork_below`.
    """
    is_joining = bool(os.environ.get("RAY_ADDRESS"))
    if not is_joining:
        close_ray()
    import ray

    if is_joining:
        ray.init(logging_level=logging.WARNING)
        try:
            yield
        finally:
            ray.shutdown()
        return
    # Sockets live below this folder and their paths may have 107 characters: keep it short.
    folder = tempfile.mkdtemp(prefix="r-")
    try:
        ray.init(
            address="local",
            num_cpus=max(4, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=128 * 2**20,
            log_to_driver=True,
            logging_level=logging.WARNING,
            _temp_dir=folder,
            _metrics_export_port=metrics_port or None,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
