"""The processes of `leeway bench api`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leeway.replay.errors import WaitTimeout
from leeway.services.api.priority import NICENESS
from leeway.services.bench.api_processes import ServedApi, Worker
from leeway.services.layout import RunDirectory

DEADLINE_S = 60


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "bench")
    directory.root.mkdir()
    return directory


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Nobody listens there: the API starts all the same."""
    return f"unix://{tmp_path}/none.sock"


def test_the_api_is_measured_as_a_run_starts_it(run: RunDirectory, url: str, tmp_path: Path):
    (tmp_path / "run.toml").write_text("")
    api = ServedApi(url, run, tmp_path / "run.toml")
    try:
        state = run.read_state()
        assert state is not None
        pid = state.pids["api"]
        assert (os.getsid(pid), os.getpriority(os.PRIO_PROCESS, pid) >= NICENESS) == (pid, True)
        assert api.cpu_s() > 0
        with api.stopped():
            until(lambda: states_of(pid) == {"T"})
            before = api.cpu_s()
            time.sleep(0.1)
            assert api.cpu_s() == before
        until(lambda: "T" not in states_of(pid))
    finally:
        api.end()
    assert not Path(f"/proc/{pid}").exists()


def test_an_api_that_does_not_start_says_why(run: RunDirectory, url: str, tmp_path: Path):
    (tmp_path / "run.toml").write_text("[api]\nprot = 1\n")
    with pytest.raises(WaitTimeout, match="did not start"):
        ServedApi(url, run, tmp_path / "run.toml")


def test_a_worker_has_a_session_of_its_own_and_ends_when_it_is_told():
    worker = Worker(_answer)
    worker.order("session")
    assert worker.result(DEADLINE_S) == worker.process.pid
    worker.end()
    assert worker.process.exitcode in (0, -signal.SIGKILL)


def test_a_worker_that_has_ended_is_named():
    worker = Worker(_end)
    with pytest.raises(WaitTimeout, match="ended"):
        worker.result(DEADLINE_S)
    worker.end()


def _answer(pipe: Any) -> None:
    while pipe.recv() is not None:
        pipe.send(os.getsid(0))


def _end(pipe: Any) -> None:
    pipe.close()


def until(is_so: Callable[[], bool]) -> None:
    """A signal takes its time."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def states_of(pid: int) -> set[str]:
    """Of its threads: they do not stop in one moment."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return {file.read_text().rpartition(")")[2].split()[0] for file in stats}
