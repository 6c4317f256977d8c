"""A wrong clock and a slow disk for Redis and Leeway's processes, by a library loaded before libc.

All numbers lie in a file that the library maps, so they change while the run lasts. The machine's
own clock is never touched. A Redis can also be held in a write or a sync, to be killed there.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("shim.c")
LAYOUT: Final = "<qq"
HOLD: Final = "<qqq"
"""Behind LAYOUT: where to hold, how much of a write is written, and who is held."""
WRITE, SYNC = 1, 2


class Shim:
    """The library, built, and the file it reads."""

    def __init__(self, folder: Path) -> None:
        """Raises FileNotFoundError where there is no C compiler."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise FileNotFoundError("a C compiler (cc) is needed for a wrong clock and a slow disk")
        self.library = folder / "shim.so"
        self.control = folder / "control"
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(self.library), str(SOURCE)]
        subprocess.run([*command, "-ldl", "-lpthread"], check=True, timeout=120)
        self._clock_s, self._disk_s = 0.0, 0.0
        self.control.write_bytes(struct.pack(LAYOUT, 0, 0) + struct.pack(HOLD, 0, 0, 0))

    @property
    def environment(self) -> dict[str, str]:
        """What processes need to be reached by it."""
        return {"LD_PRELOAD": str(self.library), "LEEWAY_CHAOS_CONTROL": str(self.control)}

    def set_clock(self, ahead_s: float) -> None:
        """The wall clock is wrong by so much from now on."""
        self._clock_s = ahead_s
        self._write()

    def slow_disk(self, delay_s: float) -> None:
        """Every write to a regular file, and every sync, takes so much longer."""
        self._disk_s = delay_s
        self._write()

    def hold(self, where: int, part: float = 0.0) -> None:
        """The next write of a script to the append-only file ends after `part` of its bytes
        (WRITE), or the sync behind it never ends (SYNC); 0 holds nobody."""
        with self.control.open("r+b") as file:
            file.seek(struct.calcsize(LAYOUT))
            file.write(struct.pack(HOLD, where, int(1000 * part), 0))

    @property
    def held(self) -> int:
        """Process id of the Redis that stands still; 0 while none does."""
        return struct.unpack_from(HOLD, self.control.read_bytes(), struct.calcsize(LAYOUT))[2]

    def _write(self) -> None:
        # Written in place: the file is mapped.
        with self.control.open("r+b") as file:
            file.write(struct.pack(LAYOUT, int(1e3 * self._clock_s), int(1e6 * self._disk_s)))
