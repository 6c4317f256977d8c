"""Freed memory stays with a process that moves groups, unless its environment says otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

PAGE_FAULTS = """
import resource
from leeway.replay.allocator import keep_freed_memory
print(keep_freed_memory() if {is_kept} else None)
blocks = [bytes(65536) for _ in range(64)]
del blocks
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    blocks = [bytes(65536) for _ in range(64)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(is_kept: bool, **environment: str) -> tuple[str, int]:
    """What keep_freed_memory returned, and pages mapped by 20 times the 4 MiB of before."""
    done = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS.format(is_kept=is_kept)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    outcome, number = done.stdout.split()
    return outcome, int(number)


@pytest.mark.skipif(sys.platform != "linux", reason="bounds of glibc")
def test_what_was_freed_is_used_again_without_mapping_its_pages_anew():
    outcome, kept = faults(True)
    _, given_back = faults(False)
    assert outcome == "True"
    assert kept < 1024 < 10 * 1024 < given_back


@pytest.mark.skipif(sys.platform != "linux", reason="bounds of glibc")
def test_bounds_of_the_environment_stand():
    assert faults(True, MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
    # It bounds nothing that is freed.
    assert faults(True, MALLOC_ARENA_MAX="2")[0] == "True"
