"""A learner that was ended, gently or not, goes on to what it would have come to, bit for bit.

The real `leeway learn` trains on a buffer that the test fills: the same groups in the same order,
whether it was interrupted or not.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from leeway.replay.board import RunBoard
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import Group, PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.store import Slot
from leeway.replay.synthetic import build_group
from leeway.services.config import REDIS_URL, RunConfig, load
from leeway.services.layout import RunDirectory

pytestmark = pytest.mark.timeout(900)

NUM_STEPS, BEFORE = 6, 3
SETTINGS = """
[policy]
backend = "torch"
max_model_len = 256

[search]
max_turns = 2
max_turn_tokens = 8
max_observation_tokens = 64

[rollout]
group_size = 2
max_groups_in_flight = 4

[replay]
groups_per_step = 2
max_staleness = 8
lookahead = "full"

[learner]
objective = "so-ppo"
num_steps = 6
num_threads = 1
checkpoint_every = 1

[eval]
num_questions = 0
"""
TIMED = ("time", "wait_s", "seconds", "publish_s", "confirm_s", "rollout_wait_share")
WAIT_S = 240


class Scene:
    """One run: its Redis, its buffer, and its learner, which may be started several times."""

    def __init__(self, folder: Path, url: str, peer_ranks: int) -> None:
        self.file = folder / "run.toml"
        ranks = f"num_processes = {peer_ranks}"
        head = f'model = "{folder / "model"}"\n'
        self.file.write_text(
            head + SETTINGS.replace("num_threads = 1", f"num_threads = 1\n{ranks}")
        )
        self.run = RunDirectory(folder / "run")
        self.config: RunConfig = load(self.file)
        self.url = url
        self.log = folder / "learn.log"

    async def fill(self, groups: range) -> None:
        """Add these; each in a slot of version 0."""
        replay = RedisReplay(self.url, self.run.root.name, self.config.replay)
        board = RunBoard(self.url, self.run.root.name)
        for number in groups:
            (slot,) = await replay.admit(1, PolicyVersion(0), timeout_s=60)
            await replay.add(slot, group_of(slot, number))
        await board.set_phase("training")
        await replay.close()
        await board.close()

    async def be_done(self) -> None:
        """What the serve process says after the last evaluation."""
        board = RunBoard(self.url, self.run.root.name)
        await board.wait_phase("evaluating-after", WAIT_S)
        await board.put("eval", {"before": None, "history": [], "after": None})
        await board.set_phase("done")
        await board.close()

    @contextmanager
    def learner(self) -> Iterator[subprocess.Popen[bytes]]:
        command = ["-m", "leeway.services.cli", "learn", str(self.file)]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *command, "--run-dir", str(self.run.root)],
                stdout=log,
                stderr=log,
                env=os.environ | {REDIS_URL: self.url, "CUDA_VISIBLE_DEVICES": ""},
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(WAIT_S)

    def until_step(self, step: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until the step is done and its checkpoint on the disk."""
        deadline = time.monotonic() + WAIT_S
        while not (self.run.checkpoints / f"step-{step:08d}").is_dir() or len(self.lines) < step:
            assert process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.05)

    @property
    def lines(self) -> list[dict[str, Any]]:
        if not self.run.metrics.is_file():
            return []
        return [json.loads(line) for line in self.run.metrics.read_text().splitlines()]

    def end(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Train to the end; what each step computed, and every tensor of the last checkpoint."""
        with self.learner() as process:
            asyncio.run(self.be_done())
            assert process.wait(WAIT_S) == 0, self.log.read_text()[-3000:]
        steps = [
            {k: v for k, v in line.items() if k not in TIMED and not k.startswith("seconds")}
            for line in self.lines
        ]
        return steps, tensors_of(self.run.checkpoints / f"step-{NUM_STEPS:08d}")


def group_of(slot: Slot, number: int) -> Group:
    """The same for the same number in every run, but for its id."""
    group = build_group(slot, num_trajectories=2, num_tokens=24, seed=number)
    trajectories = tuple(
        msgspec.structs.replace(t, token_ids=t.token_ids % 2048, reward=float(i))
        for i, t in enumerate(group.trajectories)
    )
    return msgspec.structs.replace(group, trajectories=trajectories)


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = sorted(checkpoint.rglob("*.safetensors"))
    assert len(files) >= 2
    found = {f"{file.name}/{k}": v for file in files for k, v in load_file(file).items()}
    return {name: tensor.numpy().tobytes() for name, tensor in found.items()}


@pytest.fixture
def scene(tiny: Callable[[], Path]) -> Iterator[Callable[..., Scene]]:
    servers: list[EmbeddedRedis] = []

    def make(ranks: int = 1) -> Scene:
        folder = tiny()
        servers.append(EmbeddedRedis.start(folder / "redis", "run"))
        return Scene(folder, servers[-1].url, ranks)

    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def whole(tiny: Callable[[], Path]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What a learner that nobody interrupts comes to."""
    folder = tiny()
    with EmbeddedRedis.start(folder / "redis", "run") as server:
        scene = Scene(folder, server.url, 1)
        asyncio.run(scene.fill(range(2 * NUM_STEPS)))
        return scene.end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to stop"])
def test_a_learner_that_was_ended_goes_on_bit_for_bit(
    scene: Callable[..., Scene], whole: Any, number: signal.Signals
):
    cut = scene()
    asyncio.run(cut.fill(range(2 * BEFORE)))
    with cut.learner() as process:
        # It waits for groups then, the step and its checkpoint behind it.
        cut.until_step(BEFORE, process)
        # SIGKILL hits the one that works: its parent (processes/foster.py) only waits.
        hit = process if number == signal.SIGTERM else learner_of(process)
        hit.send_signal(number)
        assert process.wait(WAIT_S) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    begun = cut.lines
    asyncio.run(cut.fill(range(2 * BEFORE, 2 * NUM_STEPS)))
    steps, tensors = cut.end()
    expected_steps, expected_tensors = whole
    assert [line["step"] for line in steps] == list(range(1, NUM_STEPS + 1))
    assert cut.lines[:BEFORE] == begun
    what = ("loss", "reward_mean", "grad_norm", "num_tokens_trained", "staleness_max")
    for line, other in zip(steps, expected_steps, strict=True):
        assert {k: line[k] for k in what} == {k: other[k] for k in what}
    assert tensors.keys() == expected_tensors.keys()
    assert [name for name in tensors if tensors[name] != expected_tensors[name]] == []


def learner_of(process: subprocess.Popen[bytes]) -> Any:
    import psutil

    (found,) = psutil.Process(process.pid).children()
    return found


def ranks_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    found = learner_of(process).children()
    return {child.environ()["RANK"]: child for child in found if "RANK" in child.environ()}


def test_one_rank_of_two_that_is_told_to_stop_leaves_a_checkpoint_of_all(
    scene: Callable[..., Scene],
):
    two = scene(ranks=2)
    # Without checkpoints on the way: what is there in the end was written for the stop.
    text = two.file.read_text().replace("checkpoint_every = 1", "checkpoint_every = 1000")
    two.file.write_text(text)
    asyncio.run(two.fill(range(2 * BEFORE)))
    with two.learner() as process:
        deadline = time.monotonic() + WAIT_S
        while len(two.lines) < BEFORE:
            assert process.poll() is None, two.log.read_text()[-3000:]
            assert time.monotonic() < deadline, two.log.read_text()[-3000:]
            time.sleep(0.05)
        ranks_of(process)["1"].send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0, two.log.read_text()[-3000:]
    assert [path.name for path in two.run.checkpoints.iterdir()] == [f"step-{BEFORE:08d}"]
