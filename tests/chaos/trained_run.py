"""`leeway train` on a stage, and what can be seen of it from outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from leeway.services.layout import RunDirectory
from leeway.services.supervision import last_error

HOOK: Final = Path(__file__).with_name("hook")
_TIME: Final = r"(?P<time>[\d-]+ [\d:]+),\d+ "
BEGUN: Final = re.compile(_TIME + r".*Adding 1 replica to Deployment\(name='PolicyServer'")
SERVING: Final = re.compile(_TIME + r".*waiting up to [\d.]+ s for Redis")
READY: Final = re.compile(_TIME + r".*applications ready after (?P<seconds>[\d.]+) s")
START_S: Final = 600.0
ASK_S: Final = 3.0


class TrainedRun:
    """One run. It is resumed in the same directory whenever `leeway train` itself is gone."""

    def __init__(self, folder: Path, log: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._log = log
        self._environment = {**os.environ, **environment, "PYTHONPATH": str(HOOK)}
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self.run: RunDirectory | None = None

    def start(self, arguments: Sequence[str]) -> None:
        """Begin the run, and wait until its directory is there."""
        self._spawn(["train", *arguments])
        deadline = time.monotonic() + START_S
        while not (found := sorted(self._folder.glob("*/config.toml"))):
            assert self.is_alive and time.monotonic() < deadline, self.last_words()
            time.sleep(0.2)
        self.run = RunDirectory(found[0].parent)

    def resume(self) -> None:
        """Go on with the run as its operator would."""
        assert self.run is not None
        self._spawn(["train", "--resume", str(self.run.root), "--json"])

    def _spawn(self, arguments: Sequence[str]) -> None:
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "leeway.services.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
                env=self._environment,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """Exit code. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def stop(self, timeout_s: float) -> None:
        """SIGTERM, as an operator would. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, for a run that hangs; what it started ends with it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(ASK_S)

    def last_words(self) -> str:
        """Why `leeway train` ended, in its own words."""
        said = last_error(self._log, self._log_start) if self._log.exists() else None
        return said or f"exit code {self.exit_code}"

    @property
    def backend(self) -> str:
        """Of the engine."""
        assert self.run is not None
        return self.run.read_config().policy.backend

    def start_s(self, target: str) -> float:
        """How long this takes to start, by the log of the run's beginning: the engine alone, or Ray
        and all Serve applications. 0 where the log does not say."""
        assert self.run is not None
        log = self.run.log("serve").read_text(errors="replace")
        return _engine_start_s(log) if target == "engine" else _applications_start_s(log)

    @property
    def last_step(self) -> str:
        """The line of the last optimizer step; "" before one."""
        assert self.run is not None
        try:
            lines = self.run.metrics.read_text().splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""

    @property
    def redis_port(self) -> int:
        assert self.run is not None
        return int(self.run.read_redis_url().rpartition(":")[2].partition("/")[0])

    def answers(self) -> bool:
        """Whether the API does."""
        assert self.run is not None
        with suppress(OSError, AttributeError):
            address = self.run.read_state().api_address  # type: ignore[union-attr]
            with urllib.request.urlopen(f"{address}/livez", timeout=ASK_S) as answer:
                return answer.status == 200
        return False

    def summary(self) -> dict[str, Any]:
        """Of a run that is through; empty before."""
        assert self.run is not None
        with suppress(OSError, json.JSONDecodeError):
            return json.loads(self.run.summary.read_text())
        return {}


def _engine_start_s(log: str) -> float:
    begun, ready = BEGUN.search(log), READY.search(log)
    if begun is None or ready is None:
        return 0.0
    first, last = (datetime.fromisoformat(found["time"]) for found in (begun, ready))
    return (last - first).total_seconds()


def _applications_start_s(log: str) -> float:
    begun, ready = SERVING.search(log), READY.search(log)
    if begun is None or ready is None:
        return 0.0
    first, last = (datetime.fromisoformat(found["time"]) for found in (begun, ready))
    return (last - first).total_seconds()
