"""A place for the processes of one run."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
from collections.abc import Iterator

import psutil
import pytest

from .local_processes import SMALL, Place

PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A folder with small.toml. What was started in it is ended, with all that it started."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = set(psutil.Process().children(recursive=True))
    found = Place(tmp_path_factory.mktemp("place"))
    (found.folder / "small.toml").write_text(SMALL)
    yield found
    for process in found.processes:
        if process.is_alive:
            process.kill()
    left = set(psutil.Process().children(recursive=True)) - before
    for process in left:
        # Ray's own processes end each other while we go through them.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=10)
    shutil.rmtree(found.folder, ignore_errors=True)
