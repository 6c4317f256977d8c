"""What a killed process has started ends with it, also what has left its session and its parent;
and nothing else does.

What ends processes runs in a namespace of its own here: a fault in it would end everybody's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import psutil
import pytest

from leeway.services.processes.guardian import family_of, younger_than_this

ISOLATED = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]

PARENT = """
import subprocess, sys, time
from leeway.services.processes.guardian import guarded

with guarded():
    # A daemon in a session of its own, whose parent is gone at once.
    starter = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', " \\
        "'import time; time.sleep(300)'], start_new_session=True, stdout=subprocess.DEVNULL).pid)"
    print(subprocess.check_output([sys.executable, "-c", starter], text=True), flush=True)
    if sys.argv[1] == "stays":
        time.sleep(300)
"""

SCENE = """
import subprocess, sys, time
import psutil

stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
parent = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdout=subprocess.PIPE)
daemon = psutil.Process(int(parent.stdout.readline()))
if sys.argv[2] == "stays":
    time.sleep(float(sys.argv[3]))
    parent.kill()
parent.wait()
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    if not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE:
        break
    time.sleep(0.1)
print("daemon", daemon.is_running() and daemon.status() != psutil.STATUS_ZOMBIE)
time.sleep(1)
print("stranger", stranger.poll() is None)
"""


def can_isolate() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*ISOLATED, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_isolate(), reason="no PID namespace can be made here")
@pytest.mark.parametrize(
    ("manner", "lives_s"),
    [("ends", 0), ("stays", 0), ("stays", 5)],
    ids=["ends", "killed before its guardian looks", "killed later"],
)
def test_a_daemon_ends_with_the_process_that_started_it_and_a_stranger_does_not(manner, lives_s):
    scene = [*ISOLATED, sys.executable, "-c", SCENE, PARENT, manner, str(lives_s)]
    done = subprocess.run(scene, capture_output=True, text=True, timeout=110)
    assert done.stdout.split() == ["daemon", "False", "stranger", "True"], done.stderr


def test_who_is_not_the_parent_has_no_family():
    init = 1 if os.getppid() != 1 else os.getpid()  # in a namespace the parent may be init
    assert family_of(init) == set()


def test_the_family_of_the_parent_holds_this_process():
    assert psutil.Process() in family_of(os.getppid())


def test_only_what_started_after_the_guardian_is_ended():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        older = {psutil.Process(1), psutil.Process(os.getppid()), psutil.Process()}
        found = younger_than_this({*older, psutil.Process(child.pid)})
        assert [process.pid for process in found] == [child.pid]
    finally:
        child.kill()
        child.wait()
