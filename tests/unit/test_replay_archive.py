"""The file of an exported buffer: what comes back, and what is refused, record by record."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from typing import Any

import msgspec
import pytest
import zstandard

from leeway.replay import archive
from leeway.replay.archive import (
    ArchivedGroup,
    ArchiveHeader,
    ArchiveReader,
    ArchiveTrailer,
    ArchiveWriter,
)
from leeway.replay.errors import CodecError, DataError
from leeway.replay.schema import SCHEMA_VERSION, PolicyVersion
from leeway.replay.store import Slot
from leeway.replay.stored import entry_of
from leeway.replay.synthetic import build_group

HEADER = ArchiveHeader(
    schema_version=SCHEMA_VERSION,
    run="demo",
    exported_at=1.8e9,
    learner_version=7,
    limits={"max_staleness": 4},
    counters={"num_admitted": 9, "outstanding": {5: 1}},
)


def archived(number: int, **changes: Any) -> ArchivedGroup:
    group = build_group(Slot(f"group-{number}", PolicyVersion(5)), version=6, seed=number)
    entry = entry_of(group)
    made = ArchivedGroup(
        group_id=group.group_id,
        version=5,
        newest=entry.newest,
        arrival=number,
        draws=1,
        returns=2,
        priority=0.25,
        trajectories=entry.trajectories,
        payload=entry.payload,
    )
    return msgspec.structs.replace(made, **changes)


GROUPS = [archived(number) for number in range(1, 4)]


def written(groups: list[ArchivedGroup], header: ArchiveHeader = HEADER) -> bytes:
    file = io.BytesIO()
    writer = ArchiveWriter(file, header)
    for group in groups:
        writer.add(group)
    writer.end()
    return file.getvalue()


def packed(*records: Any) -> list[bytes]:
    bodies = [msgspec.msgpack.encode(record) for record in records]
    return [struct.pack("<II", len(body), zlib.crc32(body)) + body for body in bodies]


def composed(stream: bytes, format_version: int = 1, **options: Any) -> bytes:
    """A file whose records are any bytes."""
    compressed = zstandard.ZstdCompressor(**options).compress(stream)
    return b"LWREPLAY" + struct.pack("<H", format_version) + compressed


def read(data: bytes) -> tuple[list[ArchivedGroup], str]:
    """The groups before the fault, and the fault."""
    found: list[ArchivedGroup] = []
    try:
        for group in ArchiveReader(io.BytesIO(data), "x").groups():
            found.append(group)
    except CodecError as error:
        return found, str(error)
    return found, ""


def test_what_is_written_is_read():
    reader = ArchiveReader(io.BytesIO(written(GROUPS)))
    assert reader.header == HEADER
    assert list(reader.groups()) == GROUPS


def test_an_empty_buffer_is_a_file_too():
    assert read(written([])) == ([], "")


def test_a_record_is_what_the_buffer_kept():
    record = GROUPS[1].record
    assert (record.version, record.newest, record.arrival) == (5, 6, 2)
    assert (record.draws, record.returns, record.priority) == (1, 2, 0.25)
    assert record.size == len(GROUPS[1].payload)


# --- cut ---


def test_a_file_cut_at_a_record_names_the_record_and_keeps_those_before():
    parts = packed(HEADER, *GROUPS, ArchiveTrailer(num_groups=3))
    for num_records in range(1, 5):
        found, fault = read(composed(b"".join(parts[:num_records])))
        assert found == GROUPS[: num_records - 1]
        assert fault == f"x, record {num_records}: it is missing, the file was cut in front of it"


def test_a_file_cut_within_a_record_names_the_record():
    parts = packed(HEADER, *GROUPS, ArchiveTrailer(num_groups=3))
    for num_records in range(5):
        for length in (1, 7, 8, 9, len(parts[num_records]) - 1):
            stream = b"".join(parts[:num_records]) + parts[num_records][:length]
            found, fault = read(composed(stream))
            assert found == GROUPS[: max(0, num_records - 1)]
            assert fault == f"x, record {num_records}: the file was cut within it"


def test_a_file_cut_anywhere_is_a_fault_unless_its_trailer_is_there():
    data = written(GROUPS)
    for length in range(len(data)):
        found, fault = read(data[:length])
        assert found == GROUPS[: len(found)]
        # What ends the compressed frame holds nothing.
        assert fault or (found == GROUPS and length > len(data) - 8)


# --- changed ---


def test_a_flipped_bit_is_a_fault_or_changes_nothing():
    data = written(GROUPS)
    for position in range(len(data)):
        for bit in (0, 7):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            found, fault = read(bytes(changed))
            assert found == GROUPS[: len(found)]
            assert fault or found == GROUPS


def test_a_flipped_bit_of_a_record_is_found_by_its_checksum():
    stream = bytearray(b"".join(packed(HEADER, *GROUPS)))
    stream[len(b"".join(packed(HEADER, GROUPS[0]))) + 60] ^= 1
    found, fault = read(composed(bytes(stream)))
    assert found == GROUPS[:1]
    assert fault.startswith("x, record 2: its checksum is wrong")


def test_a_trailer_that_counts_otherwise_is_a_fault():
    data = composed(b"".join(packed(HEADER, GROUPS[0], ArchiveTrailer(num_groups=2))))
    assert read(data) == (GROUPS[:1], "x, record 2: the trailer counts 2 groups, not 1")


def test_data_behind_the_trailer_is_a_fault():
    data = composed(b"".join(packed(HEADER, ArchiveTrailer(num_groups=0))) + b"!")
    assert read(data)[1] == "x, record 1: data follows the trailer"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"group_id": "other"}, "holds the payload of group group-1"),
        ({"version": 7}, "is recorded under versions 7 to 6"),
        ({"newest": 5}, "is recorded under versions 5 to 5"),
        ({"trajectories": [(2, 12)]}, "has other trajectories"),
        ({"priority": float("nan")}, "has priority nan"),
        ({"priority": -1.0}, "has priority -1"),
        ({"payload": b"LW"}, "cannot be used"),
        ({"draws": -1}, "not what belongs there"),
        ({"version": 2**40}, "not what belongs there"),
        ({"group_id": ""}, "not what belongs there"),
    ],
)
def test_a_record_that_disagrees_with_its_payload_is_refused(changes, problem: str):
    found, fault = read(written([archived(1, **changes)]))
    assert found == []
    assert fault.startswith("x, record 1: ")
    assert problem in fault


# --- other versions, other files ---


def test_another_format_is_refused_with_both_numbers():
    data = composed(b"".join(packed(HEADER)), format_version=2)
    assert read(data)[1] == "x is written by format 2, this program reads 1"


def test_another_schema_is_refused_with_both_numbers():
    header = msgspec.structs.replace(HEADER, schema_version=SCHEMA_VERSION + 1)
    fault = read(written([], header))[1]
    assert f"schema version {SCHEMA_VERSION + 1}, this program reads {SCHEMA_VERSION};" in fault


@pytest.mark.parametrize("data", [b"", b"LWREPLAY", b"PK\x03\x04" * 9, b"\x28\xb5\x2f\xfd" * 4])
def test_another_file_is_no_exported_buffer(data: bytes):
    assert read(data)[1] == "x is no exported buffer; give a file of leeway replay export"


def test_what_is_not_compressed_is_a_fault_of_the_header():
    fault = read(b"LWREPLAY\x01\x00" + b"plain text, not zstd")[1]
    assert fault.startswith("x, record 0: it cannot be read")


# --- hostile ---


def test_a_length_that_lies_takes_no_memory():
    header = packed(HEADER)[0]
    claim = struct.pack("<II", archive.MAX_GROUP_BYTES, 0) + b"short"
    data = composed(header + claim)
    tracemalloc.start()
    fault = read(data)[1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert fault == "x, record 1: the file was cut within it"
    assert peak < 8 * 2**20


def test_a_record_above_the_limit_is_refused_unread():
    claim = struct.pack("<II", archive.MAX_GROUP_BYTES + 1, 0)
    data = composed(packed(HEADER)[0] + claim)
    assert f"at most {archive.MAX_GROUP_BYTES} are read" in read(data)[1]


def test_a_header_that_goes_on_for_ever_is_refused():
    stream = struct.pack("<II", 2**31, 0) + bytes(2**24)
    assert read(composed(stream))[1].startswith("x, record 0: it claims 2147483648 bytes")


def test_more_trajectories_than_a_group_can_have_are_refused_before_they_are_made():
    record = msgspec.to_builtins(GROUPS[0]) | {"trajectories": [(1, 1)] * 1_000_000}
    record["payload"] = GROUPS[0].payload
    data = composed(b"".join(packed(HEADER, record)))
    tracemalloc.start()
    fault = read(data)[1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "length <= 65536" in fault
    assert peak < 16 * 2**20


def test_a_window_that_needs_much_memory_is_refused():
    parameters = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    out = io.BytesIO(b"LWREPLAY\x01\x00")
    out.seek(0, io.SEEK_END)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    with compressor.stream_writer(out, closefd=False) as stream:
        stream.write(packed(HEADER)[0])
    fault = read(out.getvalue())[1]
    assert fault.startswith("x, record 0: it cannot be read")
    assert "too much memory" in fault


def test_a_group_too_large_for_a_record_is_not_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archive, "MAX_GROUP_BYTES", 400)
    with pytest.raises(DataError, match="record 1 has"):
        written([GROUPS[0]])
