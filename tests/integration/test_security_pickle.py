"""No pickle is read where data crosses a boundary of ours, in a whole small run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
def test_training_checkpoints_buffer_and_archive_read_no_pickle(tmp_path: Path):
    program = Path(__file__).with_name("unpickling.py")
    ended = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert seen["noted"] == []
    assert [note.split(" ")[0] for note in seen["check"]] == ["datetime.date"]
