"""Lines of a run directory on a disk that may be full."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from leeway.services import records
from leeway.services.layout import RunDirectory
from leeway.services.records import Records, append_whole


class Full:
    """A file on a disk that has room for four bytes more."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def seek(self, *where: int) -> int:
        return self._file.seek(*where)

    def write(self, data: bytes) -> int:
        return self._file.write(data[:4])

    def truncate(self, size: int) -> int:
        return self._file.truncate(size)


def test_a_line_is_appended_whole_or_not_at_all(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    append_whole(file, b'{"step": 1}\n')

    class Narrow:
        def open(self, *_: object, **__: object) -> Full:
            return Full(file)

        def __str__(self) -> str:
            return str(file)

    narrow: Any = Narrow()
    with pytest.raises(OSError, match="No space left"):
        append_whole(narrow, b'{"step": 2}\n')
    assert file.read_bytes() == b'{"step": 1}\n'
    append_whole(file, b'{"step": 2}\n')
    assert file.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


async def test_events_are_copied_again_once_a_full_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(records, "EVERY_S", 0.01)
    board: Any = None
    kept, num = Records(RunDirectory(tmp_path), board), 0
    copied = asyncio.Event()

    async def copy() -> None:
        nonlocal num
        num += 1
        if num == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        copied.set()

    monkeypatch.setattr(kept, "copy", copy)
    keeping = asyncio.create_task(kept.keep())
    await asyncio.wait_for(copied.wait(), 60)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
