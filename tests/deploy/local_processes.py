"""Processes of one run, started one by one as a container would start them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from leeway.services.layout import RunDirectory

BIN = Path(sys.executable).parent

SMALL = """
name = "small"

[policy]
backend = "torch"
max_model_len = 320

[search]
max_turns = 2
max_turn_tokens = 8
max_observation_tokens = 64

[rollout]
group_size = 2
max_groups_in_flight = 4

[replay]
groups_per_step = 2
max_staleness = 1

[learner]
num_steps = 6
checkpoint_every = 2
micro_batch_tokens = 512

[eval]
num_questions = 0
"""
"""A run of the bundled policy that takes seconds a step on one core."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Process:
    """One of them."""

    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def is_alive(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        """SIGKILL, as the kernel does when memory runs out."""
        self.popen.kill()
        self.popen.wait()

    def stop(self, timeout_s: float = 90) -> int:
        """SIGTERM, as a kubelet does; the exit code."""
        self.popen.terminate()
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.log.stem} still runs {timeout_s} s after SIGTERM: {self.tail}")

    @property
    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


@dataclass
class Place:
    """A folder, and the processes that were started in it."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)

    def start(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        only: Mapping[str, str] | None = None,
        log: str | None = None,
    ) -> Process:
        """Run a command of the virtual environment with no variable of ours but those given; with
        `only` none but these, as in a container."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("LEEWAY_", "RAY_"))}
        full = {**inherited, **self.environment, **(environment or {})}
        log_file = self.folder / f"{log or command[1]}-{len(self.processes)}.log"
        with log_file.open("wb") as sink:
            popen = subprocess.Popen(
                [BIN / command[0] if (BIN / command[0]).exists() else command[0], *command[1:]],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=full if only is None else dict(only),
                start_new_session=True,
            )
        self.processes.append(Process(popen, log_file))
        return self.processes[-1]

    def until(self, look: Callable[[], Any], timeout_s: float, *alive: Process) -> Any:
        """What `look` returns once it is true; fails when one of `alive` ends before."""
        deadline = time.monotonic() + timeout_s
        while not (found := look()):
            over = next((process for process in alive if not process.is_alive), None)
            if over is not None:
                pytest.fail(f"{over.log.stem} ended with {over.popen.returncode}: {over.tail}")
            if time.monotonic() > deadline:
                tails = "\n".join(f"--- {p.log.stem}\n{p.tail}" for p in self.processes)
                pytest.fail(f"{timeout_s} s passed: {tails}")
            time.sleep(0.1)
        return found


def steps_of(run: RunDirectory) -> list[int]:
    """Optimizer steps in metrics.jsonl, in the order they were made."""
    if not run.metrics.is_file():
        return []
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


def children_of(process: Process) -> list[psutil.Process]:
    return psutil.Process(process.popen.pid).children(recursive=True)


def left_of(processes: list[psutil.Process], timeout_s: float = 60) -> list[str]:
    """Names of those that have not ended within `timeout_s`; a zombie has."""
    deadline = time.monotonic() + timeout_s
    while True:
        alive = [process for process in processes if _is_alive(process)]
        if not alive or time.monotonic() > deadline:
            return [str(process) for process in alive]
        time.sleep(0.2)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
