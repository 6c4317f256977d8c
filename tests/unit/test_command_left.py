"""The look at what a command leaves sees shared memory, and only that of the command."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import pytest

CODE = """
import mmap, os, sys, time
file = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 4096)
held = mmap.mmap(file, 4096)
print("ready", flush=True)
time.sleep(1.5)
if sys.argv[1] == "tidies":
    os.unlink(sys.argv[2])
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory with names")
@pytest.mark.parametrize("manner", ["tidies", "leaves"])
def test_shared_memory_that_outlives_a_command_is_found(
    leeway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manner: str
):
    fake = tmp_path / "bin" / "leeway"
    fake.parent.mkdir()
    fake.write_text(f"#!{sys.executable}\n{CODE}")
    fake.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(fake.with_name("python")))
    own, foreign = (Path(f"/dev/shm/leeway-test-{uuid.uuid4().hex}") for _ in range(2))
    foreign.touch()
    try:
        with leeway(tmp_path, manner, str(own)) as command:
            (output,) = tmp_path.glob("stdout-*")
            command.until(output.read_text, 60)
            ended = command.end(60)
        assert ended.left == ([] if manner == "tidies" else [str(own)])
    finally:
        foreign.unlink()
        own.unlink(missing_ok=True)
