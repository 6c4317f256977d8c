"""Producers and consumers as processes, to be killed; each writes what it does to its ledger.

A ledger has a line before every operation and one after it returned. The lines are written with
os.write, so they outlive the process, and they are no part of the buffer that they accuse.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import redis

from leeway.replay.config import ReplayConfig
from leeway.replay.errors import LeaseExpired, SlotExpired, WaitTimeout
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.synthetic import build_group

RUN: Final = "killed"
NUM_PROCESSES: Final = {"producer": 3, "consumer": 2}
POLL_S: Final = 0.3
"""Longest wait of one call, so that a process sees soon that it is to stop."""
END_S: Final = 60.0
"""Within this a process that was told to stop has stopped."""
PR_SET_PDEATHSIG: Final = 1
FORK: Final = multiprocessing.get_context("fork")
"""A new interpreter would take a second; a copy of this one has everything imported."""


class Job(NamedTuple):
    """What a process needs to know."""

    url: str
    config: ReplayConfig
    ledger: Path
    stop: Path
    """Processes stop when it exists."""


class Ledger:
    """Lines of words, each written at once."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def __call__(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


async def produce(replay: RedisReplay, job: Job, note: Ledger, rng: random.Random) -> None:
    """Play groups at the learner's version; give one in twenty slots back."""

    async def newest() -> PolicyVersion:
        return (await replay.stats()).learner_version

    while not job.stop.exists():
        try:
            slots = await replay.admit(rng.randint(1, 4), newest, POLL_S)
        except WaitTimeout:
            continue
        for slot in slots:
            if rng.random() < 0.05:
                note("drop", slot.slot_id)
                await replay.drop(slot, "test")
                continue
            note("add", slot.slot_id)
            try:
                await replay.add(slot, build_group(slot, num_tokens=rng.randint(8, 400)))
                note("added", slot.slot_id)
            except SlotExpired:
                note("refused", slot.slot_id)


async def consume(replay: RedisReplay, job: Job, note: Ledger, rng: random.Random) -> None:
    """Train what is drawn for a few milliseconds; hand one lease in ten back."""
    while not job.stop.exists():
        try:
            lease = await replay.draw(POLL_S)
        except (WaitTimeout, LeaseExpired):
            continue
        ids = [group.group_id for group in lease.groups]
        note("drawn", lease.lease_id, *(lease.version - g.oldest_version for g in lease.groups))
        await asyncio.sleep(rng.uniform(0, 0.01))
        if rng.random() < 0.1:
            await replay.release(lease)
            continue
        note("acknowledge", lease.lease_id, *ids)
        try:
            await replay.acknowledge(lease, PolicyVersion(lease.version + 1))
            note("acknowledged", lease.lease_id, *ids)
        except LeaseExpired:
            note("expired", lease.lease_id, *ids)


Work = Callable[[RedisReplay, Job, Ledger, random.Random], Awaitable[None]]
WORK: Final[dict[str, Work]] = {"producer": produce, "consumer": consume}


def _work(kind: str, job: Job, seed: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    note = Ledger(job.ledger)

    async def run() -> None:
        replay = RedisReplay(job.url, RUN, job.config)
        await WORK[kind](replay, job, note, random.Random(seed))
        await replay.close()

    try:
        asyncio.run(run())
    except BaseException as error:
        note("error", kind, repr(error))
        raise


class Swarm:
    """A Redis with its producers and consumers. `kill` ends one of a kind and starts another."""

    def __init__(self, folder: Path, config: ReplayConfig, seed: int) -> None:
        self.config = config
        self.rng = random.Random(seed)
        self.ledgers = folder / "ledgers"
        self.ledgers.mkdir()
        self._folder = folder
        self._num_started = 0
        self.server = self._start_server()
        self._processes = {kind: [self._start(kind) for _ in range(n)] for kind, n in KINDS}

    def kill(self, kind: str) -> None:
        """SIGKILL, whatever it is doing."""
        if kind == "redis":
            self.server.kill()
            time.sleep(self.rng.uniform(0, 0.05))
            self.server = self._start_server()
            return
        processes = self._processes[kind]
        process = processes.pop(self.rng.randrange(len(processes)))
        assert process.is_alive(), f"a {kind} ended by itself: see {self.ledgers}"
        process.kill()
        process.join(END_S)
        processes.append(self._start(kind))

    def stop(self) -> None:
        """Let the processes end what they do; kill those that do not."""
        self._job("").stop.touch()
        processes = [process for kind in self._processes.values() for process in kind]
        deadline = time.monotonic() + END_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        stuck = [process.name for process in processes if process.is_alive()]
        self.end()
        assert not stuck, f"still running {END_S:g} s after they were told to stop: {stuck}"

    def end(self) -> None:
        """Kill what still runs."""
        for process in (process for kind in self._processes.values() for process in kind):
            if process.is_alive():
                process.kill()
                process.join(END_S)

    def _start(self, kind: str) -> ForkProcess:
        self._num_started += 1
        name = f"{kind}-{self._num_started}"
        process = FORK.Process(
            target=_work, args=(kind, self._job(name), self.rng.random()), name=name, daemon=True
        )
        process.start()
        return process

    def _job(self, name: str) -> Job:
        return Job(self.server.url, self.config, self.ledgers / name, self._folder / "stop")

    def _start_server(self) -> EmbeddedRedis:
        return EmbeddedRedis.start(self._folder / "redis")


KINDS: Final = NUM_PROCESSES.items()


@pytest.fixture
def build_swarm(tmp_path: Path) -> Iterator[Callable[[ReplayConfig, int], Swarm]]:
    swarms: list[Swarm] = []

    def build(config: ReplayConfig, seed: int) -> Swarm:
        swarms.append(Swarm(tmp_path, config, seed))
        return swarms[-1]

    yield build
    for swarm in swarms:
        swarm.end()
        swarm.server.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def admin(server: EmbeddedRedis) -> Iterator[Any]:
    """A client of our own, past the store."""
    with redis.Redis.from_url(server.admin_url) as client:
        yield client
