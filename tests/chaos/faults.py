"""What is done to a run: each fault begins, lasts for some seconds, and is taken back."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import psutil

from leeway.services.soak.roles import role_of
from tests.chaos import stage as staging
from tests.chaos.shim import Shim
from tests.chaos.stage import Stage

ENGINES: Final = ("engine", "policy replica")
"""Of vLLM the engine is a process below the replica; the torch policy is the replica itself."""
ROLES: Final = ("rollout worker", "engine", "retriever", "learner", "redis", "serve", "api")
KINDS: Final = ("kill", "stop", "starve", "cut off", "fill", "slow", "set")
PARENT: Final = "train"
"""`leeway train` itself: it watches the others, and nobody watches it but its operator."""
NO_PROCESS: Final = ("everybody", "disk", "clock")
TARGETS: Final = (*ROLES, PARENT, *NO_PROCESS)
STARVED: Final = ("rollout worker", "engine", "retriever", "learner", "redis")
CLOCKS_S: Final = (3600.0, -3600.0, 86400.0, -5.0, 0.0)


class NobodyThere(Exception):
    """No process has the role at this moment, or it has ended before it was hit."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault, at whom."""

    kind: str
    target: str

    @property
    def name(self) -> str:
        return f"{self.kind} {self.target}"


@dataclass(frozen=True)
class Means:
    """What faults are made with."""

    stage: Stage
    shim: Shim
    rng: random.Random
    redis_port: Callable[[], int]


def all_faults() -> list[Fault]:
    """Every kind at every target it makes sense for."""
    faults = [Fault(kind, role) for kind in ("kill", "stop") for role in ROLES]
    faults += [Fault("starve", role) for role in STARVED]
    faults.append(Fault("kill", PARENT))
    faults += [Fault("cut off", "everybody"), Fault("fill", "disk"), Fault("slow", "disk")]
    faults += [Fault("set", "clock")]
    if staging.has_packet_filter():
        faults.append(Fault("cut off", "redis"))
    return faults


def processes_of(role: str) -> list[psutil.Process]:
    """Living processes of a role, the eldest first; nothing but the run lives on the stage."""
    wanted = ENGINES if role == "engine" else (role,)
    found: dict[str, list[psutil.Process]] = {name: [] for name in wanted}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            own = role_of(" ".join(process.cmdline()))
            if own in found and process.status() != psutil.STATUS_ZOMBIE:
                found[own].append(process)
    for name in wanted:
        if found[name]:
            return sorted(found[name], key=lambda process: process.create_time())
    return []


def processes_left() -> list[str]:
    """Command lines of what still lives on the stage, this process and its dead left out."""
    found: list[str] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:200])
    return found


def victim(role: str, rng: random.Random) -> psutil.Process:
    """A process of a role, to be hit. Raises NobodyThere."""
    found = processes_of(role)
    if not found:
        raise NobodyThere(role)
    return rng.choice(found)


@contextmanager
def applied(fault: Fault, means: Means) -> Iterator[float]:
    """Begin the fault; yields for how many seconds it is to last; takes it back."""
    begin = _BEGIN[fault.kind](fault.target, means)
    try:
        seconds = begin.__enter__()
    except (psutil.NoSuchProcess, ProcessLookupError):
        raise NobodyThere(fault.target) from None
    try:
        yield seconds
    finally:
        begin.__exit__(None, None, None)


@contextmanager
def _kill(role: str, means: Means) -> Iterator[float]:
    victim(role, means.rng).kill()
    yield 0.0


@contextmanager
def _stop(role: str, means: Means) -> Iterator[float]:
    process = victim(role, means.rng)
    process.send_signal(signal.SIGSTOP)
    try:
        yield means.rng.uniform(2, 8)
    finally:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)


@contextmanager
def _starve(role: str, means: Means) -> Iterator[float]:
    """Not a page more than it has now: what asks for one is refused."""
    process = victim(role, means.rng)
    before = resource.prlimit(process.pid, resource.RLIMIT_AS)
    limit = (process.memory_info().vms + 4096, before[1])
    resource.prlimit(process.pid, resource.RLIMIT_AS, limit)
    try:
        yield means.rng.uniform(3, 6)
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_AS, before)


@contextmanager
def _cut_off(target: str, means: Means) -> Iterator[float]:
    seconds = means.rng.uniform(2, 6)
    if target == "everybody":
        staging.set_loopback(is_up=False)
        try:
            yield seconds
        finally:
            staging.set_loopback(is_up=True)
        return
    port = means.redis_port()
    staging.cut_port(port, is_cut=True)
    try:
        yield seconds
    finally:
        staging.cut_port(port, is_cut=False)


@contextmanager
def _fill(_: str, means: Means) -> Iterator[float]:
    means.stage.fill_disk()
    try:
        yield means.rng.uniform(2, 5)
    finally:
        means.stage.empty_disk()


@contextmanager
def _slow(_: str, means: Means) -> Iterator[float]:
    means.shim.slow_disk(0.2)
    try:
        yield means.rng.uniform(4, 8)
    finally:
        means.shim.slow_disk(0.0)


@contextmanager
def _set_clock(_: str, means: Means) -> Iterator[float]:
    """It stays wrong until the next such fault."""
    means.shim.set_clock(means.rng.choice(CLOCKS_S))
    yield 0.0


_BEGIN: Final[dict[str, Callable[[str, Means], AbstractContextManager[float]]]] = {
    "kill": _kill,
    "stop": _stop,
    "starve": _starve,
    "cut off": _cut_off,
    "fill": _fill,
    "slow": _slow,
    "set": _set_clock,
}
