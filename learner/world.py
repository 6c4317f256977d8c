"""The ranks of one learner: a thin layer over torch.distributed (gloo on CPU, NCCL on GPU).

Addresses come from the environment that torchrun sets. Without WORLD_SIZE, or with 1, every call is
the identity, and a process group exists only once `mesh` is asked for. All ranks make the same
calls in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from leeway.replay.errors import WaitTimeout

V = TypeVar("V")


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout_s: float = 600.0
    """Seconds any call waits for the other ranks before WaitTimeout."""

    @classmethod
    def from_environment(cls, timeout_s: float = 600.0, device: str | None = None) -> World:
        """Join the ranks that torchrun started; `device` is cuda:LOCAL_RANK where there is one."""
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if device is None:
            device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
        on = torch.device(device)
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(device=on, timeout_s=timeout_s)
        if on.type == "cuda":
            torch.cuda.set_device(on)
        backend = "nccl" if on.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        return cls(dist.get_rank(), size, on, timeout_s)

    def mesh(self) -> DeviceMesh:
        """The ranks in a row, for FSDP."""
        if not dist.is_initialized():
            # Alone, without an address: a store in this process.
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return init_device_mesh(self.device.type, (self.size,))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Add `tensor` over all ranks, in place; returns it."""
        if self.size > 1:
            with self._deadline("all_reduce"):
                dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_reduce_sum(torch.zeros(1, device=self.device))

    def broadcast_bytes(self, payload: bytes | None, source: int = 0) -> bytes:
        """The bytes of rank `source`; the other ranks pass None."""
        if self.size == 1:
            assert payload is not None, "the source rank must pass the bytes"
            return payload
        with self._deadline(f"a broadcast from rank {source}"):
            length = torch.tensor([len(payload or b"")], device=self.device)
            dist.broadcast(length, source)
            if int(length) == 0:
                return b""
            if self.rank == source:
                data = torch.frombuffer(bytearray(payload or b""), dtype=torch.uint8)
            else:
                data = torch.empty(int(length), dtype=torch.uint8)
            data = data.to(self.device)
            dist.broadcast(data, source)
        return data.cpu().numpy().tobytes()

    def broadcast_object(self, value: V | None, kind: type[V], source: int = 0) -> V:
        """The value of rank `source`, sent as msgpack (never pickle); the other ranks pass None."""
        if self.size == 1:
            assert value is not None, "the source rank must pass the value"
            return value
        payload = msgspec.msgpack.encode(value) if self.rank == source else None
        return msgspec.msgpack.decode(self.broadcast_bytes(payload, source), type=kind)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _deadline(self, what: str) -> Iterator[None]:
        """Translate the errors of torch.distributed; a dead peer and a late one look alike."""
        try:
            yield
        except (RuntimeError, dist.DistBackendError) as error:
            raise WaitTimeout(
                f"learner rank {self.rank} of {self.size} waited up to {self.timeout_s:g} s "
                f"for {what}; another rank is late or has died ({str(error).splitlines()[0][:200]})"
            ) from error
