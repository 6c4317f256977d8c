"""The end of an append-only file that a killed server left.

Redis writes what a script did between MULTI and EXEC, so that it is loaded whole or not at all. A
server that is killed in the middle of a write leaves a piece of that. Redis 6.2 then loads right,
but cuts the file behind the last whole command and not in front of the MULTI; what it appends
afterwards stands behind an open MULTI, and at the next start the half of a script that never ended
comes back. So the piece is cut off before the server starts.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Final

_MULTI: Final = b"*1\r\n$5\r\nMULTI\r\n"
_EXEC: Final = b"*1\r\n$4\r\nEXEC\r\n"
_OPENINGS: Final = 64
"""How many places that look like a MULTI are looked at, from the end: a payload may hold the same
bytes."""


def cut_open_transaction(home: Path) -> int:
    """Cut an unfinished transaction off the file in `home`. Returns how many bytes that were."""
    path = _last_file(home)
    if path is None or not path.stat().st_size:
        return 0
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            size = len(data)
            end = _whole_until(data)
        if end < size:
            file.truncate(end)
    return size - end


def _last_file(home: Path) -> Path | None:
    """The one that is appended to: a single file up to Redis 6, the last of a row from 7 on."""
    row = (home / "appendonlydir").glob("appendonly.aof.*.incr.aof")
    newest = max(row, key=lambda path: int(path.name.split(".")[2]), default=None)
    single = home / "appendonly.aof"
    return newest or (single if single.is_file() else None)


def _whole_until(data: mmap.mmap) -> int:
    """Where to cut: the last MULTI if its EXEC is missing, else the end."""
    at = len(data)
    for _ in range(_OPENINGS):
        at = data.rfind(_MULTI, 0, at)
        if at < 0:
            break
        is_command, is_open = _follow(data, at)
        if is_command:
            return at if is_open else len(data)
    return len(data)


def _follow(data: mmap.mmap, at: int) -> tuple[bool, bool]:
    """Whether commands begin at `at`, and whether the transaction there is still open at the end.

    A command that the end cuts short counts as one.
    """
    while at < len(data):
        if data[at : at + len(_EXEC)] == _EXEC:
            return True, False
        after = _skip(data, at)
        if after is None:
            return False, False
        at = after
    return True, True


def _skip(data: mmap.mmap, at: int) -> int | None:
    """Where the command at `at` ends, beyond the end if it is cut short; None if there is none."""
    count = _number(data, at, b"*")
    if count is None:
        return None
    num_words, at = count
    for _ in range(num_words):
        if at >= len(data):
            return at
        length = _number(data, at, b"$")
        if length is None:
            return None
        at = length[1] + length[0] + len(b"\r\n")
    return at


def _number(data: mmap.mmap, at: int, sign: bytes) -> tuple[int, int] | None:
    """The number behind `sign`, and where what follows it begins. Cut short, it is 0."""
    if data[at : at + 1] != sign:
        return None
    end = data.find(b"\r\n", at, at + 32)
    if end < 0:
        is_cut = at + 32 > len(data)
        return (0, len(data)) if is_cut else None
    digits = data[at + 1 : end]
    return (int(digits), end + 2) if digits.isdigit() else None
