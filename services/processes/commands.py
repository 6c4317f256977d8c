"""The processes of `leeway train` as commands: how each is called, in what environment; and the end
of those that a killed `leeway train` has left.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from leeway.replay.free_pages import FEW_ARENAS, LARGE_BLOCKS
from leeway.services import supervision
from leeway.services.config import REDIS_URL, RunConfig
from leeway.services.heartbeat import FILE as HEARTBEAT
from leeway.services.layout import RunDirectory
from leeway.services.processes.devices import split_gpus, visible_gpus
from leeway.services.processes.members import Command, Pulse
from leeway.services.watch import WATCHED

log = logging.getLogger(__name__)

LEARNER_GRACE_S: Final = 60.0
"""A step may be under way when the stop comes; it is finished and checkpointed."""
SERVE_GRACE_S: Final = 30.0
API_GRACE_S: Final = 15.0
LEFTOVER_GRACE_S: Final = 3.0


def commands(config: RunConfig, run: RunDirectory, url: str, scratch: str) -> list[Command]:
    """What anybody would type, with this run's own configuration; in the order of starting. `url`
    is that of Redis, `scratch` a folder that is removed after the run."""
    shared = {
        **FEW_ARENAS,
        **one_machine(),
        "TMPDIR": scratch,
        REDIS_URL: url,
        WATCHED: "1",
    }
    busy = {
        **shared,
        **LARGE_BLOCKS,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # Engine and learner share the cores: a thread that waits must not spin.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    num_engine_gpus = config.policy.num_replicas * config.policy.tensor_parallel_size
    serve_gpus, learner_gpus = split_gpus(
        visible_gpus(), config.learner.num_processes, num_engine_gpus
    )

    heartbeat = Path(os.environ.get(HEARTBEAT) or Path(scratch) / "learner-lives")

    def words(name: str) -> list[str]:
        return ["leeway.services.cli", name, str(run.config), "--run-dir", str(run.root)]

    return [
        Command(
            "api",
            words("api"),
            run.log("api"),
            shared,
            grace_s=API_GRACE_S,
            is_needed=False,
        ),
        Command(
            "serve",
            words("serve"),
            run.log("serve"),
            {**busy, **serve_gpus},
            grace_s=SERVE_GRACE_S,
        ),
        Command(
            "learner",
            words("learn"),
            run.log("learner"),
            {**busy, **learner_gpus, HEARTBEAT: str(heartbeat)},
            grace_s=LEARNER_GRACE_S,
            pulse=Pulse(heartbeat, config.supervision.silence_deadline_s),
        ),
    ]


def one_machine() -> dict[str, str]:
    """Environment in which weights travel by way of loopback only. Engines of a Ray cluster may be
    elsewhere; and what an operator has chosen stays."""
    if os.environ.get("RAY_ADDRESS"):
        return {}
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: os.environ.get(name, "lo") for name in names}


def end_leftovers(run: RunDirectory) -> None:
    """End what a `leeway train` that was killed has left of this run. Its processes end by
    themselves, but a learner may first wait for a Redis that is gone, and would find ours."""
    state = run.read_state()
    for name, pid in (state.pids if state else {}).items():
        family = supervision.family_of(pid)
        # An id may be another's by now.
        if name != "train" and family and str(run.root) in " ".join(family[0][1]):
            log.warning("ending process %d, the %s that was left of this run", pid, name)
            supervision.end_family(pid, LEFTOVER_GRACE_S)
