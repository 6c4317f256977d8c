"""The learner's side of publishing, with engines that only say what they are told to say.

The board is real; the transfer of bytes is replaced by notes of what would have been sent.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import pytest
import torch

from leeway.learner.weights import publisher as module
from leeway.learner.weights import routes
from leeway.learner.weights import sender as sending_thread
from leeway.learner.weights.outcome import error_summary
from leeway.learner.weights.publisher import Publisher
from leeway.learner.weights.sender import Sender
from leeway.replay.board import LEARNER, Announcement, EngineRecord, EngineReport, PolicyBoard
from leeway.replay.errors import TransferError, WaitTimeout
from leeway.replay.exposed_memory import ExposedMemory
from leeway.replay.flat_weights import pack
from leeway.replay.memory_handle import machine
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis

TIMEOUT_S = 1.0
WEIGHTS = pack({"w": torch.tensor([1.0, 2.0])})
V1, V2, V3 = PolicyVersion(1), PolicyVersion(2), PolicyVersion(3)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
async def board(url: str) -> AsyncIterator[PolicyBoard]:
    board = PolicyBoard(url, f"test-{uuid.uuid4().hex}")
    yield board
    await board.close()


class Wire:
    """In place of torch.distributed. `faults` are raised by the next sends, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.faults: list[TransferError | None] = []
        self.num_groups = 0
        self.num_sent = 0
        self.expected_s: list[float] = []
        monkeypatch.setattr(module.transfer, "build_store", lambda *_: SimpleNamespace(port=1234))
        monkeypatch.setattr(module.transfer, "build_group", self._build_group)
        monkeypatch.setattr(module.transfer, "broadcast", self._send)
        monkeypatch.setattr(module.transfer, "drop", lambda _: None)

    def _build_group(self, *_: object) -> object:
        self.num_groups += 1
        return object()

    def _send(self, *_: object, usual_s: float) -> float:
        if self.faults and (fault := self.faults.pop(0)):
            raise fault
        self.num_sent += 1
        self.expected_s.append(usual_s)
        return 0.25


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


@pytest.fixture
def publisher(board: PolicyBoard, wire: Wire) -> Publisher:
    return Publisher(board, torch.device("cpu"), TIMEOUT_S)


class Engine:
    """Answers announcements with the stages of `says`; the last answer stays for all later ones.

    `...` among the stages is a pause in which the learner can act on the one before.
    """

    def __init__(self, board: PolicyBoard, engine_id: str, *says: str, num_ranks: int = 1) -> None:
        self.board = board
        self.engine_id = engine_id
        self.says = list(says) or ["ready joined committed"]
        self.num_ranks = num_ranks
        self.dtype = "float32"
        self.checksum: str | None = None
        self.seen: list[Announcement] = []

    async def beat(self, ttl_s: float = 60.0) -> None:
        await self.board.heartbeat(
            EngineRecord(self.engine_id, self.num_ranks, self.dtype, [], 0, "here"), ttl_s
        )

    async def run(self) -> None:
        last = 0
        while True:
            announcement = await self.board.next_announcement(last, 0.3)
            if announcement is None:
                continue
            last = announcement.publish_id
            if self.engine_id not in announcement.rank_offsets:
                continue
            self.seen.append(announcement)
            says = self.says.pop(0) if len(self.says) > 1 else self.says[0]
            for stage in says.split():
                if stage == "...":
                    await asyncio.sleep(0.3)
                else:
                    await self.say(announcement, stage)

    async def say(self, announcement: Announcement, stage: str) -> None:
        await self.board.report(
            EngineReport(
                publish_id=announcement.publish_id,
                engine_id=self.engine_id,
                stage=stage,  # type: ignore[arg-type]
                version=announcement.version,
                checksum=self.checksum or announcement.checksum,
                transfer_s=0.5,
                pause_s=0.125,
                error="out of memory" if stage == "failed" else None,
            )
        )


@asynccontextmanager
async def living(*engines: Engine) -> AsyncIterator[None]:
    tasks = []
    for engine in engines:
        await engine.beat()
        tasks.append(asyncio.create_task(engine.run()))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=5)


def offsets(engine: Engine) -> list[dict[str, int]]:
    return [announcement.rank_offsets for announcement in engine.seen]


# --- what is announced --------------------------------------------------------------------------


async def test_without_an_engine_nothing_is_announced(board, publisher):
    assert await publisher.publish(V1, WEIGHTS) == 0
    assert await board.latest_announcement() is None
    assert await publisher.confirm() is None


async def test_announcement_lists_ranks_manifest_and_checksum(board, publisher):
    a, b = Engine(board, "a", num_ranks=2), Engine(board, "b")
    async with living(a, b):
        assert await publisher.publish(V1, WEIGHTS) == 2
    (announcement,) = b.seen
    # The learner is rank 0, a has ranks 1 and 2.
    assert announcement.rank_offsets == {"a": 1, "b": 3}
    assert (announcement.world_size, announcement.version) == (4, 1)
    assert [(t.name, t.shape) for t in announcement.manifest] == [("w", [2])]
    assert announcement.checksum == WEIGHTS.checksum


NEAR, FAR = {"stages": True, "machine": machine()}, {"stages": True, "machine": "elsewhere"}
IN_PLACE = {"stages": False, "machine": machine()}


@pytest.mark.parametrize(
    ("choice", "own", "gpus", "where", "transport"),
    [
        # NCCL refuses two ranks on one GPU, and has nothing for a CPU.
        ("auto", "g0", [["g1"], ["g2", "g3"]], FAR, "nccl"),
        ("auto", "g0", [["g0"]], FAR, "gloo"),
        ("auto", "g0", [["g1"], ["g1"]], FAR, "gloo"),
        ("auto", "g0", [["g1"], []], FAR, "gloo"),
        ("auto", None, [[]], FAR, "gloo"),
        # On one machine memory is written to, that of the learner's own GPU as well.
        ("auto", "g0", [["g1"], ["g2", "g3"]], NEAR, "direct"),
        ("auto", "g0", [["g0"]], NEAR, "direct"),
        ("direct", "g0", [["g1"]], NEAR, "direct"),
        ("collective", "g0", [["g1"]], NEAR, "nccl"),
        # Not from a GPU to a CPU, nor where there is no room for it.
        ("direct", "g0", [["g1"], []], NEAR, "gloo"),
        ("auto", "g0", [["g1"]], IN_PLACE, "nccl"),
        # On CPUs it is done where it is asked for.
        ("auto", None, [[]], NEAR, "gloo"),
        ("direct", None, [[]], NEAR, "direct"),
        ("direct", None, [[]], FAR, "gloo"),
    ],
)
def test_weights_travel_by_what_reaches_all_engines(
    monkeypatch, choice, own, gpus, where, transport
):
    monkeypatch.setattr(module.transfer, "gpu_uuid", lambda _: own)
    records = [
        EngineRecord(f"e{i}", max(1, len(of_one)), "bfloat16", of_one, 0, "here", **where)
        for i, of_one in enumerate(gpus)
    ]
    assert routes.transport_of(torch.device("cpu"), records, choice) == transport


def test_one_engine_out_of_reach_is_enough_for_a_broadcast_to_all():
    near = EngineRecord("a", 1, "float32", [], 0, "here", **NEAR)
    far = EngineRecord("b", 1, "float32", [], 0, "there", **FAR)
    assert routes.transport_of(torch.device("cpu"), [near], "direct") == "direct"
    assert routes.transport_of(torch.device("cpu"), [near, far], "direct") == "gloo"


@pytest.mark.parametrize(
    ("transport", "stages", "num_pieces"),
    [
        ("nccl", [True, True], 1),
        # One that takes weights as they come has room for a piece only, and all get the same ones.
        ("nccl", [True, False], 2),
        ("gloo", [True, True], 2),
        ("direct", [True, True], 1),
    ],
)
def test_weights_travel_in_one_piece_where_that_is_best(monkeypatch, transport, stages, num_pieces):
    monkeypatch.setattr(routes, "CHUNK_BYTES", {"nccl": 16, "gloo": 16})
    weights = pack({"v": torch.ones(4), "w": torch.ones(4)})
    engines = [EngineRecord("e", 1, "float32", [], 0, "here", room) for room in stages]
    size = routes.chunk_bytes(transport, engines, weights)
    assert len(weights.layout.chunks(size)) == num_pieces


class Neighbour(Engine):
    """An engine whose memory the learner is shown."""

    def __init__(self, board: PolicyBoard, engine_id: str, *says: str) -> None:
        super().__init__(board, engine_id, *says)
        self.memory = ExposedMemory(WEIGHTS.layout.num_bytes, torch.device("cpu"))
        self.handles = [self.memory.handle()]

    async def beat(self, ttl_s: float = 60.0) -> None:
        await self.board.heartbeat(
            EngineRecord(self.engine_id, 1, "float32", [], 0, "here", **NEAR), ttl_s
        )

    async def say(self, announcement: Announcement, stage: str) -> None:
        memory = self.handles if stage == "joined" and announcement.new_group else []
        if stage == "committed" and announcement.transport == "direct":
            await self.board.reports(announcement.publish_id, [LEARNER], "sent", TIMEOUT_S)
        await self.board.report(
            EngineReport(
                publish_id=announcement.publish_id,
                engine_id=self.engine_id,
                stage=stage,  # type: ignore[arg-type]
                version=announcement.version,
                checksum=announcement.checksum,
                memory=memory,
            )
        )


@pytest.fixture
def direct(board: PolicyBoard, wire: Wire) -> Publisher:
    return Publisher(board, torch.device("cpu"), TIMEOUT_S, "direct")


async def sent(board: PolicyBoard, publish_id: int) -> EngineReport:
    return (await board.reports(publish_id, [LEARNER], "sent", 0.2))[LEARNER]


async def test_version_is_written_into_the_memory_that_engines_show_and_then_said_to_be_there(
    board, wire, direct
):
    a, b = Neighbour(board, "a"), Neighbour(board, "b")
    async with living(a, b):
        assert await direct.publish(V1, WEIGHTS) == 2
        published = await direct.confirm()
        assert (published.transport, published.evicted) == ("direct", {})
        for engine in (a, b):
            assert torch.equal(engine.memory.flat, WEIGHTS.flat)
        report = await sent(board, 1)
        assert (report.version, report.wire_s > 0) == (1, True)
        # The memory is shown once; the next version goes to the same place.
        doubled = pack({"w": torch.tensor([2.0, 4.0])})
        assert await direct.publish(V2, doubled) == 2
        await direct.confirm()
    assert [announcement.new_group for announcement in a.seen] == [True, False]
    assert torch.equal(a.memory.flat, doubled.flat)
    assert (wire.num_groups, wire.num_sent) == (0, 0)


async def test_other_tensors_than_before_are_shown_new_memory(board, direct):
    a = Neighbour(board, "a")
    async with living(a):
        await direct.publish(V1, WEIGHTS)
        await direct.confirm()
        larger = pack({"w": torch.ones(64)})
        a.memory = ExposedMemory(larger.layout.num_bytes, torch.device("cpu"))
        a.handles = [a.memory.handle()]
        assert await direct.publish(V2, larger) == 1
        await direct.confirm()
    assert [announcement.group_number for announcement in a.seen] == [1, 2]
    assert torch.equal(a.memory.flat, larger.flat)


async def test_memory_out_of_reach_makes_it_a_broadcast_while_that_engine_lives(
    board, wire, direct, caplog
):
    a = Neighbour(board, "a", "ready joined", "ready joined committed")
    gone = msgspec.structs.replace(a.handles[0], token="of nobody", pid=2**22 + 1)
    a.handles = [gone]
    async with living(a):
        for version in (V1, V2):
            assert await direct.publish(version, WEIGHTS) == 1
            assert (await direct.confirm()).transport == "gloo"
    assert [announcement.transport for announcement in a.seen] == ["direct", "gloo", "gloo"]
    assert (wire.num_groups, wire.num_sent) == (1, 2)
    assert "weights are broadcast while this engine lives: a: the memory of process" in caplog.text


async def test_the_others_are_written_to_again_when_an_engine_out_of_reach_is_gone(board, direct):
    says = ("ready joined", "ready joined committed")
    a, b = Neighbour(board, "a", *says), Neighbour(board, "b", *says)
    a.handles = [msgspec.structs.replace(a.handles[0], token="of nobody", pid=2**22 + 1)]
    async with living(b):
        async with living(a):
            assert await direct.publish(V1, WEIGHTS) == 2
            assert (await direct.confirm()).transport == "gloo"
        await board.withdraw("a")
        assert await direct.publish(V2, WEIGHTS) == 1
        assert (await direct.confirm()).transport == "direct"
    assert torch.equal(b.memory.flat, WEIGHTS.flat)


async def test_memory_of_another_size_is_not_written_to(board, wire, direct, caplog):
    a = Neighbour(board, "a", "ready joined", "ready joined committed")
    a.handles = [ExposedMemory(8, torch.device("cpu")).handle()]
    async with living(a):
        assert await direct.publish(V1, WEIGHTS) == 1
        await direct.confirm()
    assert wire.num_sent == 1
    assert f"shows 8 bytes, not {WEIGHTS.layout.num_bytes}" in caplog.text


async def test_engine_that_shows_no_memory_is_sent_to_by_broadcast(board, wire, direct, caplog):
    a = Neighbour(board, "a", "ready joined", "ready joined committed")
    a.handles = []
    async with living(a):
        assert await direct.publish(V1, WEIGHTS) == 1
        await direct.confirm()
    assert wire.num_sent == 1
    assert "a: 0 of its memories were shown" in caplog.text


async def test_nothing_is_said_to_be_there_that_does_not_read_back_as_it_was_sent(
    board, direct, monkeypatch
):
    a = Neighbour(board, "a", "ready joined")
    monkeypatch.setattr(routes, "checksum", lambda *_: "f" * 16)
    async with living(a):
        with pytest.raises(TransferError, match=r"to a: checksum f{16} is in the memory of rank 1"):
            await direct.publish(V1, WEIGHTS)
        for publish_id in (1, 2):
            with pytest.raises(WaitTimeout):
                await sent(board, publish_id)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (["bfloat16", "bfloat16"], torch.bfloat16),
        (["bfloat16", "float32"], torch.float32),
        ([], torch.float32),
    ],
)
async def test_floats_travel_in_the_dtype_that_all_engines_have(board, publisher, dtypes, expected):
    for place, dtype in enumerate(dtypes):
        engine = Engine(board, f"e{place}")
        engine.dtype = dtype
        await engine.beat()
    assert await publisher.wire_dtype() == expected


async def test_group_is_kept_while_the_members_are_the_same(board, publisher, wire):
    a = Engine(board, "a")
    async with living(a):
        for version in (V1, V2):
            await publisher.publish(version, WEIGHTS)
            await publisher.confirm()
    # What it took the last time tells how long nobody has to look.
    assert wire.expected_s == [0.0, 0.25]
    assert [(n.publish_id, n.group_number, n.new_group) for n in a.seen] == [
        (1, 1, True),
        (2, 1, False),
    ]
    assert (wire.num_groups, wire.num_sent) == (1, 2)


async def test_engine_that_joins_late_is_in_the_next_group(board, publisher, wire):
    a, b = Engine(board, "a"), Engine(board, "b")
    async with living(a):
        await publisher.publish(V1, WEIGHTS)
        await publisher.confirm()
        async with living(b):
            assert await publisher.publish(V2, WEIGHTS) == 2
            await publisher.confirm()
    assert [(n.publish_id, n.group_number) for n in b.seen] == [(2, 2)]
    assert wire.num_groups == 2


async def test_resumed_learner_goes_on_with_the_numbers(board, publisher):
    a = Engine(board, "a")
    async with living(a):
        await publisher.publish(V1, WEIGHTS)
        await publisher.confirm()
        restarted = Publisher(board, torch.device("cpu"), TIMEOUT_S)
        await restarted.resume()
        assert await restarted.publish(V2, WEIGHTS) == 1
    assert [(n.publish_id, n.group_number, n.new_group) for n in a.seen] == [
        (1, 1, True),
        (2, 2, True),
    ]


# --- engines that do not come along -------------------------------------------------------------


async def test_silent_engine_is_evicted_and_the_others_are_sent_to(board, publisher, wire):
    a, b = Engine(board, "a"), Engine(board, "b", "")
    began = time.monotonic()
    async with living(a, b):
        assert await publisher.publish(V1, WEIGHTS) == 1
        assert TIMEOUT_S <= time.monotonic() - began < 2 * TIMEOUT_S
        published = await publisher.confirm()
    assert offsets(a) == [{"a": 1, "b": 2}, {"a": 1}]
    assert published.evicted == {"b": "not ready within 1 s"}
    assert (published.num_engines, published.pause_s) == (1, [0.125])
    assert wire.num_groups == 1, "no group is formed before all are ready"
    assert [engine.engine_id for engine in await board.engines()] == ["a"]


async def test_engine_whose_heartbeat_ends_is_not_waited_for(board, wire):
    publisher = Publisher(board, torch.device("cpu"), timeout_s=30.0)
    a, b = Engine(board, "a"), Engine(board, "b", "")
    async with living(a, b):
        await b.beat(ttl_s=0.3)
        began = time.monotonic()
        assert await publisher.publish(V1, WEIGHTS) == 1
        assert time.monotonic() - began < 3
        published = await publisher.confirm()
    assert published.evicted == {"b": "its heartbeat ended"}


async def test_engine_that_fails_once_is_asked_again(board, publisher):
    a = Engine(board, "a", "failed", "ready joined committed")
    async with living(a):
        assert await publisher.publish(V1, WEIGHTS) == 1
        published = await publisher.confirm()
    assert [n.group_number for n in a.seen] == [1, 2]
    assert published.evicted == {}


async def test_engine_that_fails_twice_is_evicted_and_the_others_are_sent_to(board, publisher):
    a, b = Engine(board, "a"), Engine(board, "b", "failed")
    async with living(a, b):
        assert await publisher.publish(V1, WEIGHTS) == 1
        published = await publisher.confirm()
    assert offsets(a) == [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1}]
    assert published.evicted == {"b": "out of memory"}


async def test_publish_that_every_engine_refuses_raises_with_the_reason(board, publisher):
    async with living(Engine(board, "a", "failed")):
        with pytest.raises(TransferError, match="version 1 was not published: a: out of memory"):
            await publisher.publish(V1, WEIGHTS)


async def test_publish_with_no_engine_left_alive_is_none_and_says_who_was_lost(board, publisher):
    async with living(Engine(board, "a", "")):
        assert await publisher.publish(V1, WEIGHTS) == 0
    published = await publisher.confirm()
    assert (published.num_engines, published.pause_s) == (0, [])
    assert published.evicted == {"a": "not ready within 1 s"}
    assert await publisher.confirm() is None


async def test_transfer_that_fails_once_is_tried_again_in_a_new_group(board, publisher, wire):
    wire.faults = [TransferError("connection reset")]
    async with living(Engine(board, "a")):
        assert await publisher.publish(V1, WEIGHTS) == 1
    assert (wire.num_groups, wire.num_sent) == (2, 1)


async def test_transfer_that_fails_twice_raises_and_names_the_engines(board, publisher, wire):
    wire.faults = [TransferError("connection reset")] * 2
    async with living(Engine(board, "a"), Engine(board, "b")):
        with pytest.raises(TransferError, match="not published: to a, b: connection reset"):
            await publisher.publish(V1, WEIGHTS)


async def test_engine_that_dies_during_the_transfer_does_not_end_the_run(board, publisher, wire):
    wire.faults = [TransferError("connection reset")]
    async with living(Engine(board, "a", "ready joined", "")):
        assert await publisher.publish(V1, WEIGHTS) == 0


async def test_engine_that_is_ready_but_does_not_join_is_evicted_by_name(board, publisher):
    async with living(Engine(board, "a"), Engine(board, "b", "ready")):
        assert await publisher.publish(V1, WEIGHTS) == 1
        published = await publisher.confirm()
    assert published.evicted == {"b": "not joined within 1 s"}


async def test_engine_that_fails_to_join_twice_is_evicted_and_the_others_get_the_version(
    board, publisher
):
    async with living(Engine(board, "a"), Engine(board, "b", "ready failed")):
        assert await publisher.publish(V1, WEIGHTS) == 1
        published = await publisher.confirm()
    assert published.evicted == {"b": "out of memory"}


async def test_floats_travel_as_before_while_no_engine_lives(board, publisher):
    engine = Engine(board, "a")
    engine.dtype = "bfloat16"
    await engine.beat()
    assert await publisher.wire_dtype() == torch.bfloat16
    await board.withdraw("a")
    assert await publisher.wire_dtype() == torch.bfloat16


async def test_publish_as_a_whole_has_a_deadline_that_says_who_was_lost(
    board, publisher, monkeypatch
):
    """Engines that are lost one after the other would each cost a deadline."""
    monkeypatch.setattr(module, "MAX_DEADLINES", 1.9)
    async with living(Engine(board, "a"), Engine(board, "b", ""), Engine(board, "c", "ready")):
        with pytest.raises(TransferError) as raised:
            await publisher.publish(V1, WEIGHTS)
    assert str(raised.value) == (
        "version 1 was not published within 1.9 s; lost meanwhile: b: not ready within 1 s"
    )


async def test_sends_share_one_thread_until_one_of_them_hangs(monkeypatch):
    monkeypatch.setattr(sending_thread, "GRACE_S", 0.0)
    sender, blocked = Sender(), threading.Event()
    first, second = [await sender.run(threading.get_ident, 30) for _ in range(2)]
    with pytest.raises(TransferError, match=r"nothing came of it within 0\.1 s"):
        await sender.run(blocked.wait, 0.1)
    third = await sender.run(threading.get_ident, 30)
    assert first == second != third
    blocked.set()
    await until_ended(first)


async def test_publish_that_is_given_up_leaves_a_thread_for_the_next():
    sender, blocked = Sender(), threading.Event()
    first = await sender.run(threading.get_ident, 30)
    sending = asyncio.create_task(sender.run(blocked.wait, 30))
    await asyncio.sleep(0.05)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert await sender.run(lambda: "sent", 30) == "sent"
    blocked.set()
    await until_ended(first)


async def until_ended(ident: int) -> None:
    async with asyncio.timeout(30):
        while ident in {thread.ident for thread in threading.enumerate()}:
            await asyncio.sleep(0.01)


# --- confirming ---------------------------------------------------------------------------------


async def test_confirm_counts_those_that_committed_beside_one_that_failed(board, publisher):
    a = Engine(board, "a", "ready joined ... failed")
    b, c = Engine(board, "b"), Engine(board, "c", "ready joined")
    async with living(a, b, c):
        await publisher.publish(V1, WEIGHTS)
        published = await publisher.confirm()
        left = [engine.engine_id for engine in await board.engines()]
    assert (published.num_engines, published.transfer_s) == (1, 0.5)
    assert published.evicted == {"a": "out of memory", "c": "not committed within 1 s"}
    assert left == ["b"]


async def test_engine_with_another_checksum_is_evicted(board, publisher):
    a, b = Engine(board, "a"), Engine(board, "b")
    b.checksum = "0f"
    async with living(a, b):
        await publisher.publish(V1, WEIGHTS)
        published = await publisher.confirm()
        assert published.evicted == {"b": f"checksum 0f, sent {WEIGHTS.checksum}"}
        assert [engine.engine_id for engine in await board.engines()] == ["a"]
        await publisher.publish(V2, WEIGHTS)
    assert [n.group_number for n in a.seen] == [1, 2]


async def test_evicted_engine_is_in_the_next_publish_if_it_lives(board, publisher):
    a, b = Engine(board, "a"), Engine(board, "b", "", "ready joined committed")
    async with living(a, b):
        await publisher.publish(V1, WEIGHTS)
        await publisher.confirm()
        await b.beat()
        assert await publisher.publish(V2, WEIGHTS) == 2
        assert (await publisher.confirm()).evicted == {}


def test_summary_names_each_engine_and_its_reason():
    assert error_summary({"a": "late", "b": "dead"}) == "a: late; b: dead"
    assert error_summary({}) == "no reply"
