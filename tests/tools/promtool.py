"""promtool for the tests: the one on the PATH, else the one of Debian's package `prometheus`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.tools.debian import program

RUN_S = 60


def promtool(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run it, with `text` as its input; skips the test, with the reason, where there is none."""
    return subprocess.run(
        [program("promtool", "prometheus"), *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
