"""An engine's side of publishing, with a policy that only says what it was asked to do.

The learner's side is played by the tests, on a real policy board.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest

from leeway.actors.membership import Membership
from leeway.actors.weight_receiver import (
    Committed,
    Delivery,
    Rendezvous,
    StagingArea,
    check_manifest,
)
from leeway.replay.board import (
    LEARNER,
    Announcement,
    EngineRecord,
    EngineReport,
    PolicyBoard,
    Stage,
    TensorSpec,
    Transport,
)
from leeway.replay.errors import ChecksumMismatch, StoreUnavailable, TransferError
from leeway.replay.exposed_memory import open_memory
from leeway.replay.flat_weights import pack
from leeway.replay.memory_handle import MemoryHandle, machine
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis

HEARTBEAT_S, DEADLINE_S, AMPLE_S = 0.2, 0.6, 5.0
MEMORY = MemoryHandle(pid=7, token="t", num_bytes=8)
NOTHING = Delivery(manifest=[], chunk_bytes=64, timeout_s=1.0)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
async def board(url: str) -> AsyncIterator[PolicyBoard]:
    board = PolicyBoard(url, f"test-{uuid.uuid4().hex}")
    yield board
    await board.close()


class FakePolicy:
    """Notes its calls; `faults` maps a call's name to what it does instead."""

    def __init__(self, **faults: Callable[[], Awaitable[object]]) -> None:
        self.calls: list[str] = []
        self.faults = faults
        self.held = PolicyVersion(0)

    async def _call(self, name: str) -> object | None:
        self.calls.append(name)
        fault = self.faults.get(name)
        return await fault() if fault else None

    num_ranks, dtype = 1, "float32"
    gpus: ClassVar[list[str]] = []
    stages = True

    async def version(self) -> PolicyVersion:
        return self.held

    async def check_manifest(self, manifest: list[TensorSpec]) -> None:
        await self._call("check_manifest")

    async def expose(self, delivery: Delivery) -> list[MemoryHandle]:
        await self._call("expose")
        return [MEMORY]

    async def arrived(self, checksum: str, wire_s: float) -> None:
        await self._call(f"arrived {checksum} in {wire_s:g} s")

    async def join(self, rendezvous: Rendezvous) -> None:
        await self._call(f"join {rendezvous.rank_offset} of {rendezvous.world_size}")

    async def stage(self, delivery: Delivery) -> float:
        await self._call("stage")
        return 0.0

    async def commit(self, version: PolicyVersion, checksum: str) -> Committed:
        reported = await self._call("commit")
        self.held = version
        return Committed(version=version, checksum=str(reported or checksum), pause_s=0.25)

    async def abandon(self) -> None:
        await self._call("abandon")


def raising(error: Exception) -> Callable[[], Awaitable[object]]:
    async def fault() -> object:
        raise error

    return fault


async def never() -> object:
    return await asyncio.get_running_loop().create_future()


def announcement(
    publish_id: int,
    group_number: int = 1,
    new_group: bool = True,
    transport: Transport = "gloo",
) -> Announcement:
    return Announcement(
        publish_id=publish_id,
        version=publish_id + 10,
        group_number=group_number,
        new_group=new_group,
        host="127.0.0.1",
        port=1,
        transport=transport,
        world_size=3,
        rank_offsets={"a": 1, "b": 2},
        manifest=[TensorSpec(name="w", dtype="float32", shape=[2])],
        chunk_bytes=64,
        checksum="0f",
        deadline_s=DEADLINE_S,
    )


@asynccontextmanager
async def running(board: PolicyBoard, policy: FakePolicy) -> AsyncIterator[Membership]:
    membership = Membership(board, policy, "a", "here", heartbeat_s=HEARTBEAT_S)
    task = asyncio.create_task(membership.run(), name="run")
    while not await board.engines() and not task.done():
        await asyncio.sleep(0.01)
    try:
        yield membership
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=AMPLE_S)
        assert task.done()


async def on_board(board: PolicyBoard) -> None:
    """Until an engine is there: what was announced before is not for it."""
    async with asyncio.timeout(4 * AMPLE_S):
        while not await board.engines():
            await asyncio.sleep(0.01)


async def follow_one(board: PolicyBoard, policy: FakePolicy) -> None:
    """The membership of an engine that is announced one version; raises what ends it."""
    run = asyncio.create_task(Membership(board, policy, "a", "here", heartbeat_s=HEARTBEAT_S).run())
    await on_board(board)
    await board.announce(announcement(1))
    await asyncio.wait_for(run, 4 * AMPLE_S)


async def report_of(board: PolicyBoard, publish_id: int, stage: Stage) -> EngineReport:
    return (await board.reports(publish_id, ["a"], stage, AMPLE_S))["a"]


# --- what an engine says ------------------------------------------------------------------------


async def test_engine_is_ready_then_joined_then_committed(board):
    policy = FakePolicy()
    said: list[str] = []
    report = board.report

    async def note(engine_report: EngineReport) -> None:
        said.append(engine_report.stage)
        await report(engine_report)

    board.report = note
    async with running(board, policy) as membership:
        await board.announce(announcement(1))
        last = await report_of(board, 1, "committed")
    assert said == ["ready", "joined", "committed"]
    assert policy.calls == ["check_manifest", "join 1 of 3", "stage", "commit"]
    assert (last.version, last.checksum, last.pause_s, last.error) == (11, "0f", 0.25, None)
    assert membership.last == last


async def test_version_is_on_the_board_when_the_engine_says_committed(board):
    async with running(board, FakePolicy()):
        await board.announce(announcement(1))
        await report_of(board, 1, "committed")
        assert await board.oldest_version() == 11


async def test_engine_joins_a_group_once(board):
    policy = FakePolicy()
    async with running(board, policy):
        await board.announce(announcement(1))
        await report_of(board, 1, "committed")
        await board.announce(announcement(2, new_group=False))
        await report_of(board, 2, "committed")
        await board.announce(announcement(3, group_number=2))
        await report_of(board, 3, "committed")
    assert policy.calls.count("join 1 of 3") == 2


async def test_announcement_that_does_not_name_the_engine_is_not_for_it(board):
    policy = FakePolicy()
    async with running(board, policy):
        other = announcement(1)
        other.rank_offsets.pop("a")
        await board.announce(other)
        await board.announce(announcement(2))
        await report_of(board, 2, "committed")
    assert policy.calls.count("commit") == 1


async def test_announcement_from_before_the_engine_came_is_over(board):
    await board.announce(announcement(1))
    policy = FakePolicy()
    async with running(board, policy):
        await asyncio.sleep(2 * HEARTBEAT_S)
    assert policy.calls == []


async def test_heartbeats_keep_the_engine_alive_until_it_is_cancelled(board):
    async with running(board, FakePolicy()):
        await asyncio.sleep(4 * HEARTBEAT_S)
        assert [engine.engine_id for engine in await board.engines()] == ["a"]
    assert await board.engines() == []


# --- what goes wrong ----------------------------------------------------------------------------


async def test_manifest_it_cannot_load_fails_before_it_joins_anything(board):
    policy = FakePolicy(check_manifest=raising(TransferError("the manifest lacks w")))
    async with running(board, policy) as membership:
        await board.announce(announcement(1))
        report = await report_of(board, 1, "failed")
        assert membership.broken is None
    assert report.error == "TransferError: the manifest lacks w"
    assert policy.calls == ["check_manifest", "abandon"]


async def test_group_it_is_not_in_fails_at_once(board):
    policy = FakePolicy()
    async with running(board, policy):
        await board.announce(announcement(1, new_group=False))
        report = await report_of(board, 1, "failed")
    assert report.error == "TransferError: not in transfer group 1"
    assert "join 1 of 3" not in policy.calls


async def test_wrong_checksum_fails_and_the_next_publish_forms_a_group_again(board):
    policy = FakePolicy(commit=raising(ChecksumMismatch("checksum 1e was received")))
    async with running(board, policy) as membership:
        await board.announce(announcement(1))
        report = await report_of(board, 1, "failed")
        assert (report.error or "").startswith("ChecksumMismatch: checksum 1e")
        assert (membership.broken, await policy.version()) == (None, 0)
        del policy.faults["commit"]
        await board.announce(announcement(2, group_number=2))
        await report_of(board, 2, "committed")
    assert policy.calls.count("join 1 of 3") == 2
    assert "abandon" in policy.calls


async def test_failure_is_said_even_if_the_policy_cannot_abandon(board):
    broken = raising(RuntimeError("engine dead"))
    policy = FakePolicy(stage=broken, abandon=broken)
    async with running(board, policy):
        await board.announce(announcement(1))
        report = await report_of(board, 1, "failed")
    assert report.error == "RuntimeError: engine dead"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (raising(RuntimeError("half loaded")), "half loaded"),
        (never, "version 11 was not taken into use"),
        (raising(TransferError("lm_head does not use it")), "lm_head does not use it"),
    ],
    ids=["error", "late", "weights differ"],
)
async def test_commit_that_goes_wrong_breaks_the_engine_and_takes_it_off_the_board(
    board, fault, reason
):
    with pytest.raises(TransferError, match=reason):
        await follow_one(board, FakePolicy(commit=fault))
    await asyncio.sleep(2 * HEARTBEAT_S)
    assert await board.engines() == []


@pytest.mark.parametrize("where", ["check_manifest", "join 1 of 3", "stage"])
async def test_engine_that_hangs_after_an_announcement_is_broken_and_leaves_the_board(board, where):
    """Nobody announces anew: the engine must see by itself that it answers nobody."""
    policy = FakePolicy(**{where: never})
    with pytest.raises(TransferError, match="version 11 was not received: the engine did not ans"):
        await follow_one(board, policy)
    assert await board.engines() == []


async def test_engine_that_cannot_give_up_a_transfer_is_broken(board):
    policy = FakePolicy(stage=raising(TransferError("reset")), abandon=never)
    with pytest.raises(TransferError, match=r"did not answer within 0\.6 s"):
        await follow_one(board, policy)
    assert (await report_of(board, 1, "failed")).error == "TransferError: reset"


async def test_beat_on_its_way_does_not_put_back_an_engine_that_has_left(board):
    heartbeat = board.heartbeat

    async def late(record: EngineRecord, ttl_s: float) -> None:
        async def arrive() -> None:
            await asyncio.sleep(0.3)
            await heartbeat(record, ttl_s)

        # Who gives the call up does not stop what was sent.
        await asyncio.shield(asyncio.create_task(arrive()))

    async with running(board, FakePolicy()):
        board.heartbeat = late
        await asyncio.sleep(HEARTBEAT_S + 0.1)
    await asyncio.sleep(0.35)
    assert await board.engines() == []


async def test_beat_under_way_does_not_bring_back_a_version_that_was_lost(board):
    """A learner that resumed at 11 sends it to an engine at 20, while that engine beats."""
    policy = FakePolicy()
    policy.held = PolicyVersion(20)
    heartbeat = board.heartbeat

    async def slow(record, ttl_s):
        await asyncio.sleep(0.05 if record.version == 20 else 0)
        await heartbeat(record, ttl_s)

    board.heartbeat = slow
    async with running(board, policy) as membership:
        beats = [asyncio.create_task(membership._beat()) for _ in range(3)]
        await board.announce(announcement(1))
        await report_of(board, 1, "committed")
        await asyncio.gather(*beats)
        assert await board.oldest_version() == 11


async def test_beat_during_a_commit_does_not_keep_a_version_that_was_lost(board):
    """The engine holds 11 already, and still verifies it, when it beats next."""
    policy = FakePolicy()

    async def slow() -> None:
        policy.held = PolicyVersion(11)
        await membership._beat()

    async with running(board, policy) as membership:
        policy.held = PolicyVersion(20)
        await membership._beat()
        policy.faults["commit"] = slow
        await board.announce(announcement(1))
        await report_of(board, 1, "committed")
        assert await board.oldest_version() == 11


async def test_what_broke_an_engine_first_is_the_cause(board):
    policy = FakePolicy(commit=raising(RuntimeError("out of memory")), abandon=never)
    with pytest.raises(TransferError, match="was not taken into use: out of memory"):
        await follow_one(board, policy)


async def test_engine_that_reports_another_checksum_than_was_sent_is_broken(board):
    async def other() -> object:
        return "1e"

    with pytest.raises(TransferError, match="checksum 1e is in use, 0f was sent"):
        await follow_one(board, FakePolicy(commit=other))


@pytest.mark.parametrize("where", ["join 1 of 3", "stage"])
async def test_engine_that_waits_for_others_goes_on_with_a_newer_announcement(board, where):
    policy = FakePolicy(**{where: never})
    async with running(board, policy):
        await board.announce(announcement(1))
        await report_of(board, 1, "ready")
        await asyncio.sleep(0.05)
        policy.faults.clear()
        began = time.monotonic()
        await board.announce(announcement(2, group_number=2))
        await report_of(board, 2, "committed")
        assert time.monotonic() - began < 1.0
        report = await report_of(board, 1, "failed")
    assert report.error == "TransferError: the learner went on to publish 2"
    assert policy.calls.count("abandon") == 1


# --- memory that the learner writes into --------------------------------------------------------


async def say_sent(board: PolicyBoard, publish_id: int, wire_s: float) -> None:
    await board.report(
        EngineReport(
            publish_id=publish_id,
            engine_id=LEARNER,
            stage="sent",
            version=publish_id + 10,
            wire_s=wire_s,
        )
    )


async def test_engine_shows_its_memory_and_takes_part_again_when_the_learner_has_written(board):
    policy = FakePolicy()
    async with running(board, policy) as membership:
        (engine,) = await board.engines()
        assert engine.machine == machine()
        await board.announce(announcement(1, transport="direct"))
        assert (await report_of(board, 1, "joined")).memory == [MEMORY]
        await asyncio.sleep(0.1)
        assert policy.calls == ["check_manifest", "expose"]
        await say_sent(board, 1, wire_s=0.25)
        assert (await report_of(board, 1, "committed")).checksum == "0f"
        assert policy.calls[2:] == ["arrived 0f in 0.25 s", "commit"]
        began, ended = membership.receiving
        assert 0.1 <= ended - began < AMPLE_S
        # The learner knows the memory by now.
        await board.announce(announcement(2, new_group=False, transport="direct"))
        assert (await report_of(board, 2, "joined")).memory == []
        await say_sent(board, 2, wire_s=0.5)
        await report_of(board, 2, "committed")
    assert policy.calls[4:] == ["check_manifest", "arrived 0f in 0.5 s", "commit"]


async def test_engine_without_room_beside_its_weights_offers_no_memory(board):
    policy = FakePolicy()
    policy.stages = False
    async with running(board, policy):
        (engine,) = await board.engines()
    assert (engine.stages, engine.machine) == (False, "")


async def test_learner_that_never_says_that_it_has_written_leaves_the_weights_as_they_were(board):
    policy = FakePolicy()
    async with running(board, policy) as membership:
        await board.announce(announcement(1, transport="direct"))
        report = await report_of(board, 1, "failed")
        assert membership.broken is None
    assert report.error is not None
    assert "no report of stage sent within 0.6 s from learner" in report.error
    assert policy.calls == ["check_manifest", "expose", "abandon"]


async def test_engine_that_waits_for_the_learner_goes_on_with_a_newer_announcement(board):
    policy = FakePolicy()
    async with running(board, policy):
        await board.announce(announcement(1, transport="direct"))
        await report_of(board, 1, "joined")
        await board.announce(announcement(2, group_number=2))
        await report_of(board, 2, "committed")
    assert policy.calls[-4:] == ["check_manifest", "join 1 of 3", "stage", "commit"]


# --- the manifest -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"a": [2, 3]}, "lacks b, which the engine loads"),
        ({}, "lacks a and 1 more"),
        ({"a": [2, 3], "b": [1], "c": [1]}, "lists c, which the engine does not load"),
        ({"a": [3, 2], "b": [1]}, r"lists a as \[3, 2\]; the engine's is \[2, 3\]"),
    ],
)
def test_manifest_must_list_what_the_engine_loads(sent, message):
    manifest = [TensorSpec(name=n, dtype="float32", shape=s) for n, s in sent.items()]
    with pytest.raises(TransferError, match=message):
        check_manifest(manifest, {"a": [2, 3], "b": (1,)})


@pytest.mark.parametrize("sent", [["a"], ["a", "head"]])
def test_manifest_may_leave_out_or_list_what_is_optional(sent):
    manifest = [TensorSpec(name=name, dtype="bfloat16", shape=[2]) for name in sent]
    check_manifest(manifest, {"a": [2], "head": [2]}, optional=("head",))
    check_manifest(manifest, {"a": [2]}, optional=("head",))


# --- staging ------------------------------------------------------------------------------------


def wait_idle(staging: StagingArea) -> str:
    deadline = time.monotonic() + AMPLE_S
    while staging.state() == "busy" and time.monotonic() < deadline:
        time.sleep(0.01)
    return staging.state()


def nobody(timeout_s: float) -> Rendezvous:
    """Nobody listens on port 1."""
    return Rendezvous(
        host="127.0.0.1",
        port=1,
        rank_offset=1,
        world_size=2,
        transport="gloo",
        timeout_s=timeout_s,
    )


def test_staging_is_empty_until_something_was_received():
    staging = StagingArea(pytest.importorskip("torch").device("cpu"))
    assert staging.state() == "idle"
    for use in (staging.views, lambda: staging.check("0f")):
        with pytest.raises(TransferError, match="nothing was received"):
            use()


def test_receiving_without_a_group_is_said():
    staging = StagingArea(pytest.importorskip("torch").device("cpu"))
    staging.start_receive(NOTHING)
    assert wait_idle(staging) == "could not receive weights: no transfer group was joined"


def test_thread_that_was_abandoned_does_not_disturb_the_next_transfer():
    staging = StagingArea(pytest.importorskip("torch").device("cpu"))
    staging.start_join(nobody(0.3))
    with pytest.raises(TransferError, match="the transfer before it is still running"):
        staging.start_receive(NOTHING)
    staging.abandon()
    assert staging.state() == "idle"
    staging.start_join(nobody(1.0))
    time.sleep(0.5)  # the first one has failed by now
    assert staging.state() == "busy"
    assert wait_idle(staging).startswith("could not join the transfer group: no rendezvous at")


ONE = Delivery(
    manifest=[TensorSpec(name="w", dtype="uint8", shape=[4])], chunk_bytes=64, timeout_s=1.0
)
TWO = Delivery(
    manifest=[TensorSpec(name="w", dtype="uint8", shape=[32])], chunk_bytes=64, timeout_s=1.0
)


def test_what_the_learner_writes_into_exposed_memory_is_what_there_is_to_use():
    torch = pytest.importorskip("torch")
    staging = StagingArea(torch.device("cpu"))
    for take in (staging.memory, lambda: staging.arrived("0f", 0.1)):
        with pytest.raises(TransferError, match="no memory was exposed"):
            take()
    made: list[int] = []
    staging.start_expose(ONE, then=lambda layout, flat: lambda: made.append(flat.data_ptr()))
    assert wait_idle(staging) == "idle"
    target = open_memory(staging.memory(), torch.device("cpu"))
    assert made == [target.data_ptr()]
    with pytest.raises(TransferError, match="nothing was received"):
        staging.views()
    target[:4] = 5
    staging.arrived("0f", 0.25)
    staging.check("0f")
    assert staging.views()["w"].tolist() == [5, 5, 5, 5]
    assert staging.wire_s == 0.25
    with pytest.raises(ChecksumMismatch, match="checksum 0f was received, 1e was sent"):
        staging.check("1e")


def test_memory_that_somebody_else_writes_to_until_it_is_in_use_is_told_from_what_arrived():
    torch = pytest.importorskip("torch")
    staging = StagingArea(torch.device("cpu"))
    staging.recheck()  # nothing was written, so nothing can be wrong
    staging.start_expose(ONE)
    assert wait_idle(staging) == "idle"
    target = open_memory(staging.memory(), torch.device("cpu"))
    target[:4] = 5
    sent = pack({"w": torch.full((4,), 5, dtype=torch.uint8)})
    staging.arrived(sent.checksum, 0.25)
    staging.recheck()
    target[2] = 6
    with pytest.raises(TransferError, match=f"held the version {sent.checksum} was written to"):
        staging.recheck()


def test_memory_once_exposed_serves_again_and_nothing_else_even_when_it_is_outgrown():
    torch = pytest.importorskip("torch")
    staging = StagingArea(torch.device("cpu"))
    staging.start_expose(ONE)
    assert wait_idle(staging) == "idle"
    first = staging.memory()
    staging.abandon()
    staging.start_expose(ONE)
    assert wait_idle(staging) == "idle"
    assert staging.memory().token == first.token
    staging.start_expose(TWO)
    assert wait_idle(staging) == "idle"
    assert staging.memory().token != first.token
    # A learner that was given up may still write there.
    assert open_memory(first, torch.device("cpu")).numel() == 16


# --- Redis --------------------------------------------------------------------------------------


class Unreachable(PolicyBoard):
    """Redis is gone when the engine wants to leave."""

    async def withdraw(self, engine_id: str) -> None:
        raise StoreUnavailable("no answer from Redis at here")


async def test_engine_whose_redis_is_gone_leaves_with_a_warning(url, caplog):
    board = Unreachable(url, f"test-{uuid.uuid4().hex}")
    async with running(board, FakePolicy()):
        pass
    await board.close()
    assert "a stays on the board until it expires: no answer from Redis at here" in caplog.text


async def test_cancellation_that_comes_together_with_a_reply_is_not_lost(board):
    # In Python 3.11 asyncio.wait_for, which the redis library uses, can swallow it.
    await board.announce(announcement(1))
    for num_turns in range(40):
        waiting = asyncio.create_task(board.next_announcement(1, 0.1))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
