"""The machine itself: cores, memory, disk, shared memory, limits. Reads files, imports nothing
heavy."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from leeway.services.doctor.finding import Finding, Part, at_least

if TYPE_CHECKING:
    from leeway.services.config import RunConfig

GIB: Final = 2**30
ENGINE_AND_LEARNER_GIB: Final = 4.0
"""Python, torch and Ray of the processes of a run, without weights and cache."""
MIN_DISK_GIB: Final = 5.0
MIN_SHM_GIB: Final = 1.0
"""Ray's objects and gloo's buffers of a small run."""
MIN_FILES: Final = 4096
"""Open files: a socket per episode, per connection to Redis and per Ray worker."""
MIN_PROCESSES: Final = 4096
"""Threads count: Ray starts hundreds."""
SAVED_PER_PARAMETER_BYTES: Final = 12
"""Of a checkpoint: weights and two moments in float32."""

MEMORY = Part("memory")
MACHINE = Part("machine")


def check_cores() -> Iterator[Finding]:
    """Cores that this process may run on, and what else runs on them."""
    count = len(os.sched_getaffinity(0))
    remedy = "give the machine or container two cores: engine and learner run beside each other"
    yield at_least(MACHINE, "cores", count, 2, "cores", remedy, is_error=False)
    load = os.getloadavg()[0]
    if load > 2 * count:
        text = f"{load:.1f} processes want to run on {count} cores; timings and deadlines suffer"
        yield MACHINE.note("load", text, load=round(load, 2))


def check_memory(config: RunConfig, has_gpus: bool) -> Iterator[Finding]:
    """What is free, against what the configuration asks for: on a CPU the cache, and the weights
    of the engine and of the learner with two moments, gradients and a copy; with GPUs two copies.
    """
    free = min(_available_gib(), _cgroup_free_gib())
    weights = (2 if has_gpus else 6) * model_gib(config.model)
    cache = 0 if has_gpus else config.policy.kv_cache_gib
    wanted = ENGINE_AND_LEARNER_GIB + cache + weights
    parts = f"{ENGINE_AND_LEARNER_GIB:g} GiB for the processes and {weights:.1f} for weights"
    if cache:
        parts += f" (with gradients and optimizer), and {cache} of policy.kv_cache_gib"
    remedy = f"free some, or take a smaller model: {parts} are wanted"
    yield at_least(MEMORY, "RAM free", free, wanted, "GiB", remedy, is_error=free < wanted / 2)


def check_disk(config: RunConfig) -> Iterator[Finding]:
    """Room for checkpoints where the run directory will be."""
    folder = Path(config.directory).expanduser().resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / GIB
    saved = SAVED_PER_PARAMETER_BYTES / 4 * model_gib(config.model)
    wanted = MIN_DISK_GIB + 3 * saved
    remedy = f'free some on the disk of {folder}, or set directory = "..." to another'
    yield at_least(MEMORY, "disk free", free, wanted, "GiB", remedy, is_error=free < 1)
    if not os.access(folder, os.W_OK):
        yield MEMORY.error(
            "run directory",
            f"{folder} cannot be written",
            "set directory to a folder that can",
        )


def check_shared_memory() -> Iterator[Finding]:
    """/dev/shm, which containers get 64 MB of unless told otherwise."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return
    free = shutil.disk_usage(path).free / GIB
    remedy = "docker run --shm-size=4g; on Kubernetes an emptyDir with medium: Memory at /dev/shm"
    yield at_least(MEMORY, "/dev/shm free", free, MIN_SHM_GIB, "GiB", remedy, is_error=False)


def check_limits() -> Iterator[Finding]:
    """Open files and processes that the shell allows."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    remedy = f"ulimit -n {MIN_FILES}, or LimitNOFILE of the service"
    yield _limit("open files", files, MIN_FILES, remedy)
    remedy = f"ulimit -u {MIN_PROCESSES}, or LimitNPROC of the service"
    yield _limit("processes", processes, MIN_PROCESSES, remedy)


def _limit(name: str, value: int, wanted: int, remedy: str) -> Finding:
    if value == resource.RLIM_INFINITY:
        return MACHINE.ok(name, "unlimited")
    return at_least(MACHINE, name, value, wanted, "allowed", remedy, is_error=False)


def model_gib(model: str) -> float:
    """Size of a model's weights as float32 in GiB, from its files; 0.0 where there are none."""
    from leeway.actors.config import model_dir

    folder = model_dir(model)
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return sum(sizes) * _bytes_to_float32(folder) / GIB


def _bytes_to_float32(folder: Path) -> int:
    """2 for weights stored in two bytes each."""
    import json

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return 1
    dtype = config.get("dtype") or config.get("torch_dtype")
    return 2 if dtype in ("bfloat16", "float16") else 1


def _available_gib() -> float:
    """What the kernel could hand out now without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / GIB


def _cgroup_free_gib(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """What the container may still use; infinity outside of one. Its file cache can go at once."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii").split()
    except OSError:
        return float("inf")
    if limit == "max":
        return float("inf")
    cache = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
    return (int(limit) - used + cache) / GIB
