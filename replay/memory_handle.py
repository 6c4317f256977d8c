"""What tells a process where another one's memory is; see exposed_memory.py.

It travels by the policy board, whose other users need no torch.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES: Final = ("pid", "ipc")
"""Processes that do not share these cannot reach each other's memory."""


class MemoryHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What another process of this machine needs to open exposed memory."""

    pid: int
    token: str
    """Tells this memory from all others."""
    num_bytes: int
    fd: int = -1
    """Of the file in memory, in the process that exposes it; -1 on a GPU."""
    cuda: bytes = b""
    """What cudaIpcGetMemHandle gave, for the allocation."""
    offset: int = 0
    """Where in the allocation the memory begins."""
    counter: bytes = b""
    counter_offset: int = 0
    """Where torch counts who holds it."""


@cache
def machine() -> str:
    """What processes have in common that can open each other's memory."""
    spaces = (os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES)
    return " ".join((_BOOT.read_text(encoding="ascii").strip(), *spaces))
