"""Live events: one reader for all, replay from an id, and an end for who does not listen."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from leeway.replay.config import ReplayConfig
from leeway.replay.errors import DataError, StoreUnavailable
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.run_board import Event
from leeway.services.api import hub
from leeway.services.api.hub import ALIVE, MAX_BEHIND, Hub, Listener, Place, Tick, place_of
from leeway.services.api.reader import Reader
from leeway.services.api.recent import Seen
from leeway.services.api.resources import TrajectoryItem


class Records:
    """Events 1-0, 2-0, ... as far as they have happened, and steps 1 to 7."""

    def __init__(self) -> None:
        self.num_events = 2
        self.num_reads = 0
        self.step = 7
        self.num_seen = 3
        self.errors: list[Exception] = []
        """What the next questions for trajectories raise."""

    async def get_all(self) -> dict[str, dict[str, Any]]:
        return {"learner": {"step": self.step, "version": 7}}

    async def since(self, number: int) -> list[Seen]:
        if self.errors:
            raise self.errors.pop()
        return [seen(k) for k in range(number + 1, self.num_seen + 1)]

    async def phase(self) -> str | None:
        return "training"

    async def steps(self, after: int = 0, count: int = 100) -> list[dict[str, Any]]:
        return [{"step": step} for step in range(after + 1, self.step + 1)][:count]

    async def events(self, after: str = "", count: int = 100) -> Sequence[Event]:
        self.num_reads += 1
        every = [Event(f"{n}-0", float(n), "run", f"e{n}") for n in range(1, self.num_events + 1)]
        behind = int(after.split("-")[0]) if after else 0
        return every[behind:][:count] if after else every[-count:]


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    monkeypatch.setattr(hub, "TICK_S", 0.01)
    return Records()


def hub_of(records: Records) -> Hub:
    return Hub(Reader(records, MemoryReplay(ReplayConfig()), {}), records, records)


async def every(pages: AsyncIterator[bytes]) -> list[bytes]:
    """The messages of the pages, each without the empty line at its end."""
    return [message for page in [page async for page in pages] for message in _cut(page)]


def _cut(page: bytes) -> list[bytes]:
    return page.removesuffix(b"\n\n").split(b"\n\n")


def seen(number: int) -> Seen:
    item = {
        "trajectory_id": f"t{number}", "group_id": "g", "question_id": "q", "question": None,
        "golden_answers": [], "worker_id": "w", "is_failed": False, "reward": 1.0,
        "stop_reason": "answer", "duration_s": 1.0, "num_turns": 1, "num_tokens": 2,
        "num_trained_tokens": 1, "oldest_version": 0, "scores": {},
    }  # fmt: skip
    return Seen(number, "g", TrajectoryItem.model_validate(item))


async def until(listener: Listener, words: bytes) -> bytes:
    async with asyncio.timeout(60):
        while True:
            message = await listener.take()
            assert message
            if words in message:
                return message


def test_an_id_names_an_event_and_a_step():
    assert place_of("1764-0.17") == Place("1764-0", 17)
    assert str(Place("1764-0", 17)) == "1764-0.17"


@pytest.mark.parametrize("text", ["", "17", "1-0", "1-0.x", "1-0.1\n", "-.1", "1-0.1-0.1"])
def test_what_is_no_id_is_refused(text: str):
    with pytest.raises(DataError, match="no id of an event"):
        place_of(text)


async def test_without_an_id_the_status_comes_first_and_nothing_that_was(records: Records):
    async with hub_of(records).listen(None) as (pages, _):
        missed = await every(pages)
        assert len(missed) == 1
        assert missed[0].startswith(b"id: 2-0.7\nevent: status\ndata: {")


async def test_from_an_id_on_what_was_missed_comes_first(records: Records):
    async with hub_of(records).listen(Place("1-0", 5)) as (pages, _):
        heads = [message.split(b"\ndata")[0] for message in await every(pages)]
    assert heads[:3] == [
        b"id: 2-0.5\nevent: event",
        b"id: 2-0.6\nevent: step",
        b"id: 2-0.7\nevent: step",
    ]


async def test_what_happens_meanwhile_comes_once(records: Records, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "TICK_S", 60.0)
    shared = hub_of(records)
    async with shared.listen(None):
        records.num_events = 3
        async with shared.listen(Place("1-0", 7)) as (pages, _):
            events = [message for message in await every(pages) if b"event: event" in message]
    # 3-0 has come behind what the reader has read: it goes through the queue.
    assert [message.split(b"\n")[0] for message in events] == [b"id: 2-0.7"]


async def test_a_look_that_is_older_than_the_records_repeats_no_step(
    records: Records, monkeypatch: pytest.MonkeyPatch
):
    class Late(Records):
        """The run's own section tells a step later than the records do."""

        async def get_all(self) -> dict[str, dict[str, Any]]:
            return {"learner": {"step": self.step - 2, "version": 7}}

    late, found = Late(), b""
    async with hub_of(late).listen(None) as (_, listener):
        for step in (8, 9, 10):
            late.step = step
            found += await until(listener, b'{"step":%d}' % step)
        found += await until(listener, b"event: status")
    assert found.count(b'{"step":8}') == found.count(b'{"step":10}') == 1


async def test_a_resumption_at_an_earlier_step_tells_the_steps_behind_it_anew(records: Records):
    async with hub_of(records).listen(None) as (_, listener):
        records.step = 8
        await until(listener, b'{"step":8}')
        records.step = 5
        status = await until(listener, b'"step":5,')  # a look that shows it
        # Who was away comes back with the last id it got.
        assert status.split(b"\n\n")[-2].startswith(b"id: 2-0.5\nevent: status")
        records.step = 8
        assert b'{"step":6}' in await until(listener, b'{"step":8}')


async def test_who_was_away_for_long_gets_the_latest_steps(
    records: Records, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub, "MAX_REPLAY", 2)
    monkeypatch.setattr(hub, "AT_ONCE", 1)
    records.num_events = 9
    async with hub_of(records).listen(Place("2-0", 0)) as (pages, _):
        ids = [message.split(b"\n")[0] for message in await every(pages)]
    assert ids[:-1] == [b"id: 8-0.5", b"id: 8-0.6", b"id: 9-0.6", b"id: 9-0.7"]


async def test_what_was_missed_is_read_page_by_page(
    records: Records, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub, "AT_ONCE", 2)
    monkeypatch.setattr(hub, "TICK_S", 60.0)
    async with hub_of(records).listen(Place("2-0", 1)) as (pages, _):
        sizes = [len(_cut(page)) async for page in pages]
    # Steps 2 to 7, then the status.
    assert sizes == [2, 2, 2, 1]


async def test_a_place_beyond_what_there_is_counts_as_now(records: Records):
    # The run went back from step 50 to step 7, over a Redis that was emptied.
    async with hub_of(records).listen(Place("90-0", 50)) as (pages, _):
        [status] = await every(pages)
    assert status.startswith(b"id: 2-0.7\nevent: status")


async def test_an_error_beside_the_events_loses_none_of_them(
    records: Records, monkeypatch: pytest.MonkeyPatch
):
    records.errors = [StoreUnavailable("away")] * 3
    async with hub_of(records).listen(None) as (_, listener):
        records.num_events = 3
        await until(listener, b'"e3"')


@pytest.mark.parametrize("error", [StoreUnavailable("away"), KeyError("step")])
async def test_after_any_error_the_stream_goes_on(
    records: Records, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    records.errors = [error]
    async with hub_of(records).listen(None) as (_, listener):
        async with asyncio.timeout(60):
            while records.errors:
                await asyncio.sleep(0.01)
        records.num_events = 3
        await until(listener, b'"e3"')


async def test_trajectories_are_told_from_the_moment_somebody_listens(
    records: Records, monkeypatch: pytest.MonkeyPatch
):
    async with hub_of(records).listen(None) as (_, listener):
        records.num_seen = 5
        first = await until(listener, b"event: trajectory")
    assert (b'"t3"' in first, b'"t4"' in first, b'"t5"' in first) == (False, True, True)


async def test_who_is_about_to_listen_counts(records: Records):
    shared = hub_of(records)
    coming = asyncio.create_task(shared.listen(None).__aenter__())
    await asyncio.sleep(0)
    assert shared.num_listeners == 1
    await coming


async def test_five_hundred_listeners_share_one_reader(records: Records):
    shared = hub_of(records)
    stack = [shared.listen(None) for _ in range(500)]
    listeners = [(await one.__aenter__())[1] for one in stack]
    before = records.num_reads
    records.num_events = 3
    messages = [await until(listener, b'"e3"') for listener in listeners]
    assert all(b"id: 3-0.7\nevent: event" in message for message in messages)
    # Each poll is one read, and 500 listeners make no more of them.
    assert records.num_reads - before < 100
    for one in stack:
        await one.__aexit__(None, None, None)
    assert shared.num_listeners == 0


async def test_nobody_reads_when_nobody_listens(records: Records):
    shared = hub_of(records)
    async with shared.listen(None):
        pass
    before = records.num_reads
    await asyncio.sleep(0.1)
    assert records.num_reads == before


def tick(kept: bytes, status: bytes = b"") -> Tick:
    return Tick(kept, status, kept + status)


async def test_a_listener_that_is_too_far_behind_is_ended_after_what_it_was_sent():
    listener = Listener()
    for number in range(MAX_BEHIND + 5):
        listener.put(tick(b"%d " % number))
    assert listener.has_ended
    assert (await listener.take()).split()[-1] == b"%d" % MAX_BEHIND
    assert await listener.take() == b""


async def test_a_listener_is_ended_when_more_bytes_wait_than_it_may_keep(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(hub, "MAX_BEHIND_BYTES", 10)
    listener = Listener()
    listener.put(tick(b"0123456789", b"a status does not count"))
    assert not listener.has_ended
    listener.put(tick(b"a"))
    assert listener.has_ended


async def test_what_was_taken_does_not_count_as_behind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "MAX_BEHIND_BYTES", 10)
    listener = Listener()
    for _ in range(MAX_BEHIND + 5):
        listener.put(tick(b"0123456789"))
        await listener.take()
    assert not listener.has_ended


async def test_of_a_status_not_yet_taken_the_newer_one_serves_and_no_event_is_lost():
    listener = Listener()
    for number in (b"1", b"2", b"3"):
        listener.put(tick(b"event-%b " % number, b"status-%b " % number))
    listener.put(tick(b"event-4 "))
    assert await listener.take() == b"event-1 event-2 event-3 event-4 status-3 "


async def test_all_that_one_look_found_is_one_message(records: Records):
    async with hub_of(records).listen(None) as (_, listener):
        records.num_events, records.step, records.num_seen = 3, 9, 4
        message = await until(listener, b'"e3"')
    kinds = [part.split(b"\n")[1] for part in _cut(message)]
    assert kinds == [
        b"event: event", b"event: step", b"event: step", b"event: trajectory", b"event: status",
    ]  # fmt: skip


async def test_of_many_trajectories_at_once_the_newest_twenty_are_told(records: Records):
    async with hub_of(records).listen(None) as (_, listener):
        records.num_seen = 103
        message = await until(listener, b"event: trajectory")
    assert message.count(b"event: trajectory") == 20
    assert (b'"t83"' in message, b'"t84"' in message) == (False, True)


async def test_between_slices_of_listeners_the_loop_turns(records: Records):
    """Who asks something else meanwhile waits for AT_A_TIME listeners and not for all of them."""
    shared = hub_of(records)
    stack = [shared.listen(None) for _ in range(4 * hub.AT_A_TIME)]
    listeners = [(await one.__aenter__())[1] for one in stack]
    await until(listeners[-1], b"event: status")
    told = [0]

    async def watch() -> None:
        while told[-1] < len(listeners):
            told.append(sum(bool(one._waiting) for one in listeners))
            await asyncio.sleep(0)

    for one in listeners:
        one._waiting.clear()
    async with asyncio.timeout(60):
        await watch()
    assert max(after - before for before, after in itertools.pairwise(told)) <= hub.AT_A_TIME
    for one in stack:
        await one.__aexit__(None, None, None)


async def test_silence_is_broken_by_a_comment(records: Records, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "SILENT_S", 0.05)
    async with hub_of(records).listen(None) as (_, listener):
        records.get_all = away  # pyright: ignore[reportAttributeAccessIssue]
        await until(listener, ALIVE)


async def away() -> dict[str, dict[str, Any]]:
    raise StoreUnavailable("away")


async def test_a_slow_look_for_trajectories_holds_up_nothing_else(records: Records):
    began = asyncio.Event()

    async def since(number: int) -> list[Seen]:
        began.set()
        await asyncio.sleep(3600)
        return []

    records.since = since  # pyright: ignore[reportAttributeAccessIssue]
    async with hub_of(records).listen(None) as (_, listener):
        await began.wait()
        records.num_events = 3
        await until(listener, b'"e3"')
