"""The buffer without asyncio: the same operations for plain threads, over both stores."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType

import pytest

from leeway.replay.blocking import BlockingReplay
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import ConfigurationError, SlotExpired, StoreError, WaitTimeout
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.store import Replay
from leeway.replay.synthetic import build_group

CONFIG = ReplayConfig(groups_per_step=2, max_staleness=1)
V0, V1 = PolicyVersion(0), PolicyVersion(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(params=["memory", "redis"])
def replay(request: pytest.FixtureRequest, server: EmbeddedRedis) -> Iterator[BlockingReplay]:
    if request.param == "memory":
        blocking = BlockingReplay(MemoryReplay(CONFIG))
    else:
        blocking = BlockingReplay.connect(server.url, f"test-{uuid.uuid4().hex}", CONFIG)
    with blocking:
        yield blocking


def fill(replay: BlockingReplay, n: int) -> None:
    for slot in replay.admit(n, V0, 5.0):
        replay.add(slot, build_group(slot))


def until(look: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def operations(cls: type) -> dict[str, list[str]]:
    """Public operations with their parameters."""
    return {
        name: list(inspect.signature(function).parameters)
        for name, function in vars(cls).items()
        if isinstance(function, FunctionType) and not name.startswith("_")
    }


# --- the same operations ---


def test_every_operation_of_the_protocol_is_there_under_its_name():
    assert operations(BlockingReplay) == operations(Replay)


def test_a_group_goes_through(replay: BlockingReplay):
    fill(replay, 2)
    ids = replay.group_ids()
    assert replay.update_priorities({ids[0]: 2.0}) == 1
    replay.release(replay.draw(1.0))
    lease = replay.draw(1.0)
    replay.acknowledge(lease, V1)
    assert [group.group_id for group in lease.groups] == ids
    assert replay.stats().num_trained == 2
    assert replay.restore_version(V0) == 0


def test_errors_are_those_of_the_store(replay: BlockingReplay):
    (slot,) = replay.admit(1, V0, 1.0)
    replay.drop(slot, "given-up")
    with pytest.raises(SlotExpired):
        replay.add(slot, build_group(slot))
    with pytest.raises(WaitTimeout, match="no step of 2 groups"):
        replay.draw(0.05)


def test_a_pause_is_told_to_who_waits(replay: BlockingReplay):
    replay.pause_admission(True)
    with pytest.raises(WaitTimeout, match="admission is stopped"):
        replay.admit(1, V0, 0.05)


def test_a_version_source_is_an_ordinary_function(replay: BlockingReplay):
    threads: set[int] = set()

    def source() -> PolicyVersion:
        threads.add(threading.get_ident())
        return V0

    assert replay.admit(1, source, 1.0)[0].version == 0
    assert threading.get_ident() not in threads


def test_a_bad_url_is_refused_and_leaves_no_thread():
    before = set(threading.enumerate())
    with pytest.raises(ConfigurationError):
        BlockingReplay.connect("http://nowhere", "run", CONFIG)
    # Others may end meanwhile; none may be left over.
    assert set(threading.enumerate()) <= before


# --- threads ---


def test_a_draw_of_one_thread_is_woken_by_an_add_of_another(replay: BlockingReplay):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(replay.draw, 20.0)
        until(lambda: replay.stats().waits)
        fill(replay, 2)
        began = time.monotonic()
        assert len(waiting.result(10).groups) == 2
    assert time.monotonic() - began < 2.0


def test_many_threads_share_one(replay: BlockingReplay):
    def play(_: int) -> None:
        for _ in range(5):
            (slot,) = replay.admit(1, V0, 20.0)
            replay.drop(slot, "tried")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(play, range(8)))
    stats = replay.stats()
    assert (stats.num_admitted, stats.num_slots, stats.dropped) == (40, 0, {"tried": 40})


def test_a_call_inside_a_running_event_loop_is_refused_in_words(replay: BlockingReplay):
    async def call() -> None:
        replay.stats()

    with pytest.raises(StoreError, match="would stop the event loop that runs in this thread"):
        asyncio.run(call())


# --- ends ---


def test_closing_ends_a_call_that_waits(replay: BlockingReplay):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(replay.draw, 60.0)
        until(lambda: replay.stats().waits)
        replay.close()
        with pytest.raises(StoreError, match="closed while this call waited"):
            waiting.result(5)


def test_after_close_every_call_is_refused_and_a_second_close_does_nothing(
    replay: BlockingReplay,
):
    replay.close()
    replay.close()
    with pytest.raises(StoreError, match="this buffer was closed"):
        replay.stats()


def test_close_ends_the_loop_thread():
    before = set(threading.enumerate())
    BlockingReplay(MemoryReplay(CONFIG)).close()
    # Others may end meanwhile; none may be left over.
    assert set(threading.enumerate()) <= before


def test_ctrl_c_cancels_the_call_that_waits(replay: BlockingReplay):
    def press() -> None:
        until(lambda: replay.stats().waits)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        pressing = pool.submit(press)
        with pytest.raises(KeyboardInterrupt):
            replay.draw(60.0)
        pressing.result(5)
    until(lambda: not replay.stats().waits)
    fill(replay, 2)
    assert len(replay.draw(1.0).groups) == 2


SCRIPT = """
import sys
from leeway.replay.blocking import BlockingReplay
from leeway.replay.config import ReplayConfig
replay = BlockingReplay.connect(sys.argv[1], sys.argv[2], ReplayConfig(groups_per_step=2))
print("waiting", flush=True)
replay.draw(60.0)
"""


def test_a_script_that_is_interrupted_while_it_waits_ends_at_once(server: EmbeddedRedis):
    command = [sys.executable, "-c", SCRIPT, server.url, f"test-{uuid.uuid4().hex}"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        began = time.monotonic()
        os.kill(script.pid, signal.SIGINT)
        err = script.communicate(timeout=20)[1]
    assert time.monotonic() - began < 5.0
    assert err.endswith("KeyboardInterrupt\n")
    assert script.returncode == -signal.SIGINT
