"""Child processes of a run: started in sessions of their own, ended in order, none left behind.

A child gets its own session, so that Ctrl-C in the terminal reaches only the parent, which then
ends the children in the order it wants. Should the parent be killed, the kernel ends the children.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from leeway.replay.errors import LeewayError

PR_SET_PDEATHSIG = 1


class ChildDied(LeewayError):
    """A process of the run ended by itself; the message carries the end of its log."""


@dataclass
class Child:
    """One process and where its output goes."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    def tail(self, num_lines: int = 6) -> str:
        """The end of its log, for an error message."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(line for line in lines[-40:] if line.strip())[-2000:] if lines else ""

    async def ended(self) -> ChildDied:
        """Returns when the process is over, as an error that says how."""
        code = await self.process.wait()
        return ChildDied(
            f"the {self.name} process ended with exit code {code}; "
            f"its log is {self.log}\n{self.tail()}"
        )

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then after `grace_s` SIGKILL; what it started ends with it."""
        family = descendants(self.process.pid)
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), grace_s)
            except TimeoutError:
                family += descendants(self.process.pid)
                self.process.kill()
                await self.process.wait()
        await asyncio.to_thread(end_all, family)


async def start(
    name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Child:
    """Run `python -m arguments...` with its output in `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    return Child(name, process, log)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def descendants(pid: int) -> list[psutil.Process]:
    """Every living process below `pid`."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end_all(processes: Sequence[psutil.Process], grace_s: float = 5.0) -> None:
    """End exactly these processes, gently first."""
    alive = [process for process in processes if process.is_running()]
    for process in alive:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(alive, timeout=grace_s)
    for process in alive:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=grace_s)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
