"""Memory, files and threads of every process of a run, summed by role; read from /proc."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from leeway.services.soak.roles import role_of
from leeway.services.soak.samples import Figure
from leeway.services.supervision import descendants

PROC: Final = Path("/proc")
KIB: Final = 1024


def process_figures(root: int, left_out: Iterable[int] = ()) -> list[Figure]:
    """Of `root`, the process of `leeway train`, and all below it.

    own_bytes     anonymous memory, shared pages divided by their sharers: heaps, stacks, arenas
    shared_bytes  shared memory, divided by its sharers
    file_bytes    pages of mapped files, divided by their sharers, on the whole machine
    """
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for pid in _family(root, set(left_out)):
        try:
            role = "train" if pid == root else role_of(_command_line(pid))
            measured = dict(_of_process(pid))
        except OSError:
            continue  # it ended meanwhile
        for measure, value in measured.items():
            sums[role, measure] += value
    return [Figure(role, measure, value) for (role, measure), value in sorted(sums.items())]


def option_of(root: int, option: str) -> set[str]:
    """What the processes of a run were given as `--temp_dir=`, for example."""
    found: set[str] = set()
    for pid in _family(root, set()):
        try:
            words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {w.decode().partition("=")[2] for w in words if w.startswith(option.encode())}
    return found


def environment_of(root: int, variable: str) -> set[str]:
    """Values of an environment variable over the processes below `root`."""
    found: set[str] = set()
    for pid in _family(root, set()):
        try:
            entries = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        start = f"{variable}=".encode()
        found |= {e.decode().partition("=")[2] for e in entries if e.startswith(start)}
    return found


def _family(root: int, left_out: set[int]) -> list[int]:
    return [pid for pid in (root, *(p.pid for p in descendants(root))) if pid not in left_out]


def _command_line(pid: int) -> str:
    return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _of_process(pid: int) -> Iterator[tuple[str, float]]:
    folder = PROC / str(pid)
    rollup = dict(_numbers(folder / "smaps_rollup"))
    yield "own_bytes", KIB * rollup["Pss_Anon"]
    yield "shared_bytes", KIB * rollup["Pss_Shmem"]
    yield "file_bytes", KIB * rollup["Pss_File"]
    yield "open_files", len(os.listdir(folder / "fd"))
    yield "threads", dict(_numbers(folder / "status"))["Threads"]
    yield "processes", 1


def _numbers(file: Path) -> Iterator[tuple[str, int]]:
    """Lines such as `Pss_Anon:   512 kB`."""
    for line in file.read_text().splitlines():
        name, _, rest = line.partition(":")
        value = rest.split()
        if value and value[0].isdigit():
            yield name, int(value[0])
