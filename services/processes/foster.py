"""A parent for all that a command starts, which ends it once the command is over, however it went.

    leeway serve (waits, passes signals on) --- leeway serve (works) --- Ray's daemons, replicas

Ray's daemons outlive a driver that is killed: they become children of init, and nobody ends them.
So the command forks before it starts anything. The process that was called only waits; the kernel
makes it the parent of every descendant whose own parent dies (PR_SET_CHILD_SUBREAPER), so all that
is below it at the end was started by the command. Should it be killed itself, the one that works
gets SIGTERM. One that was told to end and does not, because it hangs, is killed after a while.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from typing import Final

PASSED_ON: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
FOR_EVER_S: Final = 3600.0
"""One wait, which is begun again."""


GRACE_S: Final = 90.0


def fork_below(grace_s: float = GRACE_S) -> None:
    """Return in a new process, a child of this one, that goes on with the command.

    The one that called does not return. It ends as the child did, by exit code or signal, when all
    below it has ended. The child has `grace_s` to end after the first signal that is passed on.
    Call it while the process has one thread.
    """
    from leeway.services.supervision import adopt_orphans, end_with_parent

    here = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})
    adopt_orphans()
    child = os.fork()
    if child:
        _end_as(_wait(child, grace_s))
    # A group of its own: Ctrl-C in a terminal comes once, by way of the parent.
    os.setpgid(0, 0)
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON | {signal.SIGCHLD})
    if os.getppid() != here:  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGTERM)


def _wait(child: int, grace_s: float) -> int:
    """Its wait status, when it and all it has left behind are over."""
    from leeway.services.supervision import descendants, end_found

    deadline = float("inf")
    while (status := _reap(child)) is None:
        left_s = min(FOR_EVER_S, max(0.0, deadline - time.monotonic()))
        received = signal.sigtimedwait(PASSED_ON | {signal.SIGCHLD}, left_s)
        with contextlib.suppress(ProcessLookupError):
            if received is not None and received.si_signo in PASSED_ON:
                os.kill(child, received.si_signo)
                deadline = min(deadline, time.monotonic() + grace_s)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                deadline = float("inf")
    end_found(lambda: descendants(os.getpid()))
    return status


def _reap(child: int) -> int | None:
    """Take leave of the dead, adopted ones included; the status of `child` if it is among them."""
    found: int | None = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                found = status
    return found


def _end_as(status: int) -> None:
    """End this process with the exit code, or by the signal, of another."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.Signals(-code)})
        os.kill(os.getpid(), -code)
    os._exit(code)
