"""The learner process, one rank of it. torchrun starts it:

python -m torch.distributed.run --nproc-per-node N -m leeway.services.processes.learn RUN_DIR
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from leeway.learner.errors import LearnerStopped
from leeway.services.layout import open_run


def main() -> int:
    """Exit code 0 when training ended or was asked to stop (a checkpoint is on disk then)."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    run = open_run(sys.argv[1])
    config = run.read_config()
    from leeway.services.learning import LearnerProcess

    process = LearnerProcess(run, config, run.read_redis_url())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: process.stop())
    try:
        asyncio.run(process.run())
    except LearnerStopped as stopped:
        logging.getLogger(__name__).info("%s", stopped)
    return 0


if __name__ == "__main__":
    sys.exit(main())
