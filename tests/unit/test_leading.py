"""Of several that would move a run through its phases, one does."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress

import pytest

from leeway.replay import run_lead
from leeway.replay.board import RunBoard
from leeway.replay.errors import LeewayError
from leeway.replay.run_lead import LEAD_S, RunLead
from leeway.replay.server import EmbeddedRedis
from leeway.services.processes import leading
from leeway.services.processes.leading import BEAT_S, while_leading

AMPLE_S = 60


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
async def board(url: str) -> AsyncIterator[RunBoard]:
    found = RunBoard(url, f"test-{uuid.uuid4().hex}")
    yield found
    await found.close()


@pytest.fixture
def lead(board: RunBoard) -> RunLead:
    return board.lead


async def until(look: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(AMPLE_S):
        while True:
            seen = look()
            if seen is True or (not isinstance(seen, bool) and await seen):
                return
            await asyncio.sleep(0.01)


# --- the lead itself


async def test_the_first_that_takes_it_leads_and_the_second_hears_who(lead: RunLead):
    assert await lead.take("a") == "a"
    assert await lead.take("b") == "a"
    assert await lead.take("a") == "a"


async def test_who_is_silent_for_its_time_leads_no_longer(
    lead: RunLead, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_lead, "LEAD_S", 0.05)
    assert await lead.take("a") == "a"

    async def b_leads() -> bool:
        return await lead.take("b") == "b"

    await until(b_leads)


async def test_who_resigns_is_followed_at_once_and_others_cannot_resign_for_it(lead: RunLead):
    await lead.take("a")
    await lead.resign("b")
    assert await lead.take("b") == "a"
    await lead.resign("a")
    assert await lead.take("b") == "b"


async def test_two_runs_have_leaders_of_their_own(url: str, lead: RunLead):
    other = RunBoard(url, f"test-{uuid.uuid4().hex}")
    assert await lead.take("a") == "a"
    assert await other.lead.take("b") == "b"
    await other.close()


# --- what only the leader does


class Course:
    """Counts how often it is begun, and whether it goes on."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.is_going_on = False

    async def keep(self) -> None:
        self.num_begun += 1
        self.is_going_on = True
        try:
            await asyncio.Event().wait()
        finally:
            self.is_going_on = False


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.wait_for(task, AMPLE_S)


async def test_of_two_courses_the_second_begins_when_the_first_ends(
    lead: RunLead, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(leading, "BEAT_S", 0.02)
    first, second = Course(), Course()
    leads = asyncio.create_task(while_leading(lead, first.keep))
    await until(lambda: first.is_going_on)
    waits = asyncio.create_task(while_leading(lead, second.keep))
    await asyncio.sleep(0.3)
    assert (first.num_begun, second.num_begun) == (1, 0)
    await ended(leads)
    await until(lambda: second.is_going_on)
    assert not first.is_going_on
    await ended(waits)


async def test_a_course_that_lost_the_lead_stops_and_begins_again_when_it_leads(
    lead: RunLead, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(leading, "BEAT_S", 0.02)
    names: list[str] = []
    take = lead.take

    async def noted(name: str) -> str:
        names.append(name)
        return await take(name)

    monkeypatch.setattr(lead, "take", noted)
    course = Course()
    leads = asyncio.create_task(while_leading(lead, course.keep))
    await until(lambda: course.is_going_on)
    while await take("usurper") != "usurper":  # a beat may come between the two
        await lead.resign(names[0])
    await until(lambda: not course.is_going_on)
    await lead.resign("usurper")
    await until(lambda: course.is_going_on)
    assert course.num_begun == 2
    await ended(leads)


class SilentLead(RunLead):
    """Answers once, and then never: Redis is stopped or cut off."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def take(self, candidate: str) -> str:
        self.num_asked += 1
        if self.num_asked > 1:
            await asyncio.Event().wait()
        return candidate

    async def resign(self, candidate: str) -> None:
        await asyncio.Event().wait()


async def test_a_course_that_hears_nothing_stops_before_another_may_lead(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(leading, "BEAT_S", 0.02)
    monkeypatch.setattr(leading, "LEAD_S", 0.2)
    monkeypatch.setattr(leading, "RESIGN_S", 0.02)
    course = Course()
    leads = asyncio.create_task(while_leading(SilentLead(), course.keep))
    await until(lambda: course.num_begun == 1)
    await until(lambda: not course.is_going_on)
    await ended(leads)


async def test_what_ends_the_course_ends_the_wait_and_the_lead(lead: RunLead):
    async def fails() -> None:
        raise LeewayError("no worker")

    with pytest.raises(LeewayError, match="no worker"):
        await while_leading(lead, fails)
    assert await lead.take("next") == "next"


def test_a_lead_outlives_several_beats_that_are_missed():
    assert LEAD_S >= 4 * BEAT_S
