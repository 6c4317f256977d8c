"""After an error the learner ends, also where a thread that it starts never begins."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from leeway.services.metering import Metering
from leeway.services.sinks.delivery import Sinks

HANGS = """
import threading
from leeway.services.ending import end_within
end_within(1)
threading.Event().wait({seconds})
"""


@pytest.mark.parametrize(("seconds", "code"), [("", -signal.SIGALRM), ("0.01", 0)])
def test_a_process_that_hangs_is_ended_and_one_that_does_not_ends_by_itself(
    seconds: str, code: int
):
    ended = subprocess.run(
        [sys.executable, "-c", HANGS.format(seconds=seconds)], timeout=100, check=False
    )
    assert ended.returncode == code


async def test_without_sinks_the_end_of_a_run_starts_no_thread(monkeypatch: pytest.MonkeyPatch):
    metering = object.__new__(Metering)
    metering._has_finished, metering._sinks = False, Sinks({})
    monkeypatch.setattr("threading.Thread.start", lambda _: pytest.fail("a thread was started"))
    await metering.finish()
    assert metering.finish_s == 0
