"""Where arms run: in processes of this machine, or in tasks of Ray. Both start the same process.

A launcher holds so many arms beside each other as the stated resources allow, and knows nothing of
what an arm is.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from leeway.replay.errors import ConfigurationError
from leeway.services.closed_ray import close_ray
from leeway.services.experiments.sweep_file import Resources
from leeway.services.supervision import start


@dataclass(frozen=True)
class Job:
    """One process to run."""

    folder: Path
    """Of the arm; log.txt in it receives the output."""
    arguments: tuple[str, ...]
    """python -m ..."""
    timeout_s: float

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"


class Launcher(Protocol):
    """Runs jobs."""

    num_places: int
    """Most jobs beside each other."""

    async def run(self, job: Job) -> str | None:
        """To its end; returns why it ended badly, None after exit code 0. Cancelling it ends the
        process."""
        ...


async def run_process(job: Job, environment: dict[str, str]) -> str | None:
    """The job as a child of this process, which ends with it whatever happens."""
    child = await start("arm", job.arguments, job.log, environment)
    try:
        async with asyncio.timeout(job.timeout_s):
            code = await child.process.wait()
    except TimeoutError:
        return f"it took longer than resources.arm_timeout_s = {job.timeout_s:g} s, and was ended"
    finally:
        await child.stop(grace_s=2.0)
    if code == 0:
        return None
    if code < 0:
        # The arm could not say so itself; out of memory, the kernel sends signal 9.
        return f"it was ended by signal {-code}"
    return str(await child.ended())


def environment_of(resources: Resources, gpu: str | None = None) -> dict[str, str]:
    """Threads, and the GPU where one was chosen. An arm that takes none sees none; without a choice
    Ray has made one."""
    threads = {"OMP_NUM_THREADS": str(max(1, int(resources.num_cpus)))}
    if resources.num_gpus == 0:
        gpu = ""
    return threads if gpu is None else threads | {"CUDA_VISIBLE_DEVICES": gpu}


class Processes:
    """On this machine. Places are GPUs' parts where an arm takes some, else cores."""

    def __init__(self, resources: Resources, num_cores: int, gpus: list[str]) -> None:
        """`gpus` by id, as CUDA_VISIBLE_DEVICES names them."""
        self._resources = resources
        self._places: asyncio.Queue[str | None] = asyncio.Queue()
        for gpu in places(resources, num_cores, gpus):
            self._places.put_nowait(gpu)
        self.num_places = self._places.qsize()

    async def run(self, job: Job) -> str | None:
        """See Launcher."""
        gpu = await self._places.get()
        try:
            return await run_process(job, environment_of(self._resources, gpu))
        finally:
            self._places.put_nowait(gpu)


def places(resources: Resources, num_cores: int, gpus: list[str]) -> list[str | None]:
    """The GPU of each place, None without one, GPUs in turn.

    16 cores at 1, two GPUs at 0.25 -> 8 places: "0", "1", "0", "1", ...
    Raises ConfigurationError where no arm fits.
    """
    by_cores = int(num_cores / resources.num_cpus + 1e-9)
    if by_cores < 1:
        raise ConfigurationError(
            f"resources.num_cpus = {resources.num_cpus:g} is more than the {num_cores} cores here; "
            "lower it"
        )
    found: list[str | None] = [None] * by_cores
    if resources.num_gpus > 0:
        found = [*_gpu_places(resources.num_gpus, gpus)]
        if not found:
            raise ConfigurationError(
                f"resources.num_gpus = {resources.num_gpus:g} is more than the {len(gpus)} GPUs "
                "here; lower it, or set it to 0 for arms on the CPU"
            )
    most = min(by_cores, resources.max_parallel or by_cores)
    return found[:most]


def _gpu_places(share: float, gpus: list[str]) -> list[str]:
    if share <= 1:
        each = int(1 / share + 1e-9)
        return [gpu for _ in range(each) for gpu in gpus]
    whole = math.ceil(share)
    return [",".join(gpus[i : i + whole]) for i in range(0, len(gpus) - whole + 1, whole)]


def visible_gpus() -> list[str]:
    """Ids of the GPUs that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu for gpu in named.split(",") if gpu]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


@asynccontextmanager
async def _processes(resources: Resources) -> AsyncIterator[Launcher]:
    gpus = visible_gpus() if resources.num_gpus else []
    yield Processes(resources, len(os.sched_getaffinity(0)), gpus)


def launcher_of(resources: Resources) -> AbstractAsyncContextManager[Launcher]:
    """The one that the resources name, for the while of a sweep."""
    if resources.executor == "processes":
        return _processes(resources)
    if not os.environ.get("RAY_ADDRESS"):
        close_ray()
    from leeway.services.experiments.ray_launcher import ray_launcher

    return ray_launcher(resources)
