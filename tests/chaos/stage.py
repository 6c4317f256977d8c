"""Where a run under faults lives: a machine of its own as far as processes, network and disk go.

Linux namespaces give it process ids that hold nobody else, a network that is a loopback device and
nothing else, and a small disk in memory. Faults made inside reach nothing outside, and whatever is
started inside ends with it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

INSIDE: Final = "LEEWAY_CHAOS_INSIDE"
DISK_MB: Final = 768
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


class NoStage(RuntimeError):
    """This machine lends no namespaces. One sentence that says why."""


def is_inside() -> bool:
    """Whether this process lives on a stage."""
    return INSIDE in os.environ


def enter(module: str, arguments: Sequence[str]) -> None:
    """Replace this process by `python -m module arguments` on a stage. Raises NoStage."""
    command = [*_unshare(), sys.executable, "-m", module, *arguments]
    os.execvpe(command[0], command, {**os.environ, INSIDE: "1"})


def _unshare() -> list[str]:
    """The command that opens a stage, as root or as any other user. Raises NoStage."""
    binary = shutil.which("unshare")
    if binary is None:
        raise NoStage("unshare of util-linux is missing")
    as_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    rooms = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [binary, *as_user, *rooms]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=60)
    if tried.returncode:
        raise NoStage(f"namespaces are refused here: {tried.stderr.strip()[-200:]}")
    return command


class Stage:
    """The inside. `outside` is a folder on the machine's disk, which no fault reaches."""

    def __init__(self, outside: Path) -> None:
        assert is_inside(), "faults are made on a stage only"
        self.outside = outside
        self.disk = outside / "disk"
        self.disk.mkdir(parents=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "leeway-chaos", str(self.disk))
        set_loopback(is_up=True)

    def fill_disk(self) -> None:
        """Until nothing more fits."""
        with self._ballast.open("ab", buffering=0) as file:
            for size in (2**20, 4096, 1):
                try:
                    while file.write(b"\0" * size):
                        pass
                except OSError:
                    continue

    def empty_disk(self) -> None:
        """Take the ballast away."""
        self._ballast.unlink(missing_ok=True)

    @property
    def _ballast(self) -> Path:
        return self.disk / "ballast"


def set_loopback(*, is_up: bool) -> None:
    """Bring up the only network there is, or cut everybody off from everybody."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH22x", b"lo", 0)
        flags = struct.unpack("16sH22x", fcntl.ioctl(control, SIOCGIFFLAGS, request))[1]
        flags = flags | IFF_UP if is_up else flags & ~IFF_UP
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags))


def cut_port(port: int, *, is_cut: bool) -> None:
    """Drop what is sent to a TCP port on loopback, or let it through again."""
    what = "-A" if is_cut else "-D"
    _run("iptables", "-w", what, "INPUT", "-p", "tcp", "--dport", str(port), "-j", "DROP")


def has_packet_filter() -> bool:
    """Whether single ports can be cut off here."""
    if shutil.which("iptables") is None:
        return False
    return subprocess.run(["iptables", "-w", "-L", "INPUT"], capture_output=True).returncode == 0


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise NoStage(f"{' '.join(command)}: {done.stderr.strip()[-200:]}")
