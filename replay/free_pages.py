"""How glibc's allocator is set up in the processes of a run, and when it gives memory back.

A run's processes ask for the same large blocks in each step, so what is free is kept. But a block
that was needed once, by an evaluation or the longest batch so far, is kept as well; and each thread
has an arena of its own that keeps its own largest. Without a limit to both, memory climbs for as
long as there is a new largest.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from typing import Final

FEW_ARENAS: Final = {"MALLOC_ARENA_MAX": "2"}
"""Environment of every process. glibc makes eight arenas for each core, and a thread that finds
one locked goes on to the next: their free memory adds up. Two are enough for processes in which
one thread does nearly all of the work."""
LARGE_BLOCKS: Final = {
    # Large blocks are kept instead of being handed back and zeroed again each time.
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**31),
}
"""Environment of those that compute."""

EVERY_S: Final = 60.0

_given_back_at = -EVERY_S


def give_back() -> None:
    """Hand free pages back to the kernel, at most every EVERY_S: a step takes them again, and each
    is then zeroed. Does nothing where the C library is not glibc."""
    global _given_back_at
    now = time.monotonic()
    if now - _given_back_at < EVERY_S:
        return
    _given_back_at = now
    _trim()


async def keep_giving_back() -> None:
    """Hand free pages back every EVERY_S, until cancelled: for processes whose work has no natural
    pause. It takes a few milliseconds.

    A replica of Ray Serve needs it most. Ray allocates a stack of 256 KiB for each call under way
    and touches a few pages of it, each time elsewhere in what earlier stacks have left: without
    this the whole of that room becomes memory in the course of hours.
    """
    while True:
        await asyncio.sleep(EVERY_S)
        _trim()


class _MallInfo2(ctypes.Structure):
    """What glibc 2.33 and later say of their heap, in bytes; see mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated_bytes() -> int | None:
    """Bytes that this process has asked the C library for and not freed: what it holds, whatever
    the library keeps besides. None where the C library does not say."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _MallInfo2
    found = ask()
    return found.uordblks + found.hblkhd


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
