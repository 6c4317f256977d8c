"""Ends what a process has started once that process is gone, however it went.

Ray starts its own daemons, and some of them outlive a driver that is killed: their parent is
another daemon, and becomes init. A guardian of the driver reads a pipe that closes with it, and
then ends its descendants. It notes them every few seconds, since the dead have none; what came
later bears a mark in its environment, which some lose when they change their title.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from leeway.services.supervision import Process

MARK: Final = "LEEWAY_FAMILY"
LOOK_S: Final = 2.0
END_S: Final = 20.0


@contextmanager
def guarded() -> Iterator[None]:
    """Whatever this process starts within it ends at the latest with this process."""
    mark = uuid.uuid4().hex
    guardian = subprocess.Popen(
        [sys.executable, "-m", "leeway.services.processes.guardian", str(os.getpid()), mark],
        stdin=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != MARK},
        start_new_session=True,  # Ctrl-C is for the others
    )
    before = os.environ.get(MARK)
    os.environ[MARK] = mark
    try:
        yield
    finally:
        if before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = before
        try:
            guardian.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            guardian.kill()


def main() -> int:
    """Wait for the end of the parent, then end its family."""
    from leeway.services.supervision import end_all, marked

    parent, mark = int(sys.argv[1]), sys.argv[2]
    known = family_of(parent)
    # A process that the parent has forked may hold the other end of the pipe.
    while os.getppid() == parent and not select.select([sys.stdin], [], [], LOOK_S)[0]:
        known = {process for process in known if process.is_running()} | family_of(parent)
    known |= family_of(parent)
    end_all(younger_than_this(known | set(marked(MARK, mark))))
    return 0


def family_of(parent: int) -> set[Process]:
    """What `parent`, which started this process, has started. Empty once it is gone: this process
    then belongs to init, whose descendants are everybody's."""
    from leeway.services.supervision import descendants

    if os.getppid() != parent:
        return set()
    found = set(descendants(parent))
    return found if os.getppid() == parent else set()


def younger_than_this(processes: set[Process]) -> list[Process]:
    """Those that started after this process, which is the first of its family: no other process
    is ended, whatever else went wrong."""
    from leeway.services.supervision import started_at

    own = started_at(os.getpid())
    return [p for p in processes if p.pid != os.getpid() and started_at(p.pid) > own]


if __name__ == "__main__":
    sys.exit(main())
