"""How weights travel: by a process group of its own, or by copies into memory of the engines; with
a deadline either way.

In a group the learner is rank 0 and sends; engines receive. What travels is described in
flat_weights.py.
"""

# torch.distributed exports TCPStore without naming it in __all__.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from leeway.replay.board import Transport
from leeway.replay.errors import TransferError

LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
LOOK_S = 0.0005
"""How often it is looked whether a GPU has finished."""
USUAL_SHARE = 0.9
"""Of the time of the last broadcast, in which nobody looks."""
MAX_UNSEEN_S = 0.5
"""At most so long: a broadcast that waited for a late engine took longer than the next one will."""


def build_store(host: str, port: int, is_master: bool, timeout_s: float) -> dist.TCPStore:
    """The rendezvous of one transfer group. Port 0: the master takes a free one (`store.port`). It
    listens on every interface, but on loopback alone where `host` is LOOPBACK."""
    listening: dict[str, Any] = {}
    try:
        if is_master and host == LOOPBACK:
            port, listening["master_listen_fd"] = _listen_on_loopback(port)
        return dist.TCPStore(
            host,
            port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_s),
            **listening,
        )
    except (RuntimeError, OSError) as error:
        raise TransferError(
            f"no rendezvous at {host}:{port} within {timeout_s:g} s: {_first_line(error)}"
        ) from error


def stays_on_this_machine() -> bool:
    """Whether the environment keeps gloo, and with it every transfer, on the loopback interface, as
    that of `leeway train` does."""
    return os.environ.get(INTERFACE) == "lo"


def _listen_on_loopback(port: int) -> tuple[int, int]:
    """Port and descriptor of a socket that listens; who gets the descriptor closes it."""
    with socket.create_server((LOOPBACK, port), backlog=socket.SOMAXCONN) as listener:
        return listener.getsockname()[1], listener.detach()


def wire_device(transport: Transport, device: torch.device) -> torch.device:
    """Where a buffer must lie that travels by `transport`, for a rank that computes on `device`."""
    return device if transport == "nccl" else torch.device("cpu")


def gpu_uuid(device: torch.device) -> str | None:
    """What tells this GPU from all others; None for a CPU."""
    if device.type != "cuda":
        return None
    cuda: Any = torch.cuda
    return str(cuda.get_device_properties(device).uuid).removeprefix("GPU-")


def build_group(
    store: dist.TCPStore, rank: int, size: int, device: torch.device, timeout_s: float
) -> dist.ProcessGroup:
    """A process group outside torch.distributed's default one: NCCL on a GPU, gloo on a CPU.

    Blocks until all `size` ranks have joined, at most `timeout_s`. A group that failed once is not
    usable again; build a new one under a new store.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    # torch's stubs call both a Backend; they have every method of a ProcessGroup that is used here.
    try:
        if device.type == "cuda":
            return _build_nccl(store, rank, size, device, timeout_s)
        return dist.ProcessGroupGloo(store, rank, size, timeout)  # pyright: ignore[reportReturnType]
    except RuntimeError as error:
        raise TransferError(
            f"rank {rank} of {size} could not join the transfer group within {timeout_s:g} s: "
            f"{_first_line(error)}"
        ) from error


def _build_nccl(
    store: dist.TCPStore, rank: int, size: int, device: torch.device, timeout_s: float
) -> dist.ProcessGroup:
    # NCCL itself waits for ever for a rank that does not come, so it begins when all are there.
    store.set(f"here/{rank}", "")
    store.wait([f"here/{each}" for each in range(size)], datetime.timedelta(seconds=timeout_s))
    options = dist.ProcessGroupNCCL.Options()
    # Deadlines are kept by `broadcast`; torch's own watchdog and monitor would end the process.
    options._timeout = datetime.timedelta(days=1)
    with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"):
        group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
    # The first collective builds the connections, which takes as long as many transfers.
    broadcast(group, [torch.zeros(16, dtype=torch.uint8, device=device)], timeout_s)
    return group


@contextmanager
def _environment(**values: str) -> Generator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def broadcast(
    group: dist.ProcessGroup,
    pieces: Sequence[torch.Tensor],
    timeout_s: float,
    arrived: Callable[[int], None] | None = None,
    usual_s: float = 0.0,
) -> float:
    """Send (rank 0) or receive (others) flat uint8 pieces; returns when this end has done with it.

    `arrived(i)` is called behind the i-th piece: on a GPU while it is still under way, with a
    stream current in which work comes after its arrival and before the next piece's.
    `usual_s` is what it took the last time: on a GPU nobody looks whether it is through much before
    that, since each look takes the interpreter from the engine, or the learner.
    Returns the seconds the pieces took on the wire. Raises TransferError when they were not through
    within `timeout_s`; the group is of no more use then.
    """
    options = dist.BroadcastOptions()
    options.rootRank = 0
    try:
        if pieces and pieces[0].is_cuda:
            return _broadcast_cuda(group, pieces, timeout_s, arrived, options, usual_s)
        began = time.monotonic()
        timeout = datetime.timedelta(seconds=timeout_s)
        for place, piece in enumerate(pieces):
            options.timeout = timeout
            group.broadcast([piece], options).wait()
            if arrived is not None:
                arrived(place)
        return time.monotonic() - began
    except RuntimeError as error:
        raise TransferError(f"broadcast of weights failed: {_first_line(error)}") from error


def _broadcast_cuda(
    group: dist.ProcessGroup,
    pieces: Sequence[torch.Tensor],
    timeout_s: float,
    arrived: Callable[[int], None] | None,
    options: dist.BroadcastOptions,
    usual_s: float,
) -> float:
    """Everything is queued at once on a stream of its own; nothing else on the GPU waits for it."""
    device = pieces[0].device
    # Memory is kept by stream, so a stream that the caller has chosen is used again.
    current = torch.cuda.current_stream(device)
    is_own = current != torch.cuda.default_stream(device)
    stream = current if is_own else torch.cuda.Stream(device)
    stream.wait_stream(current)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for place, piece in enumerate(pieces):
            # `wait` lets this stream wait, not this thread.
            group.broadcast([piece], options).wait()
            if arrived is not None:
                arrived(place)
        ended.record()
        try:
            _await(ended, timeout_s, usual_s)
        except TransferError:
            # What still waits on the GPU ends with the group.
            group.abort()
            raise
        return began.elapsed_time(ended) / 1e3


def copy(
    flat: torch.Tensor,
    targets: Sequence[torch.Tensor],
    timeout_s: float,
    usual_s: float,
    then: Callable[[], None],
) -> float:
    """Copy `flat` into each target, then call `then`; on GPUs both on a stream of their own.

    Returns the seconds of the copies; `usual_s` as in `broadcast`. Raises TransferError when they
    were not through within `timeout_s`.
    """
    if not flat.is_cuda:
        began_s = time.monotonic()
        for target in targets:
            target.copy_(flat)
        copied_s = time.monotonic() - began_s
        then()
        return copied_s
    device = flat.device
    with torch.cuda.device(device), torch.cuda.stream(_copy_stream(device)):
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for target in targets:
            target.copy_(flat, non_blocking=True)
        ended.record()
        _await(ended, timeout_s, usual_s)
        then()
        return began.elapsed_time(ended) / 1e3


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all copies, so that none overtakes another."""
    return torch.cuda.Stream(device)


def _await(event: torch.cuda.Event, timeout_s: float, usual_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    time.sleep(min(USUAL_SHARE * usual_s, MAX_UNSEEN_S, timeout_s))
    while not event.query():
        if time.monotonic() > deadline:
            raise TransferError(f"the weights were not through within {timeout_s:g} s")
        time.sleep(LOOK_S)


def drop(group: dist.ProcessGroup | None) -> None:
    """Give up a group that is of no more use: what it still waits for on a GPU ends."""
    if group is not None and group.name() == "nccl":
        group.abort()


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
