"""Weights as they travel: every tensor of a version, end to end in one flat buffer of bytes.

    | model.embed_tokens.weight | gap | layers.0.q_proj.weight | gap | layers.0.q_proj.bias | ...

The learner packs it, engines receive it, and neither imports the other, so what they must agree on
lies here: the order, the gaps, the pieces in which it is sent, the checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple, cast

import torch
from torch.nn.functional import pad

from leeway.replay.board import TensorSpec, Transport
from leeway.replay.errors import TransferError

ALIGNMENT = 16
"""Each tensor begins at a multiple of this many bytes, so that it can be viewed in its own dtype;
the gaps are zero."""
CHUNK_BYTES: dict[Transport, int] = {"gloo": 64 * 2**20, "nccl": 256 * 2**20}
"""Bytes of one broadcast, where not every engine takes a whole version at once. On a GPU starting
one costs more than sending some ten megabytes."""
ROW_WORDS = 4096
"""64-bit words in a row of the checksum."""


class Chunk(NamedTuple):
    """Consecutive tensors that are sent by one broadcast."""

    start: int
    """First byte in the buffer."""
    stop: int
    """Byte behind the last."""
    first: int
    """Place of the first tensor in the manifest."""
    last: int
    """Place behind the last tensor."""


class Layout:
    """Where each tensor of a manifest lies in the buffer.

    float32 [2, 3] and bfloat16 [5]: 24 bytes at 0, 10 bytes at 32, 48 bytes in all.
    """

    def __init__(self, manifest: Sequence[TensorSpec]) -> None:
        self.manifest = tuple(manifest)
        self._starts: list[int] = []
        end = 0
        for spec in self.manifest:
            self._starts.append(end)
            end += -(-num_bytes(spec) // ALIGNMENT) * ALIGNMENT
        self.num_bytes = end
        """Of the whole buffer, gaps included."""

    @cached_property
    def manifest_text(self) -> bytes:
        """A line for each tensor, as it counts into the checksum."""
        lines = (f"{spec.name}|{spec.dtype}|{list(spec.shape)}\n" for spec in self.manifest)
        return "".join(lines).encode()

    def empty(self, device: torch.device) -> torch.Tensor:
        """A buffer for it: uint8 [num_bytes], zero, as its gaps must be."""
        return torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)

    def views(self, flat: torch.Tensor, chunk: Chunk | None = None) -> dict[str, torch.Tensor]:
        """Each tensor by name, sharing the buffer's memory.

        With `chunk` its tensors alone, and `flat` holds nothing but the chunk.
        """
        start, _, first, last = chunk or Chunk(0, self.num_bytes, 0, len(self.manifest))
        found: dict[str, torch.Tensor] = {}
        for spec, at in zip(self.manifest[first:last], self._starts[first:last], strict=True):
            piece = flat[at - start : at - start + num_bytes(spec)]
            found[spec.name] = piece.view(dtype_of(spec)).view(spec.shape)
        return found

    def chunks(self, chunk_bytes: int) -> list[Chunk]:
        """Cut between tensors: at most `chunk_bytes` each, or one tensor that is larger."""
        found: list[Chunk] = []
        first = start = 0
        ends = [*self._starts[1:], self.num_bytes]
        for place, end in enumerate(ends):
            if end - start > chunk_bytes and place > first:
                found.append(Chunk(start, self._starts[place], first, place))
                first, start = place, self._starts[place]
        if self.num_bytes > start:
            found.append(Chunk(start, self.num_bytes, first, len(self.manifest)))
        return found


@dataclass(frozen=True)
class FlatWeights:
    """A version, ready to be sent."""

    layout: Layout
    flat: torch.Tensor
    """uint8 [layout.num_bytes]."""
    checksum: str


def pack(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    manifest: Sequence[TensorSpec] | None = None,
    into: torch.Tensor | None = None,
) -> FlatWeights:
    """Copy `tensors` into one buffer where they lie, rounded to the manifest's dtypes.

    They are read one by one, so tensors that exist only while they are looked at will do; those
    need a `manifest` in the same order. Without one, they keep their dtypes. `into` is a buffer to
    use again: one that `Layout.empty` made for the same manifest.
    Raises TransferError when names or shapes are not the manifest's.
    """
    pairs: Iterable[tuple[str, torch.Tensor]]
    if isinstance(tensors, Mapping):
        known = cast("Mapping[str, torch.Tensor]", tensors)
        manifest = describe(known) if manifest is None else manifest
        pairs = known.items()
    else:
        pairs = tensors
    if manifest is None:
        raise TransferError("tensors that come one by one need a manifest")
    layout = Layout(manifest)
    flat, views = into, {}
    specs = iter(layout.manifest)
    for name, tensor in pairs:
        if flat is None or flat.numel() != layout.num_bytes:
            flat = layout.empty(tensor.device)
        views = views or layout.views(flat)
        spec = next(specs, None)
        if spec is None or spec.name != name or list(tensor.shape) != list(spec.shape):
            raise TransferError(f"{name} {list(tensor.shape)} is not what the manifest lists next")
        views[name].copy_(tensor.detach())
    if (missing := next(specs, None)) is not None:
        raise TransferError(f"the manifest lists {missing.name}, which did not come")
    if flat is None:
        flat = layout.empty(torch.device("cpu"))
    return FlatWeights(layout, flat, checksum(layout, flat))


def describe(
    tensors: Mapping[str, torch.Tensor], floats: torch.dtype | None = None
) -> list[TensorSpec]:
    """The manifest of a set of tensors, in their order.

    `floats`: dtype in which floating-point tensors travel; None is each one's own.
    """
    return [
        TensorSpec(name=name, dtype=_wire_dtype(tensor, floats), shape=list(tensor.shape))
        for name, tensor in tensors.items()
    ]


def _wire_dtype(tensor: torch.Tensor, floats: torch.dtype | None) -> str:
    rounds = floats is not None and tensor.dtype.is_floating_point
    return str(floats if rounds else tensor.dtype).removeprefix("torch.")


def num_bytes(spec: TensorSpec) -> int:
    """Bytes of the tensor; a scalar has one element."""
    return prod(spec.shape) * dtype_of(spec).itemsize


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """torch dtype, from its name such as `float32`."""
    return getattr(torch, spec.dtype)


def checksum(layout: Layout, flat: torch.Tensor) -> str:
    """Digest of the manifest and of every bit of the buffer, the same on CPU and GPU."""
    total = Checksum(layout, flat.device)
    total.add(flat, 0)
    return total.hexdigest()


class Checksum:
    """The checksum of a buffer that is seen piece by piece.

    Its 64-bit words are laid out in rows of ROW_WORDS, the last one filled up with zeros, and added
    up by rows and by columns; of both it takes the sum of total * (2 * place + 1), places counted
    from 0, in wrapping 64-bit integers. Words [5, 7]: rows 12 * 1 = 12, columns 5 * 1 + 7 * 3 = 26.

    It is exact and computed where the buffer lies, by reading it twice and writing nothing. The
    factors are odd, so no change of one word is lost to wrapping; and a word that goes elsewhere
    changes its row or its column.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        num_rows = -(-layout.num_bytes // (8 * ROW_WORDS))
        self._rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._columns = torch.zeros(ROW_WORDS, dtype=torch.int64, device=device)

    def add(self, flat: torch.Tensor, start: int) -> None:
        """Take in the bytes from `start` of the whole buffer; on a GPU nothing is waited for."""
        words = flat.view(torch.int64)
        first, lead = divmod(start // 8, ROW_WORDS)
        if lead:  # up to the end of a row that began before
            head = words[: ROW_WORDS - lead]
            self._add_rows(pad(head, (lead, ROW_WORDS - lead - len(head))), first)
            words, first = words[len(head) :], first + 1
        whole = len(words) - len(words) % ROW_WORDS
        self._add_rows(words[:whole], first)
        rest = words[whole:]
        if len(rest):
            self._add_rows(pad(rest, (0, ROW_WORDS - len(rest))), first + whole // ROW_WORDS)

    def _add_rows(self, words: torch.Tensor, first: int) -> None:
        table = words.view(-1, ROW_WORDS)
        self._rows[first : first + len(table)] += table.sum(1)
        self._columns += table.sum(0)

    def hexdigest(self) -> str:
        """16 hexadecimal digits; waits for the device."""
        digest = hashlib.sha256(self._layout.manifest_text)
        rows, columns = torch.stack([_by_place(self._rows), _by_place(self._columns)]).cpu()
        digest.update(f"{int(rows)}|{int(columns)}".encode())
        return digest.hexdigest()[:16]


def _by_place(sums: torch.Tensor) -> torch.Tensor:
    return (sums * torch.arange(1, 2 * len(sums) + 1, 2, device=sums.device)).sum()
