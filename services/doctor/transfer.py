"""How fast weights travel between two processes of this machine, by the way a run sends them.

Two ranks of a transfer group, over NCCL where there are two GPUs and gloo on CPUs otherwise, in
processes of their own: the doctor itself imports no torch.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from multiprocessing.context import SpawnProcess
from typing import Any, Final, Protocol

import msgspec

from leeway.services.doctor.finding import Finding, Part

TRANSFER = Part("transfer")

NUM_BYTES: Final = 64 * 2**20
"""One bucket of a publish."""
NUM_REPEATS: Final = 8
TIMEOUT_S: Final = 90.0
"""For both processes to import torch, meet and send."""
JOIN_S: Final = 60.0
SLOW_GIB_S: Final = {"gloo": 0.2, "nccl": 5.0}
"""Below this something is wrong: NVLink gives 300, PCIe 20, loopback 1 to 3."""


class Pipe(Protocol):
    """An end of multiprocessing's pipe; what it carries is msgspec's JSON."""

    def poll(self, timeout: float = 0.0, /) -> bool: ...
    def recv_bytes(self) -> bytes: ...
    def send_bytes(self, buf: bytes, /) -> None: ...


class Report(msgspec.Struct):
    """What a rank says through its pipe: the port it listens on, its result, or its fault."""

    port: int = 0
    gib_per_s: float = 0.0
    fault: str = ""


def check_transfer(num_gpus: int) -> Iterator[Finding]:
    """Broadcast a bucket a few times; an error where it cannot be done."""
    backend = "nccl" if num_gpus >= 2 else "gloo"
    between = "two GPUs" if num_gpus >= 2 else "two CPU processes"
    yield finding_of(measure(backend), backend, between)


def finding_of(report: Report, backend: str, between: str) -> Finding:
    """The finding for what rank 0 reported."""
    if report.fault:
        remedy = {
            "gloo": "let processes reach each other over the loopback interface",
            "nccl": "NCCL_DEBUG=INFO leeway doctor says why; /dev/shm may be too small",
        }
        return TRANSFER.error(backend, report.fault, remedy[backend])
    speed = report.gib_per_s
    text = f"{speed:,.2f} GiB/s between {between}"
    if speed < SLOW_GIB_S[backend]:
        remedy = {
            "gloo": "end what else uses the cores",
            "nccl": "see nvidia-smi topo -m: the GPUs may reach each other through the host alone",
        }
        return TRANSFER.warning(backend, text, remedy[backend], gib_per_s=round(speed, 3))
    return TRANSFER.ok(backend, text, gib_per_s=round(speed, 3))


def measure(backend: str) -> Report:
    """Start both ranks, carry the port from one to the other, and wait for rank 0's result."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(2)]
    ranks = [
        context.Process(target=_rank, args=(theirs, rank, backend), daemon=True)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    for process in ranks:
        process.start()
    try:
        return _conduct([ours for ours, _ in pairs], ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join(10)


def _conduct(pipes: Sequence[Pipe], ranks: Sequence[SpawnProcess]) -> Report:
    deadline = time.monotonic() + TIMEOUT_S
    meeting = _next_report(pipes[0], ranks[0], deadline)
    if meeting.fault:
        return meeting
    pipes[1].send_bytes(msgspec.json.encode(meeting))
    return _next_report(pipes[0], ranks[0], deadline)


def _next_report(pipe: Pipe, process: SpawnProcess, deadline: float) -> Report:
    while not pipe.poll(0.1):
        if not process.is_alive() and not pipe.poll(0):
            return Report(fault=f"the sending process ended with exit code {process.exitcode}")
        if time.monotonic() > deadline:
            return Report(fault=f"two processes could not send to each other in {TIMEOUT_S:g} s")
    try:
        return msgspec.json.decode(pipe.recv_bytes(), type=Report)
    except EOFError:
        return Report(fault="the sending process ended without a word")


def _rank(pipe: Pipe, rank: int, backend: str) -> None:
    """A process: rank 0 listens and sends, rank 1 is told the port and receives."""
    from leeway.replay.errors import LeewayError
    from leeway.services.doctor.transfer_rank import Meeting

    try:
        meeting = Meeting.listen(backend) if rank == 0 else _joined(pipe, backend)
        if rank == 0:
            pipe.send_bytes(msgspec.json.encode(Report(port=meeting.port)))
        seconds = meeting.broadcast(NUM_BYTES, NUM_REPEATS)
        speed = NUM_BYTES / 2**30 / statistics.median(seconds)
        pipe.send_bytes(msgspec.json.encode(Report(gib_per_s=speed)))
        if rank == 0:
            time.sleep(1)  # its store serves the other rank until that has read the last bytes
    except LeewayError as error:
        pipe.send_bytes(msgspec.json.encode(Report(fault=str(error))))


def _joined(pipe: Pipe, backend: str) -> Any:
    from leeway.replay.errors import WaitTimeout
    from leeway.services.doctor.transfer_rank import Meeting

    if not pipe.poll(JOIN_S):
        raise WaitTimeout(f"rank 0 named no port within {JOIN_S:g} s")
    told = msgspec.json.decode(pipe.recv_bytes(), type=Report)
    return Meeting.join(backend, told.port)
