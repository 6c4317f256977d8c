"""The training loop of `leeway bench api`: what a run does to Redis and to a core, without a model.

Each step admits, adds and draws a step's groups, multiplies matrices for as long as a small
learner's step takes, acknowledges, and writes what the learner writes. It never waits: what the API
takes of the machine is missing here.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from leeway.replay.config import ReplayConfig
from leeway.replay.run_board import RunBoard
from leeway.replay.schema import PolicyVersion
from leeway.replay.sharded_store import connect_replay
from leeway.replay.synthetic import build_group

GROUPS_PER_STEP: Final = 8
GROUP_SIZE: Final = 8
NUM_TOKENS: Final = 256
NUM_PRODUCTS: Final = 12
SIDE: Final = 512
METRICS: Final = {f"metric_{number}": float(number) for number in range(60)}
"""As many numbers as a step's record has."""


def run_training(pipe: Any, url: str, run: str) -> None:
    """Windows of steps, each as long as the pipe says, until it says None; sends steps a second."""
    asyncio.run(_serve(pipe, url, run))


async def _serve(pipe: Any, url: str, run: str) -> None:
    import torch

    torch.set_num_threads(1)
    matrix = torch.rand(SIDE, SIDE) / SIDE
    config = ReplayConfig(groups_per_step=GROUPS_PER_STEP, max_staleness=1)
    replay, board = connect_replay(url, run, config), RunBoard(url, run)
    await board.set_phase("training")
    await board.put("run", {"name": run, "num_steps": 10**6, "started_at": time.time()})
    step = 0
    while (seconds := await asyncio.to_thread(pipe.recv)) is not None:
        began, first = time.perf_counter(), step
        while time.perf_counter() - began < seconds:
            step += 1
            await _step(replay, board, matrix, step)
        pipe.send((step - first) / (time.perf_counter() - began))
    await replay.close()
    await board.close()


async def _step(replay: Any, board: RunBoard, matrix: Any, step: int) -> None:
    version = PolicyVersion(step - 1)
    left = GROUPS_PER_STEP
    while left:
        slots = await replay.admit(left, version, 10.0)
        for slot in slots:
            group = build_group(slot, None, GROUP_SIZE, NUM_TOKENS, seed=step)
            await replay.add(slot, group)
        left -= len(slots)
    lease = await replay.draw(10.0)
    product = matrix
    for _ in range(NUM_PRODUCTS):
        product = product @ matrix
    await replay.acknowledge(lease, PolicyVersion(step))
    line = {"step": step, "time": time.time(), "wait_s": 0.0, **METRICS}
    await board.put("learner", {"step": step, "version": step, "metrics": METRICS})
    await board.put("policy:engine-1", {"version": step, "tokens_per_s": 3000.0})
    await board.put("rollout:worker-0", {"num_groups_in_flight": 8, "wait_share": 0.1})
    await board.append_step(line)
