"""What a command has started ends with it, also what has left its session and its parent; and
nothing else does.

What ends processes runs in a namespace of its own here: a fault in it would end everybody's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

ISOLATED = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]

COMMAND = """
import os, signal, subprocess, sys, time
from leeway.services.processes.foster import fork_below

print(os.getpid(), flush=True)
fork_below(1.0)
if sys.argv[1] == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] == "listens":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
# A daemon in a session of its own, whose parent is gone at once.
starter = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', " \\
    "'import time; time.sleep(300)'], start_new_session=True, stdout=subprocess.DEVNULL).pid)"
daemon = subprocess.check_output([sys.executable, "-c", starter], text=True).strip()
print(os.getpid(), daemon, flush=True)
if sys.argv[1] == "ends":
    sys.exit(5)
time.sleep(300)
"""

SCENE = """
import os, signal, subprocess, sys, time
import psutil

stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
called = subprocess.Popen(command, stdout=subprocess.PIPE)
assert int(called.stdout.readline()) == called.pid
worker, daemon = (int(word) for word in called.stdout.readline().split())
assert worker != called.pid
victim, number = {
    "ends": (None, None),
    "works": (worker, signal.SIGKILL),
    "listens": (called.pid, signal.SIGTERM),
    "hangs": (called.pid, signal.SIGTERM),
    "waits": (called.pid, signal.SIGKILL),
}[sys.argv[2]]
if victim:
    os.kill(victim, number)
print(called.wait(60))

def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

deadline = time.monotonic() + 60
while lives(worker) and time.monotonic() < deadline:
    time.sleep(0.05)
print(lives(worker), lives(daemon), stranger.poll() is None)
"""


def can_isolate() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*ISOLATED, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_isolate(), reason="no PID namespace can be made here")
@pytest.mark.parametrize(
    ("manner", "code", "is_daemon_left"),
    [
        ("ends", 5, False),
        ("works", -9, False),
        ("listens", 7, False),
        ("hangs", -9, False),
        # The worker is told; a daemon that it does not end itself is left to init.
        ("waits", -9, True),
    ],
    ids=[
        "ends by itself",
        "worker killed",
        "told to stop",
        "told and hanging",
        "waiting parent killed",
    ],
)
def test_all_that_a_command_started_ends_with_it_and_nothing_else(manner, code, is_daemon_left):
    scene = [*ISOLATED, sys.executable, "-c", SCENE, COMMAND, manner]
    done = subprocess.run(scene, capture_output=True, text=True, timeout=170)
    expected = [str(code), "False", str(is_daemon_left), "True"]
    assert done.stdout.split() == expected, done.stderr
