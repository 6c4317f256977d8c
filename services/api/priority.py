"""The API steps back behind the processes that learn and generate: who waits for an answer can wait
for a step."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

NICENESS: Final = 5
"""A third of the weight of an ordinary process. It no longer takes a core from one that works when
a request comes, and still answers where many processes want every core."""
_SESSION: Final = Path("/proc/self/autogroup")


def step_back() -> None:
    """Let every process of ordinary priority go first; one that is lower already stays there.

    Threads that run already keep theirs, so call it first.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    if os.getsid(0) == os.getpid():
        # Linux may share a core out among sessions first (sched_autogroup): within one of its own a
        # process is nice to nobody. Where it does not, the file is missing, or nobody reads it.
        with suppress(OSError):
            _SESSION.write_text(str(NICENESS), encoding="ascii")
