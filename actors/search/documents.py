"""Reading corpora of "id" and "contents": JSON lines, plain, .xz or .zst; Parquet; Arrow."""

from __future__ import annotations

import io
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
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
_ARROW_SUFFIXES: Final = (".arrow", ".feather")
_TABLE_SUFFIXES: Final = (".parquet", *_ARROW_SUFFIXES)
_ROWS: Final = 8192
"""Rows of a table in memory at once."""
_WANTED: Final = '{"id": "7", "contents": "\\"Title\\"\\ntext"}'


def contents_of(document: Document) -> str:
    """Title in quotes, newline, text; the text alone where there is no title."""
    return f'"{document.title}"\n{document.text}' if document.title else document.text


def load_documents(path: str | Path) -> list[Document]:
    """Every document of a corpus. Raises what stream_documents raises."""
    return [document for _, document in stream_documents(path)]


def stream_documents(path: str | Path) -> Iterator[tuple[int, Document]]:
    """(number of the line or row, document) of each one; one portion in memory at a time.

    A folder stands for the .parquet or .arrow files in it, in the order of their names. Raises
    DataError for a bad line, a repeated id, an empty corpus.
    """
    files, first_of_id = _files_of(Path(path)), dict[str, int]()
    for file_number, file in enumerate(files):
        unit, records = _records(file)
        for number, record in records:
            place = f"{file}, {unit} {number}"
            if not record.contents.strip():
                raise DataError(f"{place}: contents are empty; it must be {_WANTED}")
            here = file_number << 40 | number  # one number: a tuple would take twice the memory
            first = first_of_id.setdefault(str(record.id), here)
            if first != here:
                other = "" if first >> 40 == file_number else f" of {files[first >> 40]}"
                raise DataError(
                    f"{place}: id {str(record.id)!r} was used on {unit} {first % (1 << 40)}{other};"
                    " every document needs an id of its own"
                )
            yield number, Document(str(record.id), *split_contents(record.contents))
    if not first_of_id:
        raise DataError(f"{path} holds no document; each line must be {_WANTED}")


def _records(file: Path) -> tuple[str, Iterator[tuple[int, _Line]]]:
    """What the places of a file are called, and (place, record) of each document."""
    return ("row", _rows(file)) if file.suffix in _TABLE_SUFFIXES else ("line", _lines(file))


def _lines(file: Path) -> Iterator[tuple[int, _Line]]:
    for number, line in read_lines(file):
        try:
            yield number, _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{file}, line {number}: {error}; it must be {_WANTED}") from error


def _files_of(path: Path) -> list[Path]:
    """The tables of a folder by name, or the file alone."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in _TABLE_SUFFIXES)
    if not files:
        raise DataError(f"{path} holds no {' or '.join(_TABLE_SUFFIXES)} file; name a corpus")
    return files


def _rows(path: Path) -> Iterator[tuple[int, _Line]]:
    """Rows count from 1."""
    number = 0
    try:
        for batch in _batches(path):
            _check_columns(path, batch.schema)
            columns = (batch.column("id").to_pylist(), batch.column("contents").to_pylist())
            for id_, contents in zip(*columns, strict=True):
                number += 1
                try:
                    yield number, msgspec.convert({"id": id_, "contents": contents}, _Line)
                except msgspec.ValidationError as error:
                    raise DataError(
                        f"{path}, row {number}: {error}; it must be {_WANTED}"
                    ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except pa.ArrowException as error:
        raise DataError(f"{path}, after row {number}: {error}; write the file again") from error


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Portions of a Parquet file, or of an Arrow file or stream, which have the same suffix."""
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as table:
            _check_columns(path, table.schema_arrow)
            yield from table.iter_batches(batch_size=_ROWS, columns=["id", "contents"])
        return
    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            yield from pa.ipc.open_stream(source)
        else:
            yield from (reader.get_batch(i) for i in range(reader.num_record_batches))


def _check_columns(path: Path, schema: pa.Schema) -> None:
    missing = [name for name in ("id", "contents") if name not in schema.names]
    if missing:
        raise DataError(
            f"{path} has no column {' and no column '.join(missing)}; it has "
            f"{', '.join(schema.names)} and must have id and contents"
        )


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
