"""Membership, publishing and the run board, each rule by name."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from leeway.replay.board import (
    Announcement,
    EngineRecord,
    EngineReport,
    PolicyBoard,
    RunBoard,
    TensorSpec,
)
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import WaitTimeout
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis

SOON_S, AMPLE_S = 0.05, 5.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def run() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
async def board(url: str, run: str) -> AsyncIterator[PolicyBoard]:
    board = PolicyBoard(url, run)
    yield board
    await board.close()


@pytest.fixture
async def run_board(url: str, run: str) -> AsyncIterator[RunBoard]:
    board = RunBoard(url, run)
    yield board
    await board.close()


def engine(engine_id: str, version: int) -> EngineRecord:
    return EngineRecord(
        engine_id=engine_id, num_ranks=1, dtype="float32", gpus=[], version=version, address="here"
    )


def announcement(publish_id: int) -> Announcement:
    return Announcement(
        publish_id=publish_id,
        version=publish_id + 10,
        group_number=1,
        new_group=True,
        host="127.0.0.1",
        port=1234,
        transport="gloo",
        world_size=3,
        rank_offsets={"a": 1, "b": 2},
        manifest=[TensorSpec(name="w", dtype="float32", shape=[2, 3])],
        chunk_bytes=64,
        checksum="0f",
        deadline_s=5.0,
    )


def report(engine_id: str, stage: str, publish_id: int = 1) -> EngineReport:
    fields = {"publish_id": publish_id, "engine_id": engine_id, "stage": stage, "version": 11}
    return msgspec.convert(fields, EngineReport)


# --- membership --------------------------------------------------------------------------------


async def test_oldest_version_is_that_of_the_oldest_living_engine(board):
    assert await board.oldest_version() is None
    await board.heartbeat(engine("a", 5), AMPLE_S)
    await board.heartbeat(engine("b", 3), AMPLE_S)
    assert await board.oldest_version() == 3
    assert await board.engines() == [engine("a", 5), engine("b", 3)]


async def test_engine_without_a_heartbeat_within_its_ttl_is_dead(board):
    await board.heartbeat(engine("a", 5), 0.1)
    await board.heartbeat(engine("b", 6), AMPLE_S)
    await asyncio.sleep(0.15)
    assert await board.engines() == [engine("b", 6)]


async def test_version_of_a_living_engine_only_moves_up(board):
    await board.heartbeat(engine("a", 5), AMPLE_S)
    await board.heartbeat(engine("a", 4), AMPLE_S)
    assert await board.oldest_version() == 5


async def test_engine_that_died_may_register_an_older_version(board):
    await board.heartbeat(engine("a", 5), 0.1)
    await asyncio.sleep(0.15)
    await board.heartbeat(engine("a", 2), AMPLE_S)
    assert await board.oldest_version() == 2


async def test_withdrawn_engine_is_gone(board):
    await board.heartbeat(engine("a", 5), AMPLE_S)
    await board.withdraw("a")
    assert await board.engines() == []


async def test_engine_with_a_newer_version_wakes_a_waiting_admission(board, url, run):
    replay = RedisReplay(url, run, ReplayConfig(groups_per_step=1, max_staleness=0))
    await board.heartbeat(engine("a", 0), AMPLE_S)
    await replay.restore_version(PolicyVersion(1))
    waiting = asyncio.create_task(replay.admit(1, board.oldest_version, AMPLE_S))
    await asyncio.sleep(SOON_S)
    started = time.monotonic()
    await board.heartbeat(engine("a", 1), AMPLE_S)
    assert (await waiting)[0].version == 1
    assert time.monotonic() - started < 0.5
    await replay.close()


# --- publishing --------------------------------------------------------------------------------


async def test_announcement_comes_back_as_it_was_made(board):
    assert await board.latest_announcement() is None
    await board.announce(announcement(1))
    assert await board.latest_announcement() == announcement(1)
    assert await board.next_announcement(0, SOON_S) == announcement(1)


async def test_next_announcement_waits_and_is_none_after_its_deadline(board):
    await board.announce(announcement(1))
    assert await board.next_announcement(1, SOON_S) is None
    waiting = asyncio.create_task(board.next_announcement(1, AMPLE_S))
    await asyncio.sleep(SOON_S)
    await board.announce(announcement(2))
    assert (await waiting).publish_id == 2


async def test_engine_that_missed_some_gets_the_newest(board):
    for publish_id in (1, 2, 3):
        await board.announce(announcement(publish_id))
    assert (await board.next_announcement(1, SOON_S)).publish_id == 3


async def test_reports_are_complete_when_every_engine_reached_the_stage(board):
    waiting = asyncio.create_task(board.reports(1, ["a", "b"], "joined", AMPLE_S))
    await board.report(report("a", "committed"))
    await board.report(report("b", "ready"))
    await asyncio.sleep(SOON_S)
    assert not waiting.done()
    await board.report(report("b", "joined"))
    stages = {engine_id: r.stage for engine_id, r in (await waiting).items()}
    assert stages == {"a": "committed", "b": "joined"}


async def test_one_failure_ends_the_wait_for_reports(board):
    waiting = asyncio.create_task(board.reports(1, ["a", "b"], "joined", AMPLE_S))
    await board.report(report("b", "failed"))
    assert (await waiting)["b"].stage == "failed"


async def test_missing_reports_are_named(board):
    await board.report(report("a", "joined"))
    with pytest.raises(
        WaitTimeout, match=r"publish 1: no report of stage joined .* from b, c"
    ) as e:
        await board.reports(1, ["a", "b", "c"], "joined", SOON_S)
    assert e.value.missing == ("b", "c")


async def test_reports_of_another_publish_or_engine_do_not_count(board):
    await board.report(report("a", "joined", publish_id=2))
    await board.report(report("x", "failed"))
    with pytest.raises(WaitTimeout, match="from a"):
        await board.reports(1, ["a"], "joined", SOON_S)


async def test_reports_stay_for_sixteen_publishes(board):
    await board.report(report("a", "joined", publish_id=1))
    await board.report(report("a", "joined", publish_id=16))
    assert set(await board.reports(1, ["a"], "joined", SOON_S)) == {"a"}
    await board.report(report("a", "joined", publish_id=17))
    with pytest.raises(WaitTimeout):
        await board.reports(1, ["a"], "joined", SOON_S)
    assert set(await board.reports(16, ["a"], "joined", SOON_S)) == {"a"}


# --- run board ---------------------------------------------------------------------------------


async def test_sections_are_stamped_with_the_time(run_board):
    await run_board.put("learner", {"step": 3})
    sections = await run_board.get_all()
    assert sections["learner"]["step"] == 3
    assert abs(sections["learner"]["updated_at"] - time.time()) < 5


async def test_events_are_read_on_from_the_last_one_seen(run_board):
    for number in range(3):
        await run_board.append_event("note", f"event {number}")
    first, *_ = await run_board.events()
    assert [e.text for e in await run_board.events(count=2)] == ["event 1", "event 2"]
    assert [e.text for e in await run_board.events(after=first.event_id)] == ["event 1", "event 2"]


async def test_stop_keeps_its_first_reason_and_wakes_who_waits(run_board):
    assert await run_board.stop_requested() is None
    assert await run_board.wait_stop(SOON_S) is None
    waiting = asyncio.create_task(run_board.wait_stop(AMPLE_S))
    await asyncio.sleep(SOON_S)
    await run_board.request_stop("budget")
    await run_board.request_stop("later")
    assert await waiting == "budget"
    await run_board.clear_stop()
    assert await run_board.stop_requested() is None


async def test_wait_phase_returns_at_that_phase_or_a_later_one(run_board):
    await run_board.set_phase("starting")
    waiting = asyncio.create_task(run_board.wait_phase("training", AMPLE_S))
    await asyncio.sleep(SOON_S)
    await run_board.set_phase("evaluating-before")
    await asyncio.sleep(SOON_S)
    assert not waiting.done()
    await run_board.set_phase("evaluating-after")
    assert await waiting == "evaluating-after"


async def test_wait_phase_names_the_phase_it_is_stuck_in(run_board):
    await run_board.set_phase("starting")
    with pytest.raises(WaitTimeout, match=r"did not reach phase 'done' .* it is in 'starting'"):
        await run_board.wait_phase("done", SOON_S)
