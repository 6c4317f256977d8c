"""The learner of a run on this machine: `leeway learn FILE --run-dir DIR`.

One rank runs in this process. Several are started by torchrun, which runs the same command once
for each; so are those of several machines, which meet where torchrun's own PET_NNODES,
PET_RDZV_BACKEND, PET_RDZV_ENDPOINT and PET_RDZV_ID say.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Final, Protocol

from leeway.learner.errors import LearnerStopped
from leeway.replay.errors import ConfigurationError, LeewayError
from leeway.services.config import RunConfig
from leeway.services.heartbeat import Heartbeat
from leeway.services.layout import RunDirectory
from leeway.services.processes.joining import redis_url_of, wait_for_redis

log = logging.getLogger(__name__)

GRACE: Final = "LEEWAY_GRACE_S"
GRACE_S: Final = 55.0
"""How long ranks may take to end after SIGTERM, unless LEEWAY_GRACE_S says otherwise: a step under
way is finished and checkpointed."""


def grace_s() -> float:
    """Seconds from LEEWAY_GRACE_S, or GRACE_S. Raises ConfigurationError."""
    given = os.environ.get(GRACE)
    if not given:
        return GRACE_S
    if not given.isascii() or not given.isdigit() or int(given) == 0:
        raise ConfigurationError(
            f"{GRACE} = {given!r} is no number of seconds; give a whole number of 1 or more"
        )
    return float(given)


def learn(config: RunConfig, run: RunDirectory, file: Path, *, stays: bool) -> int:
    """Train from the last checkpoint in `run` to the end. Exit code 0 when training ended or was
    asked to stop by SIGTERM or Ctrl-C, a checkpoint on disk; raises LeewayError when it failed.

    `stays`: after the end it waits for SIGTERM.
    """
    # A volume outlives its container: the file of the last one must not pass for a start.
    Heartbeat.from_environment()
    url, stopping = redis_url_of(config), _Stopping()
    os.environ.setdefault("OMP_NUM_THREADS", str(config.learner.num_threads))
    is_rank = "RANK" in os.environ
    is_alone = config.learner.num_processes == 1 and os.environ.get("PET_NNODES", "1") == "1"
    if not is_rank and not is_alone:
        return _start_ranks(config, run, file, stays)
    try:
        return _run_rank(config, run, url, stays, stopping)
    except LeewayError:
        log.info("why, in full", exc_info=True)
        raise


def _run_rank(
    config: RunConfig, run: RunDirectory, url: str, stays: bool, stopping: _Stopping
) -> int:
    asyncio.run(wait_for_redis(url, run.root.name))
    from leeway.services.learning import LearnerProcess

    process = LearnerProcess(run, config, url, stays=stays)
    stopping.pass_on(process)
    is_stopped = stays  # it ends only when some rank is told to
    try:
        asyncio.run(process.run())
    except LearnerStopped as stopped:
        log.info("%s", stopped)
        is_stopped = True
    if is_stopped and not stopping.is_told and os.environ.get("LOCAL_RANK") == "0":
        # A rank elsewhere was told. torchrun would wait 5 minutes for its machine, which goes.
        os.kill(os.getppid(), signal.SIGTERM)
    return 0


class _Stoppable(Protocol):
    def stop(self) -> None: ...


class _Stopping:
    """SIGTERM and SIGINT: before the model is loaded they end the process, since there is nothing
    to save; later they ask the learner to stop."""

    def __init__(self) -> None:
        self._process: _Stoppable | None = None
        self.is_told = False
        """Whether this process itself got a signal."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def pass_on(self, process: _Stoppable) -> None:
        self._process = process

    def _on_signal(self, number: int, frame: object) -> None:
        self.is_told = True
        if self._process is None:
            log.info("stopped before training began")
            raise SystemExit(0)
        self._process.stop()


def _start_ranks(config: RunConfig, run: RunDirectory, file: Path, stays: bool) -> int:
    """This machine's ranks under torchrun, until all have ended."""
    from leeway.services.processes.ranks import run_ranks

    command = ["leeway.services.cli", "learn", str(file), "--run-dir", str(run.root)]
    return run_ranks(
        [*command, "--stay"] if stays else command,
        num_processes=config.learner.num_processes,
        is_alone=os.environ.get("PET_NNODES", "1") == "1",
        grace_s=grace_s(),
    )
