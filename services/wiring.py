"""From a RunConfig to the pieces of each process. The only file of services that imports ray."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from leeway.actors.config import model_dir
from leeway.services.config import RunConfig
from leeway.services.layout import RunDirectory

if TYPE_CHECKING:
    from leeway.actors.serve_app import ActorSpec


def starting_point(run: RunDirectory, config: RunConfig) -> tuple[Path, int]:
    """The model directory to start from and its version: the last checkpoint, else the base."""
    from leeway.learner.checkpoint import latest

    checkpoint = latest(run.checkpoints)
    if checkpoint is None:
        return model_dir(config.model), 0
    return checkpoint.path, checkpoint.version


def actor_spec(
    run: RunDirectory, config: RunConfig, redis_url: str, model: Path, version: int
) -> ActorSpec:
    """What the Serve applications need to know."""
    from leeway.actors.serve_app import ActorSpec

    return ActorSpec(
        run=run.root.name,
        redis_url=redis_url,
        model=str(model),
        model_version=version,
        seed=config.seed,
        policy=config.policy,
        environment=config.environment,
        search=config.search,
        reward=config.reward,
        data=config.data,
        rollout=config.rollout,
        replay=config.replay,
    )


@contextmanager
def local_ray() -> Iterator[None]:
    """A Ray of this machine alone, in a temporary folder that goes with it.

    RAY_ADDRESS, where it is set, joins that cluster instead and ends nothing there.
    """
    import ray

    if os.environ.get("RAY_ADDRESS"):
        ray.init(logging_level=logging.WARNING)
        try:
            yield
        finally:
            ray.shutdown()
        return
    # Sockets live below this folder and their paths may have 107 characters: keep it short.
    folder = tempfile.mkdtemp(prefix="r-")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address="local",
            num_cpus=max(4, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=128 * 2**20,
            log_to_driver=True,
            logging_level=logging.WARNING,
            _temp_dir=folder,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
