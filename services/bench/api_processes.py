"""The processes of `leeway bench api`: workers that take orders, and the API as a run starts it.

Each has a session of its own, as the processes of a run have: Linux schedules sessions as groups.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from leeway.replay.errors import WaitTimeout
from leeway.services.config import REDIS_URL
from leeway.services.layout import RunDirectory
from leeway.services.supervision import end_with_parent, last_error

START_S: Final = 120.0
END_S: Final = 10.0
LOOK_S: Final = 0.05


class Worker:
    """A process that answers orders over a pipe."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process = context.Process(
            target=_in_a_session, args=(target, other, *arguments), daemon=True
        )
        self.process.start()
        other.close()

    def order(self, what: Any) -> None:
        """Begin something."""
        self._pipe.send(what)

    def result(self, timeout_s: float) -> Any:
        """What came of it. Raises WaitTimeout."""
        if not self._pipe.poll(timeout_s):
            name = self.process.name
            raise WaitTimeout(f"{name} gave no answer within {timeout_s:g} s; the bench is void")
        try:
            return self._pipe.recv()
        except EOFError:
            raise WaitTimeout(f"{self.process.name} ended; see why above") from None

    def end(self) -> None:
        """Tell it to end, and see that it does."""
        with suppress(BrokenPipeError):  # it has ended already
            self._pipe.send(None)
        self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(END_S)


def _in_a_session(target: Any, *arguments: Any) -> None:
    os.setsid()
    target(*arguments)


class Stoppable(Protocol):
    """What the windows need of the API."""

    def cpu_s(self) -> float: ...
    def stopped(self) -> Any: ...


class ServedApi:
    """`leeway api FILE --run-dir DIR`, by the same words as `leeway train` starts it with."""

    def __init__(self, url: str, run: RunDirectory, file: Path) -> None:
        """Returns when it listens. Raises WaitTimeout, with what its log says."""
        self._log = run.root / "api.log"
        words = ["-m", "leeway.services.cli", "api", str(file), "--run-dir", str(run.root)]
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env={**os.environ, REDIS_URL: url},
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.port = self._listening(run)

    def _listening(self, run: RunDirectory) -> int:
        deadline = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            state = run.read_state()
            if state is not None and state.pids.get("api") == self._process.pid:
                return int((state.api_address or "").rpartition(":")[2])
            time.sleep(LOOK_S)
        self.end()
        why = last_error(self._log) or f"it did not listen within {START_S:g} s"
        raise WaitTimeout(f"leeway api did not start ({why}); the bench is void")

    def cpu_s(self) -> float:
        """Processor seconds that it has taken, all threads."""
        # What clock_getcpuclockid(3) returns; Python has it for threads alone.
        return time.clock_gettime((~self._process.pid << 3) | 2)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """As if it were not there."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """SIGTERM, then SIGKILL."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
