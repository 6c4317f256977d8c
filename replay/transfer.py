"""What both ends of a weight transfer must agree on: the group, the order of bytes, the checksum.

The learner sends, engines receive, and neither imports the other, so the agreement lives here. This
is the only file of replay that imports torch.
"""

# torch.distributed exports TCPStore without naming it in __all__.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist

from leeway.replay.board import TensorSpec
from leeway.replay.errors import TransferError

BUCKET_BYTES = 64 * 2**20
"""Bytes of one broadcast: tensors are packed into buckets of about this size."""


def build_store(host: str, port: int, is_master: bool, timeout_s: float) -> dist.TCPStore:
    """The rendezvous of one transfer group. Port 0: the master takes a free one (`store.port`)."""
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise TransferError(
            f"no rendezvous at {host}:{port} within {timeout_s:g} s: {_first_line(error)}"
        ) from error


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
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, rank, size, options)  # pyright: ignore[reportReturnType]
        return dist.ProcessGroupGloo(store, rank, size, timeout)  # pyright: ignore[reportReturnType]
    except RuntimeError as error:
        raise TransferError(
            f"rank {rank} of {size} could not join the transfer group within {timeout_s:g} s: "
            f"{_first_line(error)}"
        ) from error


def broadcast(group: dist.ProcessGroup, flat: torch.Tensor) -> None:
    """Send (rank 0) or receive (others) a flat tensor; returns when this end has done with it."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    try:
        # As bytes: gloo refuses some dtypes, such as bool and int16.
        group.broadcast([flat.view(torch.uint8)], options).wait()
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()
    except RuntimeError as error:
        raise TransferError(f"broadcast of weights failed: {_first_line(error)}") from error


def buckets(
    manifest: Iterable[TensorSpec], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[list[TensorSpec]]:
    """Consecutive tensors of one dtype: at most `bucket_bytes`, or one tensor that is larger."""
    bucket: list[TensorSpec] = []
    size = 0
    for spec in manifest:
        full = size + num_bytes(spec) > bucket_bytes
        if bucket and (full or spec.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(spec)
        size += num_bytes(spec)
    if bucket:
        yield bucket


def num_elements(spec: TensorSpec) -> int:
    """Elements of the tensor; 1 for a scalar."""
    count = 1
    for extent in spec.shape:
        count *= extent
    return count


def num_bytes(spec: TensorSpec) -> int:
    """Bytes of the tensor on the wire."""
    return num_elements(spec) * dtype_of(spec).itemsize


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """torch dtype of the wire, from its name such as `float32`."""
    return getattr(torch, spec.dtype)


def describe(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """The manifest of a set of tensors, in their order."""
    return [
        TensorSpec(
            name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape)
        )
        for name, tensor in tensors.items()
    ]


def send(group: dist.ProcessGroup, tensors: Mapping[str, torch.Tensor]) -> None:
    """Broadcast `tensors` from rank 0, packed into buckets."""
    for bucket in buckets(describe(tensors)):
        broadcast(group, torch.cat([tensors[spec.name].detach().reshape(-1) for spec in bucket]))


def receive(
    group: dist.ProcessGroup, manifest: Iterable[TensorSpec], device: torch.device
) -> dict[str, torch.Tensor]:
    """Receive what `send` sends, as views into freshly allocated buckets."""
    received: dict[str, torch.Tensor] = {}
    for bucket in buckets(manifest):
        flat = torch.empty(
            sum(num_elements(spec) for spec in bucket), dtype=dtype_of(bucket[0]), device=device
        )
        broadcast(group, flat)
        offset = 0
        for spec in bucket:
            received[spec.name] = flat[offset : offset + num_elements(spec)].view(spec.shape)
            offset += num_elements(spec)
    return received


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest of names, dtypes, shapes and every bit, the same on CPU and GPU.

    Per tensor the sum of word * position over its 32-bit words, counted from 1, in wrapping 64-bit
    integers: int32 [5, 7] -> 5 * 1 + 7 * 2 = 19. It is exact, computed where the tensor lies, and
    different when elements move: two words swapped change it by less than 2**64 and not by 0.
    """
    totals = [_weighted_sum(_words(tensor)) for tensor in tensors.values()]
    # One wait for the device, not one for each tensor.
    sums = [int(total) for total in torch.stack(totals).cpu()] if totals else []
    digest = hashlib.sha256()
    for (name, tensor), total in zip(tensors.items(), sums, strict=True):
        digest.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|{total}\n".encode())
    return digest.hexdigest()[:16]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as int32 words, the last one filled up with zeros."""
    flat = tensor.detach().reshape(-1)
    size = flat.element_size()
    if flat.storage_offset() * size % 4:
        flat = flat.clone()
    rest = -flat.numel() * size % 4
    if rest:
        flat = torch.nn.functional.pad(flat.view(torch.uint8), (0, rest))
    return flat.view(torch.int32)


def _weighted_sum(words: torch.Tensor) -> torch.Tensor:
    # In chunks: the 64-bit copies of a large tensor would be four times its size, and on a CPU
    # chunks that fit into its cache are ten times as fast.
    chunk = 2**22 if words.is_cuda else 2**16
    first = torch.arange(1, 1 + min(chunk, words.numel()), device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk].to(torch.int64)
        total += start * part.sum() + part.mul_(first[: len(part)]).sum()
    return total


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
