"""The way of a version to the engines of a transfer group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from leeway.replay import transfer
from leeway.replay.board import Announcement, EngineRecord, Transport
from leeway.replay.errors import ChecksumMismatch, TransferError
from leeway.replay.exposed_memory import open_memory
from leeway.replay.flat_weights import CHUNK_BYTES, FlatWeights, checksum
from leeway.replay.memory_handle import MemoryHandle, machine


class Route(Protocol):
    """Made once for a group; its calls block."""

    def send(
        self, weights: FlatWeights, announcement: Announcement, timeout_s: float, usual_s: float
    ) -> float:
        """Until this end is rid of the bytes; the seconds they took. See transfer.broadcast."""
        ...

    def drop(self) -> None:
        """Give it up: what it still waits for ends."""
        ...


class Collective:
    """A broadcast of torch.distributed, which every engine takes part in."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """`device`: where a buffer lies that is sent."""
        self._group = group
        self._device = device

    def send(
        self, weights: FlatWeights, announcement: Announcement, timeout_s: float, usual_s: float
    ) -> float:
        """See Route."""
        flat = weights.flat.to(self._device)
        chunks = weights.layout.chunks(announcement.chunk_bytes)
        pieces = [flat[chunk.start : chunk.stop] for chunk in chunks]
        return transfer.broadcast(self._group, pieces, timeout_s, usual_s=usual_s)

    def drop(self) -> None:
        """See Route."""
        transfer.drop(self._group)


class Direct:
    """Copies into the memory of engines on this machine, in which they take no part at all.

    The learner reads back what it wrote, so that the check costs an engine nothing either.
    """

    def __init__(self, targets: Sequence[torch.Tensor], device: torch.device) -> None:
        """`targets` are what `reach` opened, of all engines."""
        self._device = device
        self._targets = list(targets)

    def send(
        self, weights: FlatWeights, announcement: Announcement, timeout_s: float, usual_s: float
    ) -> float:
        """See Route. Raises ChecksumMismatch if it is not there afterwards."""
        flat, layout = weights.flat.to(self._device), weights.layout

        def compare() -> None:
            for place, target in enumerate(self._targets):
                if (found := checksum(layout, target)) != announcement.checksum:
                    raise ChecksumMismatch(
                        f"checksum {found} is in the memory of rank {place + 1}, "
                        f"{announcement.checksum} was announced"
                    )

        try:
            return transfer.copy(flat, self._targets, timeout_s, usual_s, compare)
        except RuntimeError as error:
            raise TransferError(f"copying weights failed: {error}") from error

    def drop(self) -> None:
        """See Route."""
        self._targets = []


def reach(
    handles: Sequence[MemoryHandle], num_bytes: int, device: torch.device
) -> list[torch.Tensor]:
    """The memory of an engine's ranks. Raises TransferError where one cannot be opened, or is not
    for `num_bytes`."""
    for handle in handles:
        if handle.num_bytes != num_bytes:
            raise TransferError(
                f"process {handle.pid} shows {handle.num_bytes} bytes, not {num_bytes}"
            )
    return [open_memory(handle, device) for handle in handles]


def transport_of(device: torch.device, engines: Sequence[EngineRecord], choice: str) -> Transport:
    """`choice` is learner.transport.

    direct: where every engine is on this machine and has room beside the weights in use, on a GPU
    as the learner is, or on CPUs where that is asked for. nccl: between GPUs that are all
    different; it refuses to have two ranks on one. Else gloo.
    """
    own = transfer.gpu_uuid(device)
    is_near = all(
        engine.machine == machine() and engine.stages and bool(engine.gpus) == (own is not None)
        for engine in engines
    )
    if is_near and choice != "collective" and (own is not None or choice == "direct"):
        return "direct"
    gpus = [own, *(gpu for engine in engines for gpu in engine.gpus)]
    num_ranks = 1 + sum(engine.num_ranks for engine in engines)
    apart = own is not None and len(set(gpus)) == len(gpus) == num_ranks
    return "nccl" if apart else "gloo"


def chunk_bytes(transport: Transport, engines: Sequence[EngineRecord], weights: FlatWeights) -> int:
    """By NCCL all of it at once, where every engine has room: each further piece takes the
    interpreter several times from an engine that generates. A direct copy has no pieces."""
    is_whole = transport == "nccl" and all(engine.stages for engine in engines)
    if is_whole or transport == "direct":
        return weights.layout.num_bytes
    return CHUNK_BYTES[transport]
