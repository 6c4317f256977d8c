"""Ctrl-C, SIGTERM and resuming: nothing keeps running, nothing that was done is done again."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from leeway.replay.board import RunBoard
from leeway.replay.redis_store import RedisReplay
from leeway.replay.server import EmbeddedRedis
from leeway.replay.store import ReplayStats
from leeway.services.layout import RunDirectory

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

NO_EVAL = ("--set", "eval.num_questions=0")
DEEP = ("--set", "replay.max_staleness=3", "--set", "rollout.max_groups_in_flight=8")
LONG = (*NO_EVAL, *DEEP, "--set", "learner.num_steps=100000")


def steps_of(run: RunDirectory) -> list[int]:
    if not run.metrics.is_file():
        return []
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


def checkpoint_of(run: RunDirectory) -> int:
    return max(int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*"))


@dataclass
class Buffer:
    """What Redis keeps of a run that is stopped."""

    stats: ReplayStats
    group_ids: set[str]
    position: int
    """Questions handed out so far."""


async def buffer_of(run: RunDirectory) -> Buffer:
    with EmbeddedRedis.start(run.redis) as server:
        replay = RedisReplay(server.url, run.root.name, run.read_config().replay)
        board = RunBoard(server.url, run.root.name)
        sections = await board.get_all()
        found = Buffer(
            await replay.stats(),
            set(await replay.group_ids()),
            sections["rollout:worker-0"]["position"]["position"],
        )
        await replay.close()
        await board.close()
    return found


def directory_made(command: Any) -> bool:
    return bool(command.run)


def processes_started(command: Any) -> bool:
    return bool(command.state(command.run))


def engine_loads(command: Any) -> bool:
    processes = psutil.Process(command.process.pid).children(recursive=True)
    return any("ServeReplica:policy" in "".join(p.cmdline()) for p in processes if p.is_running())


@pytest.mark.parametrize("moment", [directory_made, processes_started, engine_loads])
def test_ctrl_c_before_training_ends_all(leeway, tiny: Callable[[], Path], moment):
    with leeway(tiny(), "train", "tiny.toml", *NO_EVAL) as command:
        command.until(lambda: moment(command), 90)
        command.signal(signal.SIGINT)
        ended = command.end(45, command.run)
    assert (ended.code, ended.left) == (130, []), ended.err
    assert "Traceback" not in ended.err
    assert not list(command.run.checkpoints.iterdir())


async def test_after_ctrl_c_resume_goes_on_where_the_run_was(leeway, tiny: Callable[[], Path]):
    folder = tiny()
    with leeway(folder, "train", "tiny.toml", *LONG) as command:
        run = command.run
        command.state(run)
        command.until(lambda: len(steps_of(run)) >= 3, 120)
        command.signal(signal.SIGINT)
        ended = command.end(90, run)
    assert (ended.code, ended.left) == (130, []), ended.err
    assert f"leeway train --resume runs/{run.root.name}" in ended.err + ended.out
    done = steps_of(run)
    assert checkpoint_of(run) == done[-1]
    before = await buffer_of(run)
    assert before.stats.learner_version == done[-1]
    assert before.stats.num_slots == 0
    assert before.stats.num_ready == len(before.group_ids) > 0

    more = f"learner.num_steps={done[-1] + 3}"
    with leeway(folder, "train", "--resume", str(run.root), "--json", "--set", more) as command:
        ended = command.end(150, run)
    assert (ended.code, ended.left) == (0, []), ended.err
    steps = steps_of(run)
    assert steps == list(range(1, done[-1] + 4))
    assert json.loads(ended.out.splitlines()[-1])["steps"] == done[-1] + 3

    after = await buffer_of(run)
    gone = before.group_ids - after.group_ids
    assert after.stats.num_trained - before.stats.num_trained == 3 * 2
    assert len(gone) <= 3 * 2
    assert after.stats.dropped.keys() <= {"shutdown"}
    # Nothing that was buffered was lost: all that was ever added was trained or is still there.
    assert after.stats.num_added == after.stats.num_trained + after.stats.num_ready
    num_played = after.stats.num_added - before.stats.num_added
    assert after.position >= before.position + num_played


def test_a_run_is_not_resumed_with_fewer_shards_than_its_buffer_has(
    leeway, tiny: Callable[[], Path]
):
    folder, shards = tiny(), ("--set", "replay.num_shards=2")
    with leeway(
        folder, "train", "tiny.toml", *NO_EVAL, *shards, "--set", "learner.num_steps=1"
    ) as command:
        run = command.run
        ended = command.end(150, run)
    assert (ended.code, ended.left) == (0, []), ended.err

    resume = ("train", "--resume", str(run.root), "--set", "learner.num_steps=2")
    with leeway(folder, *resume, "--set", "replay.num_shards=1") as command:
        ended = command.end(90, run)
    assert (ended.code, ended.left) == (2, []), ended.err
    assert "has more shards than num_shards = 1" in ended.err
    assert "Traceback" not in ended.err
    assert steps_of(run) == [1]

    with leeway(folder, *resume, *shards) as command:
        ended = command.end(150, run)
    assert (ended.code, ended.left) == (0, []), ended.err
    assert steps_of(run) == [1, 2]


def test_two_ranks_stop_on_sigterm_and_resume(leeway, tiny: Callable[[], Path]):
    folder = tiny()
    two = ("--set", "learner.num_processes=2")
    with leeway(folder, "train", "tiny.toml", *LONG, *two) as command:
        run = command.run
        command.state(run)
        command.until(lambda: len(steps_of(run)) >= 2, 120)
        command.signal(signal.SIGTERM)
        ended = command.end(90, run)
    assert (ended.code, ended.left) == (0, []), ended.err
    done = steps_of(run)
    assert checkpoint_of(run) == done[-1]

    more = f"learner.num_steps={done[-1] + 2}"
    with leeway(folder, "train", "--resume", str(run.root), "--set", more) as command:
        ended = command.end(150, run)
    assert (ended.code, ended.left) == (0, []), ended.err
    assert steps_of(run) == list(range(1, done[-1] + 3))
