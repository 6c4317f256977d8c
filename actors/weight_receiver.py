"""Receiving weights beside a running engine: a staging area filled by a thread of its own.

`StagingArea` knows torch.distributed and nothing of vLLM; the vLLM adapter and the torch policy
both use it. Its owner calls `start_join` and `start_receive`, asks `state` until it is idle, then
`take`s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

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


def check_manifest(
    manifest: Sequence[TensorSpec],
    loaded: Mapping[str, Sequence[int]],
    optional: Collection[str] = (),
) -> None:
    """Raise TransferError unless the manifest lists what an engine loads: its names and shapes.

    `loaded` maps names to shapes; `optional` names may be there or not. A tensor that is left out
    would keep its old values, or garbage, without an error.
    """
    sent = {spec.name: spec.shape for spec in manifest}
    lacking = [name for name in loaded if name not in sent and name not in optional]
    unknown = [name for name in sent if name not in loaded and name not in optional]
    if lacking:
        raise TransferError(f"the manifest lacks {_some(lacking)}, which the engine loads")
    if unknown:
        raise TransferError(f"the manifest lists {_some(unknown)}, which the engine does not load")
    for name, shape in sent.items():
        if name in loaded and list(loaded[name]) != list(shape):
            raise TransferError(
                f"the manifest lists {name} as {list(shape)}; the engine's is {list(loaded[name])}"
            )


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


class StagingArea:
    """One transfer group and at most one staged version, on one device.

    Joins and receives run on a thread each; the owner's thread only ever looks at `state` and takes
    the result, so an engine can go on generating meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: dist.ProcessGroup | None = None
        self._staged: tuple[dict[str, torch.Tensor], str] | None = None
        self._job: _Job | None = None
        self._error: str | None = None

    def start_join(self, rendezvous: Rendezvous, rank_in_engine: int = 0) -> None:
        """Begin joining a transfer group; the old one is dropped."""

        def join() -> dist.ProcessGroup:
            timeout_s = rendezvous.timeout_s
            store = transfer.build_store(rendezvous.host, rendezvous.port, False, timeout_s)
            rank = rendezvous.rank_offset + rank_in_engine
            return transfer.build_group(store, rank, rendezvous.world_size, self._device, timeout_s)

        def keep(group: dist.ProcessGroup) -> None:
            self._group = group

        self._start("join the transfer group", join, keep)
        self._group = None

    def start_receive(self, manifest: list[TensorSpec]) -> None:
        """Begin receiving a version into staging."""
        group = self._group

        def receive() -> tuple[dict[str, torch.Tensor], str]:
            if group is None:
                raise TransferError("no transfer group was joined")
            staged = transfer.receive(group, manifest, self._device)
            return staged, transfer.checksum(staged)

        def keep(staged: tuple[dict[str, torch.Tensor], str]) -> None:
            self._staged = staged

        self._start("receive weights", receive, keep)
        self._staged = None

    def _start(self, what: str, work: Callable[[], Any], keep: Callable[[Any], None]) -> None:
        if self.state() == "busy":
            raise TransferError(f"cannot {what}: the transfer before it is still running")
        self._error = None
        self._job = _Job(what, work, keep)

    def state(self) -> str:
        """`busy` while a thread works, `idle` when it is done, else what went wrong."""
        job = self._job
        if job is not None and job.is_running:
            return "busy"
        if job is not None:
            self._job = None
            self._error = job.error
            if job.error is None:
                job.keep(job.result)
        return self._error or "idle"

    def check(self, checksum: str) -> None:
        """Raise ChecksumMismatch unless what is staged is what was sent.

        The checksum was computed by the receiving thread, outside any pause.
        """
        _, received = self._received()
        if checksum != received:
            self._staged = None
            raise ChecksumMismatch(f"checksum {received} was received, {checksum} was sent")

    def take(self) -> dict[str, torch.Tensor]:
        """The staged tensors, in the manifest's order; staging is empty afterwards."""
        staged, _ = self._received()
        self._staged = None
        return staged

    def _received(self) -> tuple[dict[str, torch.Tensor], str]:
        state = self.state()
        if self._staged is None:
            raise TransferError("nothing is staged" if state == "idle" else state)
        return self._staged

    def abandon(self) -> None:
        """Forget the group and what was staged.

        A thread that still runs is left to time out; what it brings is dropped with its job.
        """
        self._group, self._staged, self._error, self._job = None, None, None, None

    def close(self) -> None:
        """Same as abandon: sockets close with the group."""
        self.abandon()


class _Job:
    """Work on a thread of its own. Its result lies here until the owner's thread keeps it."""

    def __init__(self, what: str, work: Callable[[], Any], keep: Callable[[Any], None]) -> None:
        self.keep = keep
        self.result: Any = None
        self.error: str | None = None

        def run() -> None:
            try:
                self.result = work()
            except Exception as error:
                self.error = f"could not {what}: {error}"

        self._thread = threading.Thread(target=run, name="leeway-transfer", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()
