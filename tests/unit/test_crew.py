"""Processes that end are started again, as often as may be, and never for what would come again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from leeway.replay.errors import StoreUnavailable
from leeway.replay.server import EmbeddedRedis
from leeway.services import supervision
from leeway.services.processes import crew as crews
from leeway.services.processes import members
from leeway.services.processes.crew import Crew, Restarts, delay_s
from leeway.services.processes.members import Command, Pulse, RedisMember
from leeway.services.supervision import ChildDied
from leeway.services.supervision_config import SupervisionConfig

THREE = SupervisionConfig(max_restarts=3, restart_window_s=600)


class Member:
    """A process that is told how each of its lives ends; after the last it lives on."""

    def __init__(self, *codes: int, name: str = "learner", is_needed: bool = True) -> None:
        self.name = name
        self.is_needed = is_needed
        self.pid: int | None = None
        self.num_starts = 0
        self.faults: list[Exception] = []
        """Raised by the next starts."""
        self.stopped: list[str] = []
        self._codes = list(codes)

    async def start(self) -> None:
        self.num_starts += 1
        if self.num_starts > 1 and self.faults:
            raise self.faults.pop(0)

    async def ended(self) -> ChildDied:
        if not self._codes:
            await asyncio.Event().wait()
        code = self._codes.pop(0)
        return ChildDied(f"the {self.name} process ended with {code}", code)

    async def stop(self) -> int | None:
        self.stopped.append(self.name)
        return None


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "delay_s", lambda number: 0.0)


class Watched:
    """A crew of these members, watched, and what it told."""

    def __init__(self, *members: Member, config: SupervisionConfig = THREE) -> None:
        self.told: list[str] = []
        self.crew = Crew(config, self._tell)
        self._members = members

    async def _tell(self, sentence: str) -> None:
        self.told.append(sentence)

    async def until(self, num_told: int) -> None:
        """Watch until so much was told."""
        for member in self._members:
            await self.crew.start(member)
        watching = asyncio.create_task(self.crew.watch())
        try:
            async with asyncio.timeout(60):
                while len(self.told) < num_told:
                    await asyncio.sleep(0.01)
                    if watching.done():
                        watching.result()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


def test_three_restarts_in_600_s_and_the_window_moves():
    restarts = Restarts(THREE)
    assert [restarts.take(now) for now in (0, 10, 20, 30, 599, 600, 601, 610)] == [
        1, 2, 3, None, None, 3, None, 3,
    ]  # fmt: skip


def test_the_first_restart_comes_at_once_and_later_ones_wait_up_to_30_s():
    assert [delay_s(number) for number in (1, 2, 3, 4, 5, 6, 7, 8)] == [0, 1, 2, 4, 8, 16, 30, 30]


async def test_who_was_killed_is_started_again_and_the_run_is_told():
    member = Member(-9)
    watched = Watched(member)
    await watched.until(1)
    assert member.num_starts == 2
    assert watched.told == [
        "the learner process ended with -9; started again (1 of 3 times in 600 s)"
    ]


async def test_the_fourth_end_within_the_window_ends_the_run_with_its_sentence():
    member = Member(-9, 1, 0, -11)
    watched = Watched(member)
    with pytest.raises(ChildDied, match="the learner process ended with -11"):
        await watched.until(4)
    assert member.num_starts == 4


@pytest.mark.parametrize("code", [2, 3])
async def test_a_fault_that_would_come_again_ends_the_run_at_once(code: int):
    member = Member(code)
    with pytest.raises(ChildDied, match=f"ended with {code}"):
        await Watched(member).until(1)
    assert member.num_starts == 1


async def test_before_the_run_has_worked_an_error_ends_it_and_a_kill_does_not():
    member = Member(-9, 137, 1)
    watched = Watched(member)
    watched.crew.is_settled = lambda: False
    with pytest.raises(ChildDied, match=r"ended with 1$"):
        await watched.until(3)
    assert (member.num_starts, len(watched.told)) == (3, 2)


async def test_without_one_that_is_not_needed_the_run_goes_on():
    member = Member(2, name="api", is_needed=False)
    watched = Watched(member, Member())
    await watched.until(1)
    assert watched.told == ["the api process ended with 2; the run goes on without it"]


async def test_a_start_that_fails_counts_and_is_tried_again():
    member = Member(-9)
    member.faults = [StoreUnavailable("the disk is full"), OSError("no memory")]
    watched = Watched(member)
    await watched.until(1)
    assert member.num_starts == 4
    assert watched.told[0].startswith("the learner process could not be started again: no memory")
    assert watched.told[0].endswith("(3 of 3 times in 600 s)")


async def test_who_has_done_its_work_is_not_started_again():
    member = Member(0)
    watched = Watched(member)
    watched.crew.is_over = lambda name: name == "learner"
    await watched.crew.start(member)
    await asyncio.wait_for(watched.crew.watch(), 60)
    assert (member.num_starts, watched.crew.has_finished("learner")) == (1, True)


async def test_members_end_in_the_order_that_is_asked_for_and_strangers_are_passed_over():
    learner, serve = Member(name="learner"), Member(name="serve")
    learner.stopped = serve.stopped = stopped = []
    crew = Watched().crew
    await crew.start(serve)
    await crew.start(learner)
    await crew.stop("learner", "serve", "api")
    assert stopped == ["learner", "serve"]


ORPHAN = """
import ctypes, os, subprocess, sys, time
from leeway.services import supervision

supervision.adopt_orphans()
starter = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', " \\
    "'import time; time.sleep(300)'], start_new_session=True, stdout=subprocess.DEVNULL).pid)"
orphan = int(subprocess.check_output([sys.executable, "-c", starter], text=True))
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])

import asyncio
from leeway.services.processes.crew import Crew
from leeway.services.supervision_config import SupervisionConfig

class Own:
    name, is_needed, pid = "own", True, own.pid

async def main():
    crew = Crew(SupervisionConfig(), print)
    crew.add(Own())
    await crew.end_orphans()

asyncio.run(main())
found = [child.pid for child in supervision.children(os.getpid())]
print(found == [own.pid], orphan != own.pid)
own.kill()
"""


def test_what_a_dead_member_left_behind_is_ended_and_no_living_member():
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=170
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


async def test_redis_comes_back_with_its_data_at_the_same_url(tmp_path: Path):
    import redis

    with EmbeddedRedis.start(tmp_path) as server:
        redis.Redis.from_url(server.admin_url).set("kept", "yes")
        url, pid = server.url, server.pid
        member = RedisMember(server)
        psutil.Process(pid).kill()
        died = await asyncio.wait_for(member.ended(), 60)
        assert str(died) == f"the embedded Redis ended; its log is {tmp_path / 'redis.log'}"
        await member.start()
        assert (server.url, server.pid != pid) == (url, True)
        assert redis.Redis.from_url(server.admin_url).get("kept") == b"yes"


def test_the_children_of_this_process_are_found_with_their_dead():
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        assert child.pid in [process.pid for process in supervision.children(os.getpid())]
    finally:
        child.wait()


async def test_a_redis_that_cannot_be_told_is_in_the_way_of_no_restart():
    asked = asyncio.Event()

    async def never_told(sentence: str) -> None:
        asked.set()
        await asyncio.Event().wait()

    crew, member = Crew(THREE, never_told), Member(-9, -9, name="redis")
    crew.add(member)
    watching = asyncio.create_task(crew.watch())
    async with asyncio.timeout(60):
        while member.num_starts < 2:
            await asyncio.sleep(0.01)
        await asked.wait()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_nobody_is_started_while_the_disk_is_full(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(crews, "OBSTACLE_LOOK_S", 0.01)
    told: list[str] = []

    async def tell(sentence: str) -> None:
        told.append(sentence)

    crew, member = Crew(THREE, tell), Member(1, name="redis")
    looks = iter(["the disk was full", "the disk was full", None])
    starts_seen: list[int] = []

    def obstacle() -> str | None:
        starts_seen.append(member.num_starts)
        return next(looks, None)

    crew.obstacle = obstacle
    crew.add(member)
    watching = asyncio.create_task(crew.watch())
    async with asyncio.timeout(60):
        while not told:
            await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert (starts_seen[:3], member.num_starts) == ([0, 0, 0], 1)
    assert told == [
        "the redis process ended with 1, when the disk was full; started again (1 of 3 times in "
        "600 s)"
    ]


async def test_a_disk_that_stays_full_ends_the_run_and_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(crews, "OBSTACLE_LOOK_S", 0.01)
    monkeypatch.setattr(crews, "OBSTACLE_S", 0.05)

    async def tell(sentence: str) -> None:
        return None

    crew = Crew(THREE, tell)
    crew.obstacle = lambda: "no space was left on the disk of runs/demo"
    crew.add(Member(1, name="redis"))
    with pytest.raises(ChildDied, match="no space was left on the disk of runs/demo for"):
        await asyncio.wait_for(crew.watch(), 60)


async def test_a_learner_that_failed_behind_its_results_has_not_finished():
    async def tell(sentence: str) -> None:
        return None

    crew, member = Crew(THREE, tell), Member(1, 0)
    crew.is_over = lambda name: True
    crew.add(member)
    await asyncio.wait_for(crew.watch(), 60)
    assert (member.num_starts, crew.has_finished("learner")) == (1, True)


def test_signs_of_life_that_stay_away_are_told_and_a_start_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = 0.0
    monkeypatch.setattr(members.time, "monotonic", lambda: now)
    pulse = Pulse(tmp_path / "lives", 10.0)
    now = 500.0
    assert pulse.silence() is None, "it has not begun"
    beat(pulse, 1)
    assert pulse.silence() is None
    now = 510.0
    assert pulse.silence() is None
    now = 511.0
    said = "gave no sign of life for 11 s (supervision.silence_deadline_s = 10)"
    assert pulse.silence() == said
    # A step of 11 s was nothing wrong: from now on 44 s are waited for.
    beat(pulse, 2)
    assert pulse.silence() is None
    now = 555.0
    assert pulse.silence() is None
    now = 556.0
    assert pulse.silence() is not None


def beat(pulse: Pulse, at: int) -> None:
    pulse.file.touch()
    os.utime(pulse.file, (at, at))


async def test_a_process_without_a_pulse_is_ended_and_called_so(tmp_path: Path):
    pulse = Pulse(tmp_path / "lives", 0.5)
    code = "import os, pathlib, time; pathlib.Path(os.environ['LIVES']).touch(); time.sleep(300)"
    (tmp_path / "hangs.py").write_text(code)
    environment = {"LIVES": str(pulse.file), "PYTHONPATH": str(tmp_path)}
    command = Command("learner", ["hangs"], tmp_path / "log", environment, grace_s=1.0, pulse=pulse)
    await command.start()
    died = await asyncio.wait_for(command.ended(), 60)
    assert "gave no sign of life" in str(died) and not died.is_failure
    assert command.pid is not None and not psutil.pid_exists(command.pid)
