"""Child processes of a run: started in sessions of their own, ended in order, none left behind.

A child gets its own session, so that Ctrl-C in the terminal reaches only the parent, which then
ends the children in the order it wants. Should the parent be killed, the kernel ends the children.
Should a child be killed, the parent takes over what it had started (`adopt_orphans`) and ends that.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from psutil import Process

from leeway.replay.errors import LeewayError

__all__ = [
    "Child",
    "ChildDied",
    "Process",
    "adopt_orphans",
    "children",
    "descendants",
    "end_all",
    "end_family",
    "end_found",
    "end_with_parent",
    "family_of",
    "how_it_ended",
    "is_spared",
    "last_error",
    "run_spared",
    "start",
]

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

MAX_ROUNDS = 5
_spared: set[int] = set()
_LIBC = ctypes.CDLL(None)  # loaded here: nothing may be loaded between fork and exec

_CAUSE = re.compile(
    r"leeway: (?P<sentence>.+)"  # how the command line ends
    r"|(?:[a-z_]\w*\.)+(?P<ours>[A-Z]\w+: .+)"  # leeway.replay.errors.DataError: a.jsonl, ...
    r"|(?P<builtin>[A-Z]\w*Error: .+)"
    r"|\s+traceback : (?P<signal>Signal .+)"  # how torchrun says that a rank was killed
)
"""A line that says why a process failed."""


class ChildDied(LeewayError):
    """A process of the run ended by itself. One sentence with the cause, where its log has one."""

    def __init__(self, message: str, code: int | None = None) -> None:
        """`code`: what it exited with; negative for a signal, None where it never started."""
        super().__init__(message)
        self.code = code

    @property
    def is_failure(self) -> bool:
        """Whether it ended by an error of its own; a shell's 137 means that signal 9 ended it."""
        return self.code is not None and 0 < self.code < 128


@dataclass
class Child:
    """One process and where its output goes."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    log_start: int
    """Size of the log before this process: a resumed run appends to the same file."""

    async def ended(self) -> ChildDied:
        """Returns when the process is over, as an error that says how."""
        code = await self.process.wait()
        cause = last_error(self.log, self.log_start) if code > 0 else None
        why = f" ({cause})" if cause else ""
        how = how_it_ended(code)
        sentence = f"the {self.name} process ended with {how}{why}; its log is {self.log}"
        return ChildDied(sentence, code)

    async def kill(self) -> None:
        """SIGKILL, for one that hangs; what it started ends with it."""
        family = descendants(self.process.pid)
        with contextlib.suppress(ProcessLookupError):  # it may end at this very moment
            self.process.kill()
        await self.process.wait()
        await asyncio.to_thread(end_all, family, 0.0)

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, then after `grace_s` SIGKILL; what it started ends with it. Returns its exit
        code, negative for a signal."""
        family = descendants(self.process.pid)
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), grace_s)
            except TimeoutError:
                family += descendants(self.process.pid)
                with contextlib.suppress(ProcessLookupError):  # it has ended at this very moment
                    self.process.kill()
                await self.process.wait()
        await asyncio.to_thread(end_all, family)
        code = self.process.returncode
        assert code is not None
        return code


def how_it_ended(code: int) -> str:
    """`exit code 3` or `signal SIGKILL`."""
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


async def start(
    name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Child:
    """Run `python -m arguments...` with its output in `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    here = os.getpid()

    def end_with_us() -> None:
        end_with_parent()
        if os.getppid() != here:  # it died before the line above
            os._exit(1)

    with log.open("ab") as sink:
        log_start = sink.tell()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=end_with_us,
        )
    return Child(name, process, log, log_start)


def end_with_parent() -> None:
    """The kernel sends this process SIGTERM when the thread that started it ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies."""
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def last_error(log: Path, start: int = 0) -> str | None:
    """The last line of a log, from byte `start`, that says why a process failed; None without one.

    "leeway.learner.errors.NonFiniteError: the loss is nan" -> "NonFiniteError: the loss is nan"
    """
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - 65536))
        lines = file.read().decode(errors="replace").splitlines()
    found = next((match for line in reversed(lines) if (match := _CAUSE.match(line))), None)
    return None if found is None else str(found[found.lastgroup or 0])[:500]


def children(pid: int) -> list[psutil.Process]:
    """Every process whose parent is `pid`, the dead that wait to be reaped included."""
    try:
        return psutil.Process(pid).children()
    except psutil.Error:
        return []


def run_spared(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command of this process's own, which is no orphan of a dead child (see is_spared).
    Raises subprocess.TimeoutExpired, the command having been killed."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        _spared.add(process.pid)
        try:
            out, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
        finally:
            _spared.discard(process.pid)
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def is_spared(process: psutil.Process) -> bool:
    """Whether it is a command that `run_spared` has started."""
    return process.pid in _spared


def descendants(pid: int) -> list[psutil.Process]:
    """Every living process below `pid`."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def family_of(pid: int) -> list[tuple[int, list[str]]]:
    """Process id and command line of `pid` and all below it that still live; empty where none
    does."""
    found: list[tuple[int, list[str]]] = []
    for process in _itself(pid) + descendants(pid):
        try:
            found.append((process.pid, process.cmdline() or [process.name()]))
        except psutil.Error:
            continue  # over meanwhile
    return found


def _itself(pid: int) -> list[psutil.Process]:
    try:
        return [psutil.Process(pid)]
    except psutil.Error:
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


def end_family(pid: int, grace_s: float) -> None:
    """End the process and all below it, gently first."""
    end_all(_itself(pid) + descendants(pid), grace_s)


def end_found(find: Callable[[], Sequence[psutil.Process]]) -> None:
    """End what `find` finds until it finds nothing: one that ends may have started another."""
    for _ in range(MAX_ROUNDS):
        found = find()
        if not found:
            return
        end_all(found)
    if left := find():
        log.error("still there after %d rounds of SIGKILL: %s", MAX_ROUNDS, left)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        return
