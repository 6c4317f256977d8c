"""promtool for the tests: the one on the PATH, else the one of Debian's package `prometheus`.

The package is unpacked, not installed, into a folder of the user's cache; nothing is fetched twice.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

FETCH_S = 120
RUN_S = 60


def promtool(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run it, with `text` as its input; skips the test, with the reason, where there is none."""
    return subprocess.run(
        [path(), *map(str, arguments)], input=text, capture_output=True, text=True, timeout=RUN_S
    )


@cache
def path() -> Path:
    """The program. Skips the test where it is neither here nor to be had."""
    on_path = shutil.which("promtool")
    if on_path is not None:
        return Path(on_path)
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "leeway-tests"
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "promtool"
    with (folder / "promtool.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests of several processes may come at once
        if not program.is_file():
            _fetch(program)
    return program


def _fetch(program: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        pytest.skip("promtool is not on the PATH, and there is no apt-get to fetch it with")
    with tempfile.TemporaryDirectory() as unpacked:
        fetched = subprocess.run(
            ["apt-get", "download", "prometheus"],
            cwd=unpacked,
            capture_output=True,
            text=True,
            timeout=FETCH_S,
        )
        packages = list(Path(unpacked).glob("prometheus_*.deb"))
        if fetched.returncode or not packages:
            # A skip would let broken rules through wherever the fetch once fails.
            pytest.fail(
                f"promtool cannot be fetched; put one on the PATH: {fetched.stderr.strip()[-200:]}"
            )
        subprocess.run(["dpkg", "-x", packages[0], unpacked], check=True, timeout=FETCH_S)
        partial = program.with_suffix(f".{os.getpid()}")
        shutil.copy2(Path(unpacked) / "usr/bin/promtool", partial)
        partial.replace(program)
