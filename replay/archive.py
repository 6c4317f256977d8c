"""The file of an exported buffer; archive_buffer.py fills it and stores what it holds.

    b"LWREPLAY" | format version, uint16 | one zstd frame: header, group, ..., group, trailer
    a record:   bytes of its msgpack, uint32 | CRC-32 of its msgpack, uint32 | its msgpack

Numbers are little-endian. Record 0 is the header, record n the n-th group in order of arrival. The
trailer says how many groups there are, so a file that was cut is noticed. A file is read and
written record by record: memory is a few times the largest group, whatever the file claims.
docs/replay.md describes every field.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO, Final, TypeVar

import msgspec
import zstandard

from leeway.replay.bounds import newest_version
from leeway.replay.codec import decode
from leeway.replay.errors import CodecError, DataError
from leeway.replay.schema import SCHEMA_VERSION, check_group
from leeway.replay.stored import StoredGroup

T = TypeVar("T")

MAGIC: Final = b"LWREPLAY"
FORMAT_VERSION: Final = 1
"""Raised with every change of the layout or of the fields of a record."""

MAX_HEADER_BYTES: Final = 2**20
MAX_GROUP_BYTES: Final = 2**27
"""Largest record, 128 MiB: some 15 million tokens."""
MAX_WINDOW_BYTES: Final = 2**23
"""What decompression may keep of the past; level 3 asks for 2 MiB."""

_PREAMBLE: Final = struct.Struct("<8sH")
_FRAME: Final = struct.Struct("<II")
_LEVEL: Final = 3
_STEP_BYTES: Final = 2**20
"""Memory is taken for so much at a time: a length may lie."""

_Version = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class ArchiveHeader(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """What the groups were taken from."""

    schema_version: int
    """Of the groups' payloads."""
    run: str
    exported_at: float
    """Unix time."""
    learner_version: _Version
    limits: dict[str, Any]
    """The `[replay]` table of the exporting run, without its URL."""
    counters: dict[str, Any]
    """ReplayStats at the export, without waits, slots and leases."""


class ArchivedGroup(msgspec.Struct, frozen=True, kw_only=True, tag="group"):
    """One group: what the buffer kept of it, and its bytes. Field by field as in StoredGroup."""

    group_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    version: _Version
    newest: _Version
    arrival: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    draws: _Count
    returns: _Count
    priority: float
    # The bound is checked before the list is made: its pairs take 40 times their bytes in memory.
    trajectories: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=65_536)]
    payload: bytes

    @property
    def record(self) -> StoredGroup:
        """As the buffer keeps it."""
        return StoredGroup(
            self.version, self.newest, self.arrival, self.draws, self.returns, len(self.payload),
            self.priority, self.trajectories,
        )  # fmt: skip


class ArchiveTrailer(msgspec.Struct, frozen=True, kw_only=True, tag="trailer"):
    """The end of a whole file."""

    num_groups: int


_header_decoder = msgspec.msgpack.Decoder(ArchiveHeader)
_entry_decoder = msgspec.msgpack.Decoder(ArchivedGroup | ArchiveTrailer)


class ArchiveWriter:
    """Writes to an open file. Without `end` the file counts as cut."""

    def __init__(self, file: BinaryIO, header: ArchiveHeader) -> None:
        file.write(_PREAMBLE.pack(MAGIC, FORMAT_VERSION))
        self._stream = zstandard.ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False)
        self.num_groups = 0
        self._write(header)

    def add(self, group: ArchivedGroup) -> None:
        """Append a group. Raises DataError for one above MAX_GROUP_BYTES."""
        self._write(group)
        self.num_groups += 1

    def end(self) -> None:
        """Write the trailer and end the frame; the file stays open."""
        self._write(ArchiveTrailer(num_groups=self.num_groups))
        self._stream.flush(zstandard.FLUSH_FRAME)

    def _write(self, record: ArchiveHeader | ArchivedGroup | ArchiveTrailer) -> None:
        packed = msgspec.msgpack.encode(record)
        if len(packed) > MAX_GROUP_BYTES:
            raise DataError(
                f"record {self.num_groups + 1} has {len(packed)} bytes, an exported group may have "
                f"{MAX_GROUP_BYTES}; train or drop it first"
            )
        self._stream.write(_FRAME.pack(len(packed), zlib.crc32(packed)))
        self._stream.write(packed)


class ArchiveReader:
    """Reads from an open file. `header` is there at once, `groups` reads on."""

    def __init__(self, file: BinaryIO, name: str = "the file") -> None:
        """`name` is for messages. Raises CodecError for what this program does not read."""
        self._name = name
        self._record = 0
        self._check_preamble(file.read(_PREAMBLE.size))
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._stream = decompressor.stream_reader(file, closefd=False)
        self.header = self._next(_header_decoder, MAX_HEADER_BYTES)
        if self.header.schema_version != SCHEMA_VERSION:
            raise CodecError(
                f"{name} holds groups of schema version {self.header.schema_version}, this program "
                f"reads {SCHEMA_VERSION}; import it with the version that wrote it"
            )

    def groups(self) -> Iterator[ArchivedGroup]:
        """Every group in order, each found whole and in agreement with its payload.

        Raises CodecError, with the number of the record, for any fault; and nothing else.
        """
        while True:
            self._record += 1
            entry = self._next(_entry_decoder, MAX_GROUP_BYTES)
            if isinstance(entry, ArchiveTrailer):
                return self._check_end(entry)
            problem = _first_problem(entry)
            if problem:
                raise self._fault(f"group {entry.group_id} {problem}")
            yield entry

    def _check_preamble(self, preamble: bytes) -> None:
        if len(preamble) < _PREAMBLE.size or not preamble.startswith(MAGIC):
            raise CodecError(
                f"{self._name} is no exported buffer; give a file of leeway replay export"
            )
        version = _PREAMBLE.unpack(preamble)[1]
        if version != FORMAT_VERSION:
            raise CodecError(
                f"{self._name} is written by format {version}, this program reads {FORMAT_VERSION}"
            )

    def _check_end(self, trailer: ArchiveTrailer) -> None:
        num_groups = self._record - 1
        if trailer.num_groups != num_groups:
            raise self._fault(f"the trailer counts {trailer.num_groups} groups, not {num_groups}")
        if self._read(1):
            raise self._fault("data follows the trailer")

    def _next(self, decoder: msgspec.msgpack.Decoder[T], max_bytes: int) -> T:
        frame = self._read(_FRAME.size)
        if not frame:
            raise self._fault("it is missing, the file was cut in front of it")
        if len(frame) < _FRAME.size:
            raise self._fault("the file was cut within it")
        size, checksum = _FRAME.unpack(frame)
        if size > max_bytes:
            raise self._fault(f"it claims {size} bytes, at most {max_bytes} are read")
        packed = self._read(size)
        if len(packed) < size:
            raise self._fault("the file was cut within it")
        if zlib.crc32(packed) != checksum:
            raise self._fault("its checksum is wrong, the file was changed after it was written")
        try:
            return decoder.decode(packed)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise self._fault(f"it is not what belongs there ({error})") from None

    def _read(self, size: int) -> bytearray:
        """`size` bytes of the stream, fewer where it ends."""
        data = bytearray()
        try:
            while len(data) < size:
                part = self._stream.read(min(size - len(data), _STEP_BYTES))
                if not part:
                    break
                data += part
        except (zstandard.ZstdError, OSError) as error:
            raise self._fault(f"it cannot be read ({error})") from None
        return data

    def _fault(self, problem: str) -> CodecError:
        return CodecError(f"{self._name}, record {self._record}: {problem}")


def _first_problem(entry: ArchivedGroup) -> str | None:
    """What the buffer or the learner would stumble over later."""
    try:
        group = decode(entry.payload)
        check_group(group)
    except DataError as error:
        return f"cannot be used: {error}"
    if group.group_id != entry.group_id:
        return f"holds the payload of group {group.group_id}"
    if entry.version > group.oldest_version or entry.newest != newest_version(group):
        return (
            f"is recorded under versions {entry.version} to {entry.newest}, its tokens are of "
            f"{group.oldest_version} to {newest_version(group)}"
        )
    if entry.trajectories != [(len(t.turns), len(t.token_ids)) for t in group.trajectories]:
        return "has other trajectories than its record says"
    if not (math.isfinite(entry.priority) and entry.priority >= 0):
        return f"has priority {entry.priority}"
    return None
