"""The last trajectories: each once, for whoever asks, and none lost to an error."""

from __future__ import annotations

import numpy as np
import pytest

from leeway.replay.archive_buffer import Placed
from leeway.replay.codec import encode
from leeway.replay.errors import StoreUnavailable
from leeway.replay.schema import Group, GroupId, Trajectory, Turn
from leeway.services.api import recent
from leeway.services.api.recent import MAX_AT_ONCE, RecentGroups
from leeway.services.config import load


def payload_of(name: str) -> bytes:
    trajectory = Trajectory(
        trajectory_id=f"{name}-0",
        token_ids=np.array([1, 2, 3], np.int32),
        turns=(Turn(1, 2, 0, "answer"),),
        logprobs=np.full(2, -0.5, np.float32),
        versions=np.full(2, 4, np.int32),
        reward=1.0,
        stop_reason="answer",
        scores={"exact_match": 1.0},
        duration_s=2.0,
    )
    return encode(
        Group(
            group_id=GroupId(name),
            question_id="q",
            worker_id="worker-0",
            trajectories=(trajectory,),
        )
    )


class Buffer:
    """Groups by name; `errors` are raised by the next reads of a payload."""

    def __init__(self, *names: str) -> None:
        self.groups = {name: payload_of(name) for name in names}
        self.errors: list[Exception] = []

    async def records(self) -> list[Placed]:
        return [Placed(0, name, None) for name in self.groups]  # pyright: ignore[reportArgumentType]

    async def payload(self, placed: Placed) -> bytes | None:
        if self.errors:
            raise self.errors.pop()
        return self.groups.get(placed.group_id)


@pytest.fixture(autouse=True)
def every_look_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "LOOK_S", 0.0)


def recent_of(buffer: Buffer) -> RecentGroups:
    return RecentGroups(buffer, load(None))


async def ids_since(groups: RecentGroups, number: int) -> list[str]:
    return [seen.item.trajectory_id for seen in await groups.since(number)]


async def test_a_page_that_is_read_takes_nothing_from_who_follows():
    groups = recent_of(Buffer("a", "b"))
    await groups.look()
    assert [item.trajectory_id for item in groups.page(None, 10)[0]] == ["b-0", "a-0"]
    assert await ids_since(groups, 0) == ["a-0", "b-0"]
    assert await ids_since(groups, 1) == ["b-0"]
    assert await ids_since(groups, groups.num_seen) == []


async def test_a_group_that_could_not_be_read_is_read_at_the_next_look():
    buffer = Buffer("a", "b")
    groups = recent_of(buffer)
    buffer.errors = [StoreUnavailable("away")]
    with pytest.raises(StoreUnavailable):
        await groups.look()
    assert await ids_since(groups, 0) == ["a-0", "b-0"]


async def test_a_group_of_broken_bytes_is_left_out_and_those_behind_it_are_not():
    buffer = Buffer("a", "b")
    buffer.groups["a"] = b"broken"
    groups = recent_of(buffer)
    assert await ids_since(groups, 0) == ["b-0"]
    assert await ids_since(groups, 0) == ["b-0"]


async def test_of_many_new_groups_the_oldest_are_passed_over_for_good():
    names = [f"g{number:02}" for number in range(MAX_AT_ONCE + 2)]
    groups = recent_of(Buffer(*names))
    newest = [f"{name}-0" for name in names[2:]]
    assert await ids_since(groups, 0) == newest
    assert await ids_since(groups, 0) == newest
