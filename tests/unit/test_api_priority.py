"""The API steps back: behind the others of its session, and its session behind others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from leeway.services.api.priority import NICENESS

GROUP = Path("/proc/self/autogroup")
CODE = """
import os, threading
from leeway.services.api.priority import step_back
os.nice({before} and {before} - os.nice(0))  # to it, from wherever the tests run
step_back()
seen = []
thread = threading.Thread(target=lambda: seen.append(os.getpriority(os.PRIO_PROCESS, 0)))
thread.start()
thread.join()
print(os.getpriority(os.PRIO_PROCESS, 0), *seen)
try:
    print(open("/proc/self/autogroup").read().strip() or "none")
except OSError:
    print("none")
"""


def stepped_back(before: int = 0, *, has_session: bool = True) -> tuple[list[int], str]:
    """Niceness of the process and of a thread it starts, and the group of its session."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(before=before)],
        capture_output=True, check=True, text=True, timeout=60, start_new_session=has_session,
    )  # fmt: skip
    nice, session = done.stdout.splitlines()
    return [int(one) for one in nice.split()], session


def test_it_and_what_it_starts_are_nicer_than_an_ordinary_process():
    here = subprocess.run(
        [sys.executable, "-c", "import os; print(os.nice(0))"],
        capture_output=True, check=True, text=True, timeout=60,
    )  # fmt: skip
    nice = max(NICENESS, int(here.stdout))
    assert stepped_back()[0] == [nice, nice]


def test_a_process_that_is_lower_already_stays_there():
    assert stepped_back(19)[0] == [19, 19]


@pytest.mark.skipif(not GROUP.exists(), reason="this kernel has no sched_autogroup")
def test_a_session_of_its_own_steps_back_and_one_that_is_shared_does_not():
    assert stepped_back()[1].endswith(f" nice {NICENESS}")
    # What the kernel started itself, and all in its session, has no group: the file is empty.
    assert stepped_back(has_session=False)[1] == (GROUP.read_text().strip() or "none")
