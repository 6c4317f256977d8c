"""What `leeway train` itself does, without a run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock

import psutil
import pytest

from leeway.services.config import load
from leeway.services.layout import RunDirectory, RunState, create_run
from leeway.services.processes import commands, crew, train
from leeway.services.watch import until_one_ends


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(load(None, [f'directory="{tmp_path}"']))


@pytest.fixture
def sleeping() -> Iterator[list[subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []
    yield made
    for process in made:
        process.kill()
        process.wait()


def sleeper(made: list[subprocess.Popen[bytes]], *words: str) -> subprocess.Popen[bytes]:
    code = "import time; print('ready', flush=True); time.sleep(300)"
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE)
    made.append(process)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_what_a_killed_parent_has_left_of_this_run_is_ended_and_no_other_process(
    run: RunDirectory, sleeping: list[subprocess.Popen[bytes]]
):
    learner = sleeper(sleeping, "learn", "--run-dir", str(run.root))
    stranger = sleeper(sleeping, "something", "else")
    parent = sleeper(sleeping, "train", "--resume", str(run.root))
    pids = {"learner": learner.pid, "api": stranger.pid, "train": parent.pid}
    run.write_state(RunState(name="run", started_at=0.0, pids=pids))
    commands.end_leftovers(run)
    learner.wait(60)
    assert not psutil.pid_exists(learner.pid)
    assert (stranger.poll(), parent.poll()) == (None, None)


def test_a_run_that_never_began_has_no_leftovers(run: RunDirectory):
    commands.end_leftovers(run)


def test_a_disk_is_full_when_redis_could_write_no_more(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    assert crew.full_disk(run.root) is None
    full = types.SimpleNamespace(f_bavail=255, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda folder: full)
    assert crew.full_disk(run.root) == f"no space was left on the disk of {run.root}"


async def test_the_first_end_ends_the_wait_and_cancels_the_others():
    for_ever = asyncio.create_task(asyncio.Event().wait())
    at_once = asyncio.create_task(asyncio.sleep(0))
    await asyncio.wait_for(until_one_ends([at_once], [for_ever]), 60)
    assert for_ever.cancelled()


async def test_a_watch_that_fails_is_raised():
    async def fail() -> None:
        raise RuntimeError("who was watched is lost")

    for_ever = asyncio.create_task(asyncio.Event().wait())
    watch = asyncio.create_task(fail())
    with pytest.raises(RuntimeError, match="is lost"):
        await asyncio.wait_for(until_one_ends([for_ever], [watch]), 60)
    assert for_ever.cancelled()


async def test_a_watch_that_is_over_does_not_end_the_wait():
    watch = asyncio.create_task(asyncio.sleep(0))
    end = asyncio.create_task(asyncio.sleep(0.2))
    await asyncio.wait_for(until_one_ends([end], [watch]), 60)
    assert end.done() and not end.cancelled()


async def test_a_step_of_the_ending_that_fails_stops_no_other(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
):
    training = train.Training(run.read_config(), run, json_output=True)

    async def fail() -> None:
        raise OSError(28, "No space left on device")

    await training._quietly(fail())
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "is_settled", "is_told"),
    [(0, True, False), (None, True, False), (1, False, False), (-15, True, False), (1, True, True)],
    ids=["well", "over before", "nothing to lose", "not begun", "no checkpoint"],
)
def test_a_stop_that_may_have_lost_steps_is_no_success(
    run: RunDirectory, code: int | None, is_settled: bool, is_told: bool
):
    training = train.Training(run.read_config(), run, json_output=True)
    training._is_settled = is_settled
    if not is_told:
        return training._check_stopped(code)
    with pytest.raises(train.ChildDied, match="may lack a checkpoint"):
        training._check_stopped(code)


async def test_a_learner_that_was_killed_leaves_a_timeline_all_the_same(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    run.metrics.write_text('{"step": 1, "time": 9.0, "wait_s": 1.0, "seconds": 2.0}\n')
    training = train.Training(run.read_config(), run, json_output=True)
    training._crew, training._replay, training._board = AsyncMock(), AsyncMock(), AsyncMock()
    training._crew.has_finished = lambda _: False
    training._crew.stop.return_value = {"learner": -9}
    monkeypatch.setattr(training, "_copy_records", AsyncMock())
    assert await training._end() == -9
    assert "train step 1" in run.timeline.read_text()


def test_weights_of_one_machine_travel_on_loopback(monkeypatch: pytest.MonkeyPatch):
    for name in ("RAY_ADDRESS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert commands.one_machine() == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert commands.one_machine()["NCCL_SOCKET_IFNAME"] == "eth0"
    monkeypatch.setenv("RAY_ADDRESS", "ray://elsewhere:10001")
    assert commands.one_machine() == {}
