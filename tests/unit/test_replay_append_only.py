"""What a killed server left of a transaction is cut off, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from leeway.replay.append_only import cut_open_transaction


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


PAYLOAD = b"*1\r\n$5\r\nMULTI\r\n\x00\xff" * 3
"""Bytes that look like the beginning of a transaction."""
WHOLE = (
    command(b"SELECT", b"0")
    + command(b"MULTI")
    + command(b"SET", b"a", PAYLOAD)
    + command(b"EXEC")
    + command(b"SET", b"b", PAYLOAD)
)
OPEN = command(b"MULTI") + command(b"ZADD", b"slots", b"1", b"x") + command(b"SET", b"s", b"12345")


def cut(home: Path, data: bytes) -> bytes:
    file = home / "appendonly.aof"
    file.write_bytes(data)
    num_bytes = cut_open_transaction(home)
    left = file.read_bytes()
    assert len(left) == len(data) - num_bytes
    return left


def test_a_file_that_ends_whole_stays_as_it_is(tmp_path: Path):
    assert cut(tmp_path, WHOLE) == WHOLE
    assert cut(tmp_path, WHOLE + OPEN + command(b"EXEC")) == WHOLE + OPEN + command(b"EXEC")


@pytest.mark.parametrize("length", range(15, len(OPEN) + 1))
def test_an_open_transaction_is_cut_off_wherever_it_ends(tmp_path: Path, length: int):
    # From 15 bytes on its MULTI is whole; with less, Redis itself cuts in the right place.
    assert cut(tmp_path, WHOLE + OPEN[:length]) == WHOLE


def test_half_an_exec_is_no_exec(tmp_path: Path):
    assert cut(tmp_path, WHOLE + OPEN + command(b"EXEC")[:-3]) == WHOLE


def test_a_preamble_in_front_is_not_read(tmp_path: Path):
    preamble = b"REDIS0009\xfa\x09redis-ver\x066.2.14" + bytes(range(256))
    assert cut(tmp_path, preamble + WHOLE + OPEN) == preamble + WHOLE


def test_of_a_row_of_files_the_last_is_looked_at(tmp_path: Path):
    row = tmp_path / "appendonlydir"
    row.mkdir()
    for number in (9, 10):
        (row / f"appendonly.aof.{number}.incr.aof").write_bytes(WHOLE + OPEN)
    cut_open_transaction(tmp_path)
    assert (row / "appendonly.aof.9.incr.aof").read_bytes() == WHOLE + OPEN
    assert (row / "appendonly.aof.10.incr.aof").read_bytes() == WHOLE


def test_without_a_file_there_is_nothing_to_cut(tmp_path: Path):
    assert cut_open_transaction(tmp_path) == 0
    (tmp_path / "appendonly.aof").touch()
    assert cut_open_transaction(tmp_path) == 0
