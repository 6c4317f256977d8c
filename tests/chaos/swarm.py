"""Producers and consumers as processes, to be killed; each writes what it does to its ledger.

A ledger has a line before every operation and one after it returned. The lines are written with
os.write, so they outlive the process, and they are no part of the buffer that they accuse.

Nothing is killed at a random instant. What is to be killed is made to stand still inside of what it
does, is seen to stand there, and then gets SIGKILL:

    add, draw, acknowledge   a producer or consumer, its call held by the proxy of between.py
    script                   Redis, between two writes of a script that one of them has called
    write                    Redis, in a write of such a script to its append-only file
    sync                     Redis, in the fdatasync behind one
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import redis

from leeway.replay.config import ReplayConfig
from leeway.replay.errors import LeaseExpired, SlotExpired, WaitTimeout
from leeway.replay.keys import replay_prefix
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.scripts import script_source
from leeway.replay.server import EmbeddedRedis
from leeway.replay.synthetic import build_group
from tests.chaos.between import FORK, PR_SET_PDEATHSIG, Aim, BetweenProcess, Place
from tests.chaos.history import check_whole, ends_in_a_script
from tests.chaos.shim import SYNC, WRITE, Shim

RUN: Final = "killed"
PREFIX: Final = replay_prefix(RUN)
NUM_PROCESSES: Final = {"producer": 3, "consumer": 2}
POLL_S: Final = 0.3
"""Longest wait of one call, so that a process sees soon that it is to stop."""
END_S: Final = 60.0
"""Within this a process that was told to stop has stopped."""
LAND_S: Final = 30.0
"""Within this somebody does what is aimed at."""

CLIENTS: Final[dict[str, tuple[str, tuple[Place, ...]]]] = {
    "add": ("producer", ("request", "reply")),
    "draw": ("consumer", ("request", "reply", "payloads")),
    "acknowledge": ("consumer", ("request", "reply")),
}
"""Who makes each call, and where in it it is killed."""
SHARES: Final = dict.fromkeys((*CLIENTS, "script", "write", "sync"), 1.0) | {"acknowledge": 0.25}
"""How many of each kind, for one of the others."""


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
        asked_ns = time.monotonic_ns()
        note("draw", asked_ns)
        try:
            lease = await replay.draw(POLL_S)
        except (WaitTimeout, LeaseExpired):
            note("undrawn", asked_ns)
            continue
        ids = [group.group_id for group in lease.groups]
        note("holds", lease.lease_id, asked_ns, time.monotonic_ns(), *ids)
        note("drawn", lease.lease_id, *(lease.version - g.oldest_version for g in lease.groups))
        await asyncio.sleep(rng.uniform(0, 0.01))
        note("lets-go", lease.lease_id, time.monotonic_ns())
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


def _work(kind: str, job: Job, seed: float) -> None:
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


STANDS_STILL: Final = "stands still in front of write"
HOLDING: Final = """
local changes, num_writes = {
  DEL = 1, HDEL = 1, HINCRBY = 1, HSET = 1, PERSIST = 1, PEXPIRE = 1, SADD = 1, SET = 1, UNLINK = 1,
  XADD = 1, ZADD = 1, ZPOPMIN = 1, ZREM = 1, ZREMRANGEBYSCORE = 1}, 0
local function call(name, ...)
  num_writes = num_writes + (changes[name] or 0)
  if num_writes == %d then
    redis.log(redis.LOG_WARNING, '%s')
    while true do end
  end
  return redis.call(name, ...)
end
"""


def holding(script: str, num_writes: int) -> str:
    """A script of the buffer that stands still in front of this one of its writes, and says so in
    the log of Redis; it has written before, and has not saved the counters yet."""
    before, found, after = script_source(script, None, True).partition("local call = redis.call\n")
    assert found
    return before + HOLDING % (num_writes, STANDS_STILL) + after


HELD_WRITES: Final = [(script, n) for script in CLIENTS for n in (2, 3, 4)]


@dataclass
class Landed:
    """What was killed where it was aimed at."""

    num: Counter[str] = field(default_factory=Counter[str])
    """By kind and place, "add reply"."""
    names: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Groups or leases by the same."""
    num_open: int = 0
    """Append-only files that ended within a script."""

    def of(self, kind: str) -> int:
        """All places of a kind."""
        return sum(n for name, n in self.num.items() if name.split()[0] == kind)

    def note(self, what: str, name: str = "") -> None:
        self.num[what] += 1
        self.names[what].add(name)


class Swarm:
    """A Redis with its producers and consumers. `kill` ends one of a kind and starts another."""

    def __init__(self, folder: Path, config: ReplayConfig, seed: int) -> None:
        self.config = config
        self.rng = random.Random(seed)
        self.landed = Landed()
        self.ledgers = folder / "ledgers"
        self.ledgers.mkdir()
        self.home = folder / "redis"
        self._folder = folder
        self._num_started = 0
        self._shim = Shim(folder)
        self._admin: Any
        self.server = self._start_server()
        self._port = self.server.url.rpartition(":")[2].partition("/")[0]
        self._between = BetweenProcess(int(self._port))
        self._processes = {
            kind: [self._start(kind) for _ in range(n)] for kind, n in NUM_PROCESSES.items()
        }

    def kill(self, kind: str) -> None:
        """Wait until one of them is where `kind` aims, kill it there and start another."""
        if kind in CLIENTS:
            return self._kill_client(kind)
        hold = {"script": self._hold_script, "write": self._hold_write, "sync": self._hold_sync}
        hold[kind]()
        self.server.kill()
        self._admin.close()
        self._between.aim(None)
        self._shim.hold(0)
        self.landed.num_open += ends_in_a_script(self.home)
        time.sleep(self.rng.uniform(0, 0.02))
        self.server, last = self._start_server(), self.server
        assert self.server.url == last.url, "another process took the port of Redis meanwhile"

    def stop(self) -> None:
        """Let the processes end what they do; kill those that do not."""
        (self._folder / "stop").touch()
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
        self._between.stop()

    def _kill_client(self, script: str) -> None:
        kind, places = CLIENTS[script]
        processes = self._processes[kind]
        process = processes.pop(self.rng.randrange(len(processes)))
        assert process.is_alive(), f"a {kind} ended by itself: see {self.ledgers}"
        place = self.rng.choice(places)
        self._between.aim(Aim(script, place, process.name, self.rng.random()))
        landed = self._between.landed(LAND_S)
        assert landed is not None, f"{process.name} made no {script} in {LAND_S:g} s"
        process.kill()
        process.join(END_S)
        self._between.close(process.name)
        self.landed.note(f"{script} {place}", landed.name)
        processes.append(self._start(kind))

    def _hold_script(self) -> None:
        held = self.rng.choice(HELD_WRITES)
        log = self.home / "redis.log"
        size = log.stat().st_size
        sha = self._admin.script_load(holding(*held))
        self._between.aim(Aim(held[0], "script", sha=sha))
        self._wait_for(lambda: STANDS_STILL in _text_from(log, size), f"script {held}")
        self.landed.note(f"script {held[0]}")

    def _hold_write(self) -> None:
        self._shim.hold(WRITE, self.rng.random())
        self._wait_for(lambda: self._shim.held == self.server.pid, "write")
        self.landed.note("write")

    def _hold_sync(self) -> None:
        self._shim.hold(SYNC)
        self._wait_for(lambda: self._shim.held == self.server.pid, "sync")
        self.landed.note("sync")

    def _wait_for(self, stands_still: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LAND_S
        while not stands_still():
            assert time.monotonic() < deadline, f"Redis came to no {what} in {LAND_S:g} s"
            time.sleep(0.002)

    def _start(self, kind: str) -> ForkProcess:
        self._num_started += 1
        name = f"{kind}-{self._num_started}"
        url = self.server.url.replace(f":{self._port}/", f":{self._between.open(name)}/")
        job = Job(url, self.config, self.ledgers / name, self._folder / "stop")
        process = FORK.Process(
            target=_work, args=(kind, job, self.rng.random()), name=name, daemon=True
        )
        process.start()
        return process

    def _start_server(self) -> EmbeddedRedis:
        """What it has loaded is whole."""
        with mock.patch.dict(os.environ, self._shim.environment):
            server = EmbeddedRedis.start(self.home)
        self._admin = redis.Redis.from_url(server.admin_url)
        check_whole(self._admin, PREFIX)
        return server


def _text_from(path: Path, start: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
