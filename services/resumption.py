"""What a learner that goes on does with the lines of the steps that were lost with the one before.

Killed at step 7 with a checkpoint of step 4, it trains steps 5 to 7 again. The run directory holds
one line for each step, so the old ones go.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


def cut_steps(metrics: Path, version: int) -> int:
    """Leave the lines of steps up to `version`; returns how many went. A last line that was cut in
    writing goes too.

    Lines of steps 1 to 7, version 4 -> those of 1 to 4 stay, 3 went.
    """
    if not metrics.is_file():
        return 0
    lines = metrics.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) <= version]
    if len(kept) < len(lines):
        partial = metrics.with_name(f".{metrics.name}.{os.getpid()}")
        partial.write_bytes(b"".join(kept))
        partial.replace(metrics)
    return len(lines) - len(kept)


def _step_of(line: bytes) -> float:
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")
