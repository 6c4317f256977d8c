"""Documents in one file, read where they lie: a corpus of any size takes no memory of its own."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, overload

import msgspec
import numpy as np

from leeway.actors.search.documents import Document

RECORDS: Final = "documents.msgpack"
"""The documents one behind the other, each a msgpack array [id, title, text]."""
ENDS: Final = "document_ends.npy"
"""(documents,) int64: the byte at which each one ends."""


class _Record(msgspec.Struct, array_like=True, frozen=True):
    id: str
    title: str
    text: str


class DocumentWriter:
    """Writes the two files of a DocumentStore into a folder; used as a context."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._encoder = msgspec.msgpack.Encoder()
        self._ends: list[int] = []
        self._end = 0

    def __enter__(self) -> DocumentWriter:
        self._file = (self._folder / RECORDS).open("wb")
        return self

    def add(self, document: Document) -> None:
        """Append one document."""
        record = _Record(document.id, document.title, document.text)
        self._end += self._file.write(self._encoder.encode(record))
        self._ends.append(self._end)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if error is None:
            np.save(self._folder / ENDS, np.array(self._ends, np.int64))


class DocumentStore(Sequence[Document]):
    """The documents of a folder, decoded one at a time when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._ends = np.load(folder / ENDS, mmap_mode="r").view(np.ndarray)
        self._decoder = msgspec.msgpack.Decoder(_Record)
        with (folder / RECORDS).open("rb") as file:
            # Length 0 means the whole file; the mapping outlives the descriptor.
            self._records = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = int(self._ends[index - 1]) if index else 0
        record = self._decoder.decode(self._records[start : int(self._ends[index])])
        return Document(record.id, record.title, record.text)
