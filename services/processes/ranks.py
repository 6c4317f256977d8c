"""The learner ranks of one machine, under torchrun in this process."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

log = logging.getLogger(__name__)


def run_ranks(command: Sequence[str], *, num_processes: int, is_alone: bool, grace_s: float) -> int:
    """Run `python -m command...` as `num_processes` ranks. Exit code 0 when all ended well, or
    within `grace_s` of a signal, which they get, too; otherwise that of the first that failed, and
    128 + n where that was signal n.

    `is_alone`: no other machine takes part. Else torchrun's PET_ variables say where they meet.
    """
    # Port 0 is a free one: two runs on a machine do not meet.
    here = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"] if is_alone else []
    arguments = [
        f"--nproc-per-node={num_processes}",
        *here,
        "--max-restarts=0",
        f"--shutdown-timeout={grace_s:.0f}",
        "--module",
        *command,
    ]
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except SignalException as stopped:
        log.info("the ranks ended after %s", stopped.sigval.name)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        log.info("%s", failed)
        log.error("rank %d ended with exit code %d", rank, failure.exitcode)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0
