"""The ends of the doctor's transfers: the only file of it that imports torch for that."""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from leeway.replay.errors import TransferError
from leeway.replay.exposed_memory import ExposedMemory, open_memory
from leeway.replay.memory_handle import MemoryHandle
from leeway.replay.transfer import broadcast, build_group, build_store, copy

HOST: Final = "127.0.0.1"
WAIT_S: Final = 60.0


class Meeting:
    """A rank of a group of two."""

    def __init__(self, store: Any, rank: int, backend: str) -> None:
        self._store = store
        self._rank = rank
        device = f"cuda:{rank}" if backend == "nccl" else "cpu"
        self._device = torch.device(device)
        if backend == "nccl":
            torch.cuda.set_device(self._device)

    @classmethod
    def listen(cls, backend: str) -> Meeting:
        """Rank 0, which holds the store at a free `port`."""
        return cls(build_store(HOST, 0, True, WAIT_S), 0, backend)

    @classmethod
    def join(cls, backend: str, port: int) -> Meeting:
        """Rank 1. Raises TransferError."""
        return cls(build_store(HOST, port, False, WAIT_S), 1, backend)

    @property
    def port(self) -> int:
        """Where rank 0 listens."""
        return self._store.port

    def broadcast(self, num_bytes: int, num_repeats: int) -> list[float]:
        """Seconds of each broadcast but the first. Raises TransferError."""
        group = build_group(self._store, self._rank, 2, self._device, WAIT_S)
        piece = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        took: list[float] = []
        for _ in range(num_repeats + 1):
            began = time.perf_counter()
            broadcast(group, [piece], WAIT_S)
            took.append(time.perf_counter() - began)
        return took[1:]


class Exposed:
    """Memory of this process that another one writes into, as an engine's."""

    def __init__(self, num_bytes: int, device: str) -> None:
        """Raises TransferError."""
        try:
            self._memory = ExposedMemory(num_bytes, torch.device(device))
        except (RuntimeError, OSError) as error:
            raise TransferError(f"no memory to be shown on {device}: {error}") from error

    def handle(self) -> MemoryHandle:
        """For the other process. Raises TransferError."""
        return self._memory.handle()


def write_into(memory: MemoryHandle, device: str, num_repeats: int) -> list[float]:
    """Seconds of each copy but the first. Raises TransferError."""
    on = torch.device(device)
    target = open_memory(memory, on)
    piece = torch.zeros(memory.num_bytes, dtype=torch.uint8, device=on)
    return [copy(piece, [target], WAIT_S, 0.0, _nothing) for _ in range(num_repeats + 1)][1:]


def _nothing() -> None:
    """A run compares checksums here; the doctor's bytes are all 0."""
