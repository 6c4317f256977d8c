"""Memory of one process that another one writes into: how weights travel within a machine.

    engine    expose(bytes, device) -> memory; memory.handle() -> over the policy board
    learner   open_memory(handle, device) -> a tensor that is the engine's memory; copy_ into it

On a GPU it is CUDA's memory for other processes (cudaIpcGetMemHandle), between devices as well as
on one; a copy into it is carried out by a copy engine, without a kernel on either side. On a CPU it
is a file in memory without a name (memfd_create). Either goes when the processes that hold it do.
"""

# torch names the calls behind torch.multiprocessing with an underscore; there are no others.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from typing import Any

import msgspec
import torch

from leeway.replay.errors import TransferError
from leeway.replay.memory_handle import MemoryHandle


class ExposedMemory:
    """A buffer of this process that others may open.

    It must be held for as long as anybody may write: memory that is given back serves others.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Zeros."""
        self._token = secrets.token_hex(16)
        self._num_bytes = num_bytes
        self._fd, flat = _zeros(self._token, num_bytes, device)
        self.flat = flat
        """uint8 [num_bytes]."""
        _OWN[self._token] = self.flat

    def handle(self) -> MemoryHandle:
        """For one process to open; ask anew for each, since torch counts them.

        Raises TransferError where the device has no such memory.
        """
        bare = MemoryHandle(
            pid=os.getpid(), token=self._token, num_bytes=self._num_bytes, fd=self._fd
        )
        if self._fd >= 0:
            return bare
        storage: Any = self.flat.untyped_storage()
        try:
            _, cuda, _, offset, counter, counter_offset, _, _ = storage._share_cuda_()
        except RuntimeError as error:
            raise TransferError(f"this GPU's memory cannot be exposed: {error}") from error
        return msgspec.structs.replace(
            bare, cuda=cuda, offset=offset, counter=counter, counter_offset=counter_offset
        )


_OWN: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()
"""Exposed by this process, by token: CUDA opens no memory in the process that it is of."""


def open_memory(handle: MemoryHandle, device: torch.device) -> torch.Tensor:
    """The memory itself, uint8 [num_bytes]; on a GPU as if it lay on `device`, which reads and
    writes it wherever it lies.

    Raises TransferError where this process cannot reach it: on another machine or in another
    container, or when the process that exposed it is gone.
    """
    own = _OWN.get(handle.token)
    if own is not None:
        return own
    try:
        return _opened_cuda(handle, device) if handle.cuda else _opened_file(handle)
    except (RuntimeError, OSError, ValueError) as error:
        raise TransferError(
            f"the memory of process {handle.pid} cannot be opened: {str(error).splitlines()[0]}"
        ) from error


def _zeros(token: str, num_bytes: int, device: torch.device) -> tuple[int, torch.Tensor]:
    """And the descriptor of the file that it is, -1 on a GPU."""
    if device.type == "cuda":
        flat = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        torch.cuda.current_stream(device).synchronize()
        return -1, flat
    fd = os.memfd_create(_name(token))
    os.ftruncate(fd, max(1, num_bytes))
    flat = _mapped(fd, num_bytes)
    weakref.finalize(flat, os.close, fd)
    return fd, flat


def _opened_file(handle: MemoryHandle) -> torch.Tensor:
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    # The process may be gone, and its number another's.
    if os.readlink(path) != f"/memfd:{_name(handle.token)} (deleted)":
        raise OSError(f"{path} is something else")
    fd = os.open(path, os.O_RDWR)
    try:
        # To write behind the end of a file that is mapped would end this process.
        if os.fstat(fd).st_size < handle.num_bytes:
            raise OSError(f"{path} is smaller than {handle.num_bytes} bytes")
        return _mapped(fd, handle.num_bytes)
    finally:
        os.close(fd)


def _mapped(fd: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, max(1, num_bytes)), dtype=torch.uint8)[:num_bytes]


def _name(token: str) -> str:
    return f"leeway-{token}"


def _opened_cuda(handle: MemoryHandle, device: torch.device) -> torch.Tensor:
    storage: Any = torch.UntypedStorage
    # The empty tensor initialises CUDA, without which torch ends the process here. The device that
    # the memory lies on need not be visible: what is opened is an address.
    opened = storage._new_shared_cuda(
        torch.empty(0, device=device).device.index,
        handle.cuda,
        handle.num_bytes,
        handle.offset,
        handle.counter,
        handle.counter_offset,
        b"",
        False,  # no event to wait for: the memory was filled before it was exposed
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(opened)
