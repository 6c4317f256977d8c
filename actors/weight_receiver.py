"""Receiving weights beside a running engine: a staging area filled by a thread of its own.

`StagingArea` knows torch.distributed and nothing of vLLM; the vLLM adapter and the torch policy
both use it. Its owner calls `start_join` and `start_receive`, asks `state` until it is idle, then
`take`s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist

from leeway.replay import transfer
from leeway.replay.board import TensorSpec
from leeway.replay.errors import ChecksumMismatch, TransferError
from leeway.replay.schema import PolicyVersion


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where a transfer group meets, and this engine's place in it."""

    host: str
    port: int
    rank_offset: int
    """Rank of the engine's first worker; rank 0 is the learner."""
    world_size: int
    timeout_s: float

    def to_dict(self) -> dict[str, object]:
        """Plain values, as vLLM's request classes want them."""
        return msgspec.to_builtins(self)

    @staticmethod
    def from_dict(values: dict[str, object]) -> Rendezvous:
        """Inverse of to_dict."""
        return msgspec.convert(values, Rendezvous)


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A version that an engine took into use."""

    version: PolicyVersion
    checksum: str
    """leeway.replay.transfer.checksum of what the engine holds."""
    pause_s: float
    """Seconds in which nothing was generated."""


class StagingArea:
    """One transfer group and at most one staged version, on one device.

    A single worker thread runs joins and receives; the owner's thread only ever looks at `state`
    and takes the result, so an engine can go on generating meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: dist.ProcessGroup | None = None
        self._staged: dict[str, torch.Tensor] | None = None
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._checksum = ""

    def start_join(self, rendezvous: Rendezvous, rank_in_engine: int = 0) -> None:
        """Begin joining a transfer group; the old one is dropped."""

        def join() -> None:
            self._group = None
            timeout_s = rendezvous.timeout_s
            store = transfer.build_store(rendezvous.host, rendezvous.port, False, timeout_s)
            rank = rendezvous.rank_offset + rank_in_engine
            self._group = transfer.build_group(
                store, rank, rendezvous.world_size, self._device, timeout_s
            )

        self._start("join the transfer group", join)

    def start_receive(self, manifest: list[TensorSpec]) -> None:
        """Begin receiving a version into staging."""

        def receive() -> None:
            if self._group is None:
                raise TransferError("no transfer group was joined")
            staged = transfer.receive(self._group, manifest, self._device)
            self._checksum = transfer.checksum(staged)
            self._staged = staged

        self._staged = None
        self._start("receive weights", receive)

    def _start(self, what: str, work: Callable[[], None]) -> None:
        if self._thread is not None and self._thread.is_alive():
            raise TransferError(f"cannot {what}: the transfer before it is still running")

        def run() -> None:
            try:
                work()
            except Exception as error:
                self._error = f"could not {what}: {error}"

        self._error = None
        self._thread = threading.Thread(target=run, name="leeway-transfer", daemon=True)
        self._thread.start()

    def state(self) -> str:
        """`busy` while the thread works, `idle` when it is done, else what went wrong."""
        if self._thread is not None and self._thread.is_alive():
            return "busy"
        return self._error or "idle"

    def check(self, checksum: str) -> None:
        """Raise ChecksumMismatch unless what is staged is what was sent.

        The checksum was computed by the receiving thread, outside any pause.
        """
        if self._staged is None:
            raise TransferError(self._error or "nothing is staged")
        if checksum != self._checksum:
            self._staged = None
            raise ChecksumMismatch(f"checksum {self._checksum} was received, {checksum} was sent")

    def take(self) -> dict[str, torch.Tensor]:
        """The staged tensors, in the manifest's order; staging is empty afterwards."""
        if self._staged is None:
            raise TransferError(self._error or "nothing is staged")
        staged, self._staged = self._staged, None
        return staged

    def abandon(self) -> None:
        """Forget the group and what was staged; a thread still running is left to time out."""
        self._group, self._staged, self._error, self._thread = None, None, None, None

    def close(self) -> None:
        """Same as abandon: sockets close with the group."""
        self.abandon()
