"""What a bench returns: a table for people, and keys for one JSON line."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BenchResult:
    """One bench, run once. Every figure is measured against its baseline in the same run."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """One per measured case; as many cells as there are columns."""
    keys: dict[str, float | int | str]
    """What `--json` prints, besides name and machine; the table ends with them."""
    note: str = ""
    """Stands behind the name, above the table."""
    cell_keys: dict[str, float | int | str] = field(default_factory=dict[str, float | int | str])
    """What `--json` prints besides, and the table has in its rows already."""

    @property
    def title(self) -> str:
        """bench stability, cut down to 6 steps"""
        return f"bench {self.name}, {self.note}" if self.note else f"bench {self.name}"


def machine() -> str:
    """The processor, how many cores this process may use, and the GPU if there is one."""
    cores = f"{_processor()}, {len(os.sched_getaffinity(0))} cores"
    import torch

    threads = f"{torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        return f"{cores}, {threads}"
    return f"{torch.cuda.get_device_name()}, {cores}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0].strip() if names else platform.machine()
