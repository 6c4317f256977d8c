"""Settings that change while several ranks train: every rank goes by them from the same step on."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leeway.replay.run_records import LiveSettings
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Lease, Slot
from leeway.replay.synthetic import build_group
from leeway.services.config import load
from leeway.services.layout import create_run
from leeway.services.learner_orders import End
from leeway.services.learning import LearnerProcess

RATE, BOUND, STEPS = "learner.learning_rate", "learner.max_grad_norm", "learner.num_steps"
BEFORE = [
    {RATE: 3e-4},
    {RATE: 2e-4},
    {RATE: 2e-4},
    {RATE: 1e-4, BOUND: 0.25, STEPS: 9.0},
]
"""What the board holds before each step. The first was left there before the learner started;
before the third nothing is new."""
SEEN = [[3e-4, 1.0, 60], [2e-4, 1.0, 60], [2e-4, 1.0, 60], [1e-4, 0.25, 9]]
"""What each of the four steps must be trained by, on either rank."""
SETTINGS = ["learner.num_steps=60", "learner.max_grad_norm=1.0", "learner.num_processes=2"]


class Board:
    """A run board on which somebody changes settings between steps."""

    def __init__(self) -> None:
        self.live = LiveSettings()

    def hold(self, values: dict[str, float]) -> None:
        if values != self.live.values:
            self.live = LiveSettings(self.live.revision + 1, values)

    async def settings(self) -> LiveSettings:
        return self.live

    async def get_all(self) -> dict[str, dict[str, Any]]:
        return {}

    async def put(self, name: str, section: dict[str, Any]) -> None:
        return


@pytest.mark.timeout(400)
def test_a_change_reaches_every_rank_before_the_step_that_follows_it(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    peers = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = [sys.executable, __file__, str(tmp_path / f"{rank}")]
        peers.append(subprocess.Popen(command, env=environment))
    assert [peer.wait(timeout=300) for peer in peers] == [0, 0]
    seen = [json.loads((tmp_path / f"{rank}" / "seen").read_text()) for rank in range(2)]
    assert seen == [SEEN, SEEN]


def _rank(folder: Path) -> None:
    config = load(None, [f'directory="{folder}"', *SETTINGS])
    process = LearnerProcess(create_run(config), config, "redis://nowhere")
    seen: list[list[float]] = []

    def train_step(*_: Any) -> None:
        learner = process._trainer.config
        assert process.num_steps == learner.num_steps
        seen.append([learner.learning_rate, learner.max_grad_norm, learner.num_steps])

    process._trainer.train_step = train_step  # pyright: ignore[reportAttributeAccessIssue]
    if process._world.rank == 0:
        asyncio.run(_lead(process))
    else:
        asyncio.run(process._follow())
    process._world.close()
    (folder / "seen").write_text(json.dumps(seen))


async def _lead(process: LearnerProcess) -> None:
    board = process._board = Board()  # pyright: ignore[reportAttributeAccessIssue]
    for step, values in enumerate(BEFORE):
        board.hold(values)
        await process._apply_settings()
        slot = Slot(slot_id=f"slot-{step}", version=PolicyVersion(step))
        await process.train(Lease(f"lease-{step}", PolicyVersion(step), (build_group(slot),)))
    process._order(End())


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
    # All is said and written: a thread of torch's may abort a process that tidies up (SIGABRT).
    os._exit(0)
