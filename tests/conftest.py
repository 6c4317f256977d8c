"""The `leeway` command as a person runs it: a process of its own, and a look at what it leaves."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from leeway.services.layout import RunDirectory, RunState

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1


@dataclass(frozen=True)
class Ended:
    """A command that is over."""

    code: int
    out: str
    err: str
    left: list[str]
    """What it started that still runs (Ray's actors are processes), ports that are still open,
    folders and shared memory that it did not remove."""


class Command:
    """`leeway ARGUMENTS...` in a process group of its own, as a terminal starts it.

    Whatever it starts and does not end becomes a child of the test process (Linux's subreaper), so
    that nothing can hide. Use it in a `with`: what is left then is killed.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.folder = folder
        self._others = set(psutil.Process().children(recursive=True))
        self._output = [folder / f"stdout-{time.time_ns()}", folder / f"stderr-{time.time_ns()}"]
        self._runs_before = set(self._runs())
        self._scratch: set[str] = set()
        self._shared: set[str] = set()
        with self._output[0].open("wb") as out, self._output[1].open("wb") as err:
            self.process = subprocess.Popen(
                [Path(sys.executable).with_name("leeway"), *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [psutil.Process(self.process.pid)] if self.process.poll() is None else []:
            process.kill()
            self.process.wait()
        for process in self._left():
            process.kill()
        psutil.wait_procs(self._left(), timeout=10)

    @property
    def run(self) -> RunDirectory:
        """The run directory it made in FOLDER/runs; waits for it."""
        (path,) = self.until(lambda: self._runs() - self._runs_before, 30)
        return RunDirectory(path)

    def _runs(self) -> set[Path]:
        return {path.parent for path in self.folder.glob("runs/*/config.toml")}

    def state(self, run: RunDirectory) -> RunState:
        """What run.json says once this command has written it."""

        def written() -> RunState | None:
            state = run.read_state()
            return state if state and state.pids.get("train") == self.process.pid else None

        state = self.until(written, 60)
        environment = psutil.Process(state.pids["serve"]).environ()
        self._scratch.add(environment["TMPDIR"])
        return state

    def until(self, look: Callable[[], Any], timeout_s: float) -> Any:
        """Wait until `look` returns something; fails when the command ends before, or too late."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = look()
            if found:
                self._note_shared()
                return found
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                why = f"ended with {self.process.returncode}" if ended else f"{timeout_s} s passed"
                pytest.fail(f"{why} while waiting: {self._output[1].read_text()[-2000:]}")
            time.sleep(POLL_S)

    def signal(self, number: signal.Signals) -> None:
        """To its whole process group, as the terminal does on Ctrl-C."""
        self._note_shared()
        os.killpg(self.process.pid, number)

    def end(self, timeout_s: float, run: RunDirectory | None = None) -> Ended:
        """Wait for its end, and look at what it leaves."""
        state = run.read_state() if run is not None else None
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s} s: {self._output[1].read_text()[-2000:]}")
        out, err = (path.read_text() for path in self._output)
        left = [" ".join(process.cmdline())[:200] for process in self._left()]
        if state is not None and state.api_address is not None and _is_open(state.api_address):
            left.append(state.api_address)
        if run is not None and run.redis_url.is_file() and _is_open(run.read_redis_url()):
            left.append("redis")
        left += [path for path in self._scratch | self._shared if os.path.exists(path)]
        return Ended(code, out, err, left)

    def _note_shared(self) -> None:
        """Named shared memory that its processes hold now; that of others is not looked at."""
        for process in set(psutil.Process().children(recursive=True)) - self._others:
            with suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                words = (line.split(maxsplit=5) for line in maps)
                paths = {found[5] for found in words if len(found) > 5}
                self._shared |= {
                    p for p in paths if p.startswith("/dev/shm/") and os.path.exists(p)
                }

    def _left(self) -> list[psutil.Process]:
        """Living processes that were not there before; the dead among them are reaped."""
        found = set(psutil.Process().children(recursive=True)) - self._others
        dead = [process for process in found if process.status() == psutil.STATUS_ZOMBIE]
        psutil.wait_procs(dead, timeout=1)
        return [process for process in found - set(dead) if process.is_running()]


def _is_open(url: str) -> bool:
    port = int(url.rpartition(":")[2].partition("/")[0])
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def leeway() -> type[Command]:
    """The class: tests make one per command."""
    return Command
