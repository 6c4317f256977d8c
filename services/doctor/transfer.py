"""How fast weights travel between two processes of this machine, by each way a run may send them.

    collective   two ranks of a transfer group: NCCL where there are two GPUs, else gloo on CPUs
    direct       one writes into the memory of the other, between two GPUs or on the only one; on
                 CPUs where learner.transport asks for it

They are processes of their own: the doctor itself imports no torch.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from multiprocessing.context import SpawnProcess
from typing import Any, Final, Protocol

import msgspec

from leeway.replay.memory_handle import MemoryHandle
from leeway.services.doctor.finding import Finding, Part

TRANSFER = Part("transfer")

NUM_BYTES: Final = 64 * 2**20
"""One bucket of a publish."""
NUM_REPEATS: Final = 8
TIMEOUT_S: Final = 90.0
"""For both processes to import torch, meet and send."""
JOIN_S: Final = 60.0
SLOW_GIB_S: Final = {"gloo": 0.2, "nccl": 5.0, "direct": 1.0}
"""Below this something is wrong: NVLink gives 300, PCIe 20, memory of the host 5, loopback 1 to 3.
"""


class Pipe(Protocol):
    """An end of multiprocessing's pipe; what it carries is msgspec's JSON."""

    def poll(self, timeout: float = 0.0, /) -> bool: ...
    def recv_bytes(self) -> bytes: ...
    def send_bytes(self, buf: bytes, /) -> None: ...


class Report(msgspec.Struct):
    """What a process says through its pipe: where it is met, its result, or its fault."""

    port: int = 0
    memory: MemoryHandle | None = None
    gib_per_s: float = 0.0
    fault: str = ""


def check_transfer(num_gpus: int, choice: str) -> Iterator[Finding]:
    """Send a bucket a few times by each way; an error where none can be sent. `choice` is
    learner.transport."""
    backend = "nccl" if num_gpus >= 2 else "gloo"
    between = "two GPUs" if num_gpus >= 2 else "two CPU processes"
    yield finding_of(measure(backend), backend, between)
    if choice == "direct" or (choice == "auto" and num_gpus):
        between = "two processes on one GPU" if num_gpus == 1 else between
        yield finding_of(measure("direct", num_gpus), "direct", between)


def finding_of(report: Report, backend: str, between: str) -> Finding:
    """The finding for what was reported."""
    if report.fault and backend == "direct":
        remedy = (
            "nothing, if broadcasts are fast enough: weights are broadcast then; "
            "else let engine and learner share a container"
        )
        return TRANSFER.warning(backend, report.fault, remedy)
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
            "direct": "end what else uses the machine; nvidia-smi topo -m shows the way of GPUs",
        }
        return TRANSFER.warning(backend, text, remedy[backend], gib_per_s=round(speed, 3))
    return TRANSFER.ok(backend, text, gib_per_s=round(speed, 3))


def measure(backend: str, num_gpus: int = 0) -> Report:
    """Start both processes, carry from one to the other where it is met, and wait for the result.

    `num_gpus` is for "direct", which has the other GPU, the same one, or none.
    """
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(2)]
    if backend == "direct":
        devices = ("cpu", "cpu") if num_gpus == 0 else (f"cuda:{min(1, num_gpus - 1)}", "cuda:0")
        works = [(_engine, (devices[0],)), (_learner, (devices[1],))]
    else:
        works = [(_rank, (rank, backend)) for rank in range(2)]
    processes = [
        context.Process(target=work, args=(theirs, *more), daemon=True)
        for (work, more), (_, theirs) in zip(works, pairs, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        # Of a broadcast both tell a result; of a copy, in which the engine takes no part, one.
        return _conduct([ours for ours, _ in pairs], processes, int(backend == "direct"))
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def _conduct(pipes: Sequence[Pipe], processes: Sequence[SpawnProcess], who_tells: int) -> Report:
    deadline = time.monotonic() + TIMEOUT_S
    meeting = _next_report(pipes[0], processes[0], deadline)
    if meeting.fault:
        return meeting
    pipes[1].send_bytes(msgspec.json.encode(meeting))
    return _next_report(pipes[who_tells], processes[who_tells], deadline)


def _next_report(pipe: Pipe, process: SpawnProcess, deadline: float) -> Report:
    while not pipe.poll(0.1):
        if not process.is_alive() and not pipe.poll(0):
            return Report(fault=f"a process of the two ended with exit code {process.exitcode}")
        if time.monotonic() > deadline:
            return Report(fault=f"two processes could not send to each other in {TIMEOUT_S:g} s")
    try:
        return msgspec.json.decode(pipe.recv_bytes(), type=Report)
    except EOFError:
        return Report(fault="a process of the two ended without a word")


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
    from leeway.services.doctor.transfer_rank import Meeting

    return Meeting.join(backend, _told(pipe).port)


def _told(pipe: Pipe) -> Report:
    """Where the other one is met."""
    from leeway.replay.errors import WaitTimeout

    if not pipe.poll(JOIN_S):
        raise WaitTimeout(f"the other process did not say within {JOIN_S:g} s where it is")
    return msgspec.json.decode(pipe.recv_bytes(), type=Report)


def _engine(pipe: Pipe, device: str) -> None:
    """A process: shows its memory, and holds it until it is killed."""
    from leeway.replay.errors import LeewayError
    from leeway.services.doctor.transfer_rank import Exposed

    try:
        exposed = Exposed(NUM_BYTES, device)
        pipe.send_bytes(msgspec.json.encode(Report(memory=exposed.handle())))
        time.sleep(TIMEOUT_S)
    except LeewayError as error:
        pipe.send_bytes(msgspec.json.encode(Report(fault=str(error))))


def _learner(pipe: Pipe, device: str) -> None:
    """A process: writes into what it is shown."""
    from leeway.replay.errors import LeewayError
    from leeway.services.doctor.transfer_rank import write_into

    try:
        memory = _told(pipe).memory
        assert memory is not None
        speed = NUM_BYTES / 2**30 / statistics.median(write_into(memory, device, NUM_REPEATS))
        pipe.send_bytes(msgspec.json.encode(Report(gib_per_s=speed)))
    except LeewayError as error:
        pipe.send_bytes(msgspec.json.encode(Report(fault=str(error))))
