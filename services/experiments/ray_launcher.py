"""Arms as tasks of Ray: placed by cores and GPUs on this machine, or on the cluster of RAY_ADDRESS.

A task starts the arm's own process and waits for it, so that an arm which crashes takes no worker
of Ray with it, and one which ends leaves nothing in it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from leeway.replay.errors import ConfigurationError
from leeway.services.experiments.launchers import Job, Launcher, environment_of, run_process
from leeway.services.experiments.sweep_file import Resources

OBJECT_STORE_BYTES = 128 * 2**20
"""Arms hand nothing over through it; this is what Ray asks for at least, with room."""


def _run(folder: str, arguments: tuple[str, ...], timeout_s: float, resources: str) -> str | None:
    """In a worker of Ray, which has set CUDA_VISIBLE_DEVICES for what it gave the task."""
    job = Job(Path(folder), arguments, timeout_s)
    if not job.folder.is_dir():
        return f"{folder} does not exist on this machine; every machine must see the sweep's folder"
    return asyncio.run(run_process(job, environment_of(Resources.model_validate_json(resources))))


class RayTasks:
    """One task for each job."""

    def __init__(self, resources: Resources, num_places: int) -> None:
        self._resources = resources
        self._limit = asyncio.Semaphore(num_places)
        self.num_places = num_places
        self._task: Any = ray.remote(_run).options(
            num_cpus=resources.num_cpus, num_gpus=resources.num_gpus, max_retries=0
        )

    async def run(self, job: Job) -> str | None:
        """See Launcher."""
        async with self._limit:
            reference = self._task.remote(
                str(job.folder), job.arguments, job.timeout_s, self._resources.model_dump_json()
            )
            try:
                return await reference
            except ray.exceptions.RayError as error:
                return f"its worker of Ray ended: {str(error).splitlines()[0]}"
            except asyncio.CancelledError:
                # The worker goes, and the kernel ends the arm with it.
                ray.cancel(reference, force=True)
                raise


@asynccontextmanager
async def ray_launcher(resources: Resources) -> AsyncIterator[Launcher]:
    """A Ray for the while of a sweep. Raises ConfigurationError where no arm would ever fit."""
    with _started(resources):
        offered = {str(name): float(number) for name, number in ray.cluster_resources().items()}
        yield RayTasks(resources, num_places(resources, offered))


def num_places(resources: Resources, offered: dict[str, float]) -> int:
    """How many arms fit. 16 CPUs at 1, 2 GPUs at 0.25 -> 8."""
    wanted = {"CPU": resources.num_cpus, "GPU": resources.num_gpus}
    found = []
    for name, each in wanted.items():
        if each > 0:
            found.append(int(offered.get(name, 0.0) / each + 1e-9))
            if found[-1] < 1:
                raise ConfigurationError(
                    f"resources.num_{name.lower()}s = {each:g} for an arm, but Ray offers "
                    f"{offered.get(name, 0.0):g}; lower it, or join a larger cluster by RAY_ADDRESS"
                )
    return min([*found, resources.max_parallel or found[0]])


@contextmanager
def _started(resources: Resources) -> Iterator[None]:
    """This machine's own, in a folder that goes with it; or the cluster of RAY_ADDRESS."""
    quiet = {"logging_level": logging.WARNING, "log_to_driver": False}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
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
            num_cpus=len(os.sched_getaffinity(0)),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=folder,
            **quiet,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
