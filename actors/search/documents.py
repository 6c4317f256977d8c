"""Reading corpora: JSON lines of {"id", "contents"}, plain, .xz or .zst."""

from __future__ import annotations

import io
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import msgspec
import zstandard

from leeway.actors.search.protocol import split_contents
from leeway.replay.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_CHUNK_BYTES: Final = 1 << 18


class Document(msgspec.Struct, frozen=True):
    """One passage of a corpus."""

    id: str
    title: str
    """Empty when the contents have no title line."""
    text: str


class _Line(msgspec.Struct):
    id: str | int
    contents: str


_DECODER: Final = msgspec.json.Decoder(_Line)
_WANTED: Final = '{"id": "7", "contents": "\\"Title\\"\\ntext"}'


def load_documents(path: str | Path) -> list[Document]:
    """Every document of a corpus. Raises what stream_documents raises."""
    return [document for _, document in stream_documents(path)]


def stream_documents(path: str | Path) -> Iterator[tuple[int, Document]]:
    """(line number, document) of each line that is not blank; one document in memory at a time.

    Raises DataError for a bad line, a repeated id, an empty file.
    """
    line_of_id: dict[str, int] = {}
    for number, line in read_lines(path):
        try:
            record = _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path}, line {number}: {error}; it must be {_WANTED}") from error
        if not record.contents.strip():
            raise DataError(f"{path}, line {number}: contents are empty; it must be {_WANTED}")
        first = line_of_id.setdefault(str(record.id), number)
        if first != number:
            raise DataError(
                f"{path}, line {number}: id {str(record.id)!r} was used on line {first};"
                " every document needs an id of its own"
            )
        yield number, Document(str(record.id), *split_contents(record.contents))
    if not line_of_id:
        raise DataError(f"{path} holds no document; each line must be {_WANTED}")


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, bytes) of each non-blank line, decompressed by the file's suffix."""
    path = Path(path)
    number = 0
    try:
        with _open(path) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (lzma.LZMAError, zstandard.ZstdError, EOFError) as error:
        raise DataError(
            f"{path}, after line {number}: the compressed data are damaged or cut short ({error});"
            " write the file again"
        ) from error


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    if path.suffix == ".xz":
        with lzma.open(path, "rb") as stream:
            yield stream
    elif path.suffix == ".zst":
        with path.open("rb") as stream:
            yield io.BufferedReader(_ZstdFrames(stream), buffer_size=_CHUNK_BYTES)
    else:
        with path.open("rb") as stream:
            yield stream


class _ZstdFrames(io.RawIOBase):
    """Decompressed bytes of one or more frames.

    zstandard's own stream reader ends quietly where a file was cut short, and half a corpus would
    be served; this one raises EOFError unless the last frame is whole.
    """

    def __init__(self, compressed: IO[bytes]) -> None:
        self._compressed = compressed
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._unread = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self._ready:
            chunk = self._unread or self._compressed.read(_CHUNK_BYTES)
            if not chunk:
                if self._frame is not None:
                    raise EOFError("its last frame is incomplete")
                return 0
            self._ready = memoryview(self._decompress(chunk))
        view = memoryview(buffer).cast("B")
        num_bytes = min(len(view), len(self._ready))
        view[:num_bytes] = self._ready[:num_bytes]
        self._ready = self._ready[num_bytes:]
        return num_bytes

    def _decompress(self, chunk: bytes) -> bytes:
        if self._frame is None:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        data = self._frame.decompress(chunk)
        self._unread = self._frame.unused_data
        if self._frame.eof:
            self._frame = None
        return data
