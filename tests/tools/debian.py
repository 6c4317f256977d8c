"""Programs for the tests that Debian packages: the one on the PATH, else out of the package.

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


@cache
def program(name: str, package: str) -> Path:
    """Skips the test where there is no apt-get to fetch it with; fails where the fetch does."""
    on_path = shutil.which(name)
    if on_path is not None:
        return Path(on_path)
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "leeway-tests"
    folder.mkdir(parents=True, exist_ok=True)
    found = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests of several processes may come at once
        if not found.is_file():
            _fetch(package, found)
    return found


def _fetch(package: str, program: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        pytest.skip(f"{program.name} is not on the PATH, and there is no apt-get to fetch it with")
    with tempfile.TemporaryDirectory() as unpacked:
        fetched = subprocess.run(
            ["apt-get", "download", package],
            cwd=unpacked,
            capture_output=True,
            text=True,
            timeout=FETCH_S,
        )
        packages = list(Path(unpacked).glob(f"{package}_*.deb"))
        if fetched.returncode or not packages:
            # A skip would let faults through wherever the fetch once fails.
            pytest.fail(
                f"{program.name} cannot be fetched; put one on the PATH: "
                f"{fetched.stderr.strip()[-200:]}"
            )
        subprocess.run(["dpkg", "-x", packages[0], unpacked], check=True, timeout=FETCH_S)
        partial = program.with_suffix(f".{os.getpid()}")
        shutil.copy2(Path(unpacked) / "usr/bin" / program.name, partial)
        partial.replace(program)
