"""Receiving weights beside a running engine: a staging area that fills while the engine goes on.

    broadcast   start_join once, start_receive: a thread receives from torch.distributed
    direct      start_expose once, memory: the learner itself writes into the buffer, and this
                process does nothing at all; `arrived` when the learner says so

`StagingArea` knows nothing of vLLM; the vLLM adapter and the torch policy both use it. After each
start its owner asks `state` until it is idle. Then it checks the checksum and takes what `views`
shows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
import torch.distributed as dist

from leeway.replay import transfer
from leeway.replay.board import TensorSpec, Transport
from leeway.replay.errors import ChecksumMismatch, TransferError
from leeway.replay.exposed_memory import ExposedMemory
from leeway.replay.flat_weights import Checksum, Layout, checksum
from leeway.replay.memory_handle import MemoryHandle
from leeway.replay.schema import PolicyVersion


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where a transfer group meets, and this engine's place in it."""

    host: str
    port: int
    rank_offset: int
    """Rank of the engine's first worker; rank 0 is the learner."""
    world_size: int
    transport: Transport
    timeout_s: float

    def to_dict(self) -> dict[str, object]:
        """Plain values, for the way into an engine's processes."""
        return msgspec.to_builtins(self)

    @staticmethod
    def from_dict(values: dict[str, object]) -> Rendezvous:
        """Inverse of to_dict."""
        return msgspec.convert(values, Rendezvous)


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A version that an engine took into use."""

    version: PolicyVersion
    checksum: str
    """leeway.replay.flat_weights.checksum of what the engine received."""
    pause_s: float
    """Seconds in which nothing was generated."""
    copy_s: float = 0.0
    """Seconds of it in which the weights were taken in."""
    wire_s: float = 0.0
    """Seconds that the weights were on the wire."""


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


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """What is about to be sent, as an engine is told of it."""

    manifest: list[TensorSpec]
    chunk_bytes: int
    """Bytes of one broadcast; see Layout.chunks."""
    timeout_s: float
    """The whole of it must be through by then."""

    def to_dict(self) -> dict[str, object]:
        """Plain values, for the way into an engine's processes."""
        return msgspec.to_builtins(self)

    @staticmethod
    def from_dict(values: dict[str, object]) -> Delivery:
        """Inverse of to_dict."""
        return msgspec.convert(values, Delivery)


class InPlace(Protocol):
    """An engine that takes weights as they come, without a place to keep them first."""

    def begin(self) -> None: ...
    def take(self, tensors: Mapping[str, torch.Tensor]) -> None: ...
    def end(self) -> None: ...


class StagingArea:
    """One transfer group and at most one received version, on one device.

    Joins and receives run on a thread each; the owner's thread only ever looks at `state`, so an
    engine can go on generating meanwhile. The buffer is kept from one version to the next: nothing
    is allocated beside a running engine, and what lies in it stays until the next version comes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: dist.ProcessGroup | None = None
        self._transport: Transport = "gloo"
        self._layout: Layout | None = None
        self._flat: torch.Tensor | None = None
        self._host: torch.Tensor | None = None
        """What came through host memory on its way to a GPU."""
        self._exposed: list[ExposedMemory] = []
        """All that ever was, the last one being in use. A learner that was given up may still write
        into one, so none serves anything else."""
        self._received: str | None = None
        """Checksum of the version that is here."""
        self.was_written = False
        """The learner has written it into exposed memory, where it may write again."""
        self._stream: torch.cuda.Stream | None = None
        self._job: _Job | None = None
        self._error: str | None = None
        self.wire_s = 0.0
        """Seconds that the last version was on the wire."""

    def start_join(self, rendezvous: Rendezvous, rank_in_engine: int = 0) -> None:
        """Begin joining a transfer group; the old one is dropped."""

        def join() -> dist.ProcessGroup:
            timeout_s = rendezvous.timeout_s
            store = transfer.build_store(rendezvous.host, rendezvous.port, False, timeout_s)
            rank = rendezvous.rank_offset + rank_in_engine
            device = transfer.wire_device(rendezvous.transport, self._device)
            return transfer.build_group(store, rank, rendezvous.world_size, device, timeout_s)

        def keep(group: dist.ProcessGroup) -> None:
            self._group = group

        self.start("join the transfer group", join, keep)
        transfer.drop(self._group)
        self._group, self._transport = None, rendezvous.transport

    def start_receive(
        self,
        delivery: Delivery,
        in_place: InPlace | None = None,
        then: Callable[[Layout, torch.Tensor], Callable[[], None]] | None = None,
    ) -> None:
        """Begin receiving a version: into the buffer, or by `in_place` straight into the engine.

        In place, the engine must not compute meanwhile, and what goes wrong leaves it with weights
        of neither version. `then` is called on the thread with what has come into the buffer; what
        it returns is called with the result, on the owner's thread, unless the transfer was
        abandoned.
        """
        group = self._group
        wire_device = transfer.wire_device(self._transport, self._device)
        if not self.has_buffer_for(delivery):
            self._layout, self._flat, self._host = Layout(delivery.manifest), None, None
        layout, known_flat, known_host = self._layout, self._flat, self._host
        usual_s = 0.0 if known_flat is None else self.wire_s
        assert layout is not None

        def receive() -> _Received:
            if group is None:
                raise TransferError("no transfer group was joined")
            if in_place is not None:
                got = _receive_in_place(group, layout, delivery, wire_device, in_place)
                return _Received(*got, None, None, lambda: None)
            flat = wire = layout.empty(self._device) if known_flat is None else known_flat
            host = known_host
            if wire_device != self._device:
                wire = host = layout.empty(wire_device) if host is None else host
            pieces = [wire[c.start : c.stop] for c in layout.chunks(delivery.chunk_bytes)]
            wire_s = transfer.broadcast(group, pieces, delivery.timeout_s, usual_s=usual_s)
            if wire is not flat:
                flat.copy_(wire)
            received = checksum(layout, flat)
            finish = (lambda: None) if then is None else then(layout, flat)
            return _Received(wire_s, received, flat, host, finish)

        def keep(received: _Received) -> None:
            self.wire_s, self._received = received.wire_s, received.checksum
            self.was_written = False
            self._flat, self._host = received.flat, received.host
            received.finish()

        self.start("receive weights", receive, keep)
        self._received = None

    def start_expose(
        self,
        delivery: Delivery,
        then: Callable[[Layout, torch.Tensor], Callable[[], None]] | None = None,
    ) -> None:
        """Begin to make the buffer one that the learner can write into; `memory` tells where it is.

        `then` as in start_receive, called once, with what lies there before the first version.
        """
        if not self.has_buffer_for(delivery):
            self._layout, self._flat, self._host = Layout(delivery.manifest), None, None
        layout, known = self._layout, self._flat
        assert layout is not None
        memory = self._exposed[-1] if self._exposed and self._exposed[-1].flat is known else None

        def expose() -> tuple[ExposedMemory, Callable[[], None]]:
            found = memory or ExposedMemory(layout.num_bytes, self._device)
            return found, (lambda: None) if then is None else then(layout, found.flat)

        def keep(made: tuple[ExposedMemory, Callable[[], None]]) -> None:
            found, finish = made
            if found is not memory:
                self._exposed.append(found)
            self._flat, self._host = found.flat, None
            finish()

        self.start("expose memory", expose, keep)
        self._received = None

    def memory(self) -> MemoryHandle:
        """Where the learner finds what start_expose has made."""
        if self.state() != "idle" or not self._exposed:
            raise TransferError("no memory was exposed")
        return self._exposed[-1].handle()

    def arrived(self, checksum: str, wire_s: float) -> None:
        """The learner has written a version into the exposed memory, in `wire_s`, and has found
        there what it wrote."""
        if not self._exposed or self._flat is not self._exposed[-1].flat:
            raise TransferError("no memory was exposed")
        self._received, self.wire_s, self.was_written = checksum, wire_s, True

    def recheck(self) -> None:
        """Raise TransferError unless exposed memory still holds the version that arrived there.

        A learner that was stopped may go on when another one has taken its place. Whatever it
        writes before the version is in use is seen behind that.
        """
        if not self.was_written or self._layout is None or self._flat is None:
            return
        if (found := checksum(self._layout, self._flat)) != self._received:
            raise TransferError(
                f"memory that held the version {self._received} was written to until it was in "
                f"use, and holds {found}; is another learner at work?"
            )

    def has_buffer_for(self, delivery: Delivery) -> bool:
        """Whether what is to come fits where the version before lies."""
        return self._layout is not None and self._layout.manifest == tuple(delivery.manifest)

    def start(self, what: str, work: Callable[[], Any], keep: Callable[[Any], None]) -> None:
        """Run `work` on a thread; `keep` gets its result on the thread that asks for the state."""
        if self.state() == "busy":
            raise TransferError(f"cannot {what}: the transfer before it is still running")
        self._error = None
        self._job = _Job(what, self._on_own_stream(work), keep)

    def _on_own_stream(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """`work` with a stream of its own where there are streams, through when it returns.

        It is the same one each time: memory that one stream has freed does not serve another.
        """
        if self._device.type != "cuda":
            return work

        def run() -> Any:
            with torch.cuda.device(self._device):
                self._stream = self._stream or torch.cuda.Stream(self._device)
                with torch.cuda.stream(self._stream), torch.no_grad():
                    result = work()
                    self._stream.synchronize()
            return result

        return run

    def state(self, wait_s: float = 0.0) -> str:
        """`busy` while a thread works, `idle` when it is done, else what went wrong.

        `wait_s`: how long to wait for its end.
        """
        job = self._job
        if job is not None and not job.over.wait(wait_s):
            return "busy"
        if job is not None:
            self._job = None
            self._error = job.error
            if job.error is None:
                job.keep(job.result)
        return self._error or "idle"

    def check(self, checksum: str) -> None:
        """Raise ChecksumMismatch unless what was received is what was sent.

        The checksum was computed by the receiving thread, outside any pause.
        """
        state = self.state()
        if self._received is None:
            raise TransferError("nothing was received" if state == "idle" else state)
        if checksum != self._received:
            received, self._received = self._received, None
            raise ChecksumMismatch(f"checksum {received} was received, {checksum} was sent")

    def views(self) -> dict[str, torch.Tensor]:
        """The received tensors, in the manifest's order, sharing the buffer's memory."""
        state = self.state()
        if self._received is None or self._layout is None or self._flat is None:
            raise TransferError("nothing was received" if state == "idle" else state)
        return self._layout.views(self._flat)

    def abandon(self) -> None:
        """Forget the group and what was received.

        A thread that still runs is left to time out; what it brings is dropped with its job.
        """
        transfer.drop(self._group)
        if self._job is not None and not self._job.over.is_set():
            # Its thread may still write into the buffer.
            self._layout, self._flat, self._host = None, None, None
        self._group, self._received, self._error, self._job = None, None, None, None

    def close(self) -> None:
        """Same as abandon: sockets close with the group."""
        self.abandon()


class _Received(NamedTuple):
    """What a receiving thread brings."""

    wire_s: float
    checksum: str
    flat: torch.Tensor | None
    host: torch.Tensor | None
    finish: Callable[[], None]


def _receive_in_place(
    group: dist.ProcessGroup,
    layout: Layout,
    delivery: Delivery,
    device: torch.device,
    engine: InPlace,
) -> tuple[float, str]:
    """Piece by piece through one buffer as large as the largest."""
    chunks = layout.chunks(delivery.chunk_bytes)
    room = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    buffer = torch.empty(room, dtype=torch.uint8, device=device)
    pieces = [buffer[: chunk.stop - chunk.start] for chunk in chunks]
    total = Checksum(layout, device)

    def take(place: int) -> None:
        total.add(pieces[place], chunks[place].start)
        engine.take(layout.views(pieces[place], chunks[place]))

    engine.begin()
    wire_s = transfer.broadcast(group, pieces, delivery.timeout_s, arrived=take)
    engine.end()
    return wire_s, total.hexdigest()


class _Job:
    """Work on a thread of its own. Its result lies here until the owner's thread keeps it."""

    def __init__(self, what: str, work: Callable[[], Any], keep: Callable[[Any], None]) -> None:
        self.keep = keep
        self.result: Any = None
        self.error: str | None = None
        self.over = threading.Event()

        def run() -> None:
            try:
                self.result = work()
            except Exception as error:
                self.error = f"could not {what}: {error}"
            finally:
                self.over.set()

        threading.Thread(target=run, name="leeway-transfer", daemon=True).start()
