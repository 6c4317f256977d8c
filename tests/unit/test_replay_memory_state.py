"""A buffer in memory that another one goes on from: what is drawn next is the same."""

from __future__ import annotations

import msgspec
import pytest
from pydantic import ByteSize

from leeway.replay.config import ReplayConfig
from leeway.replay.memory_buffer import BufferState
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.synthetic import build_group

EXACT = ReplayConfig(groups_per_step=2, max_staleness=2, staleness_policy="exact")
UNIFORM = ReplayConfig(groups_per_step=2, max_staleness=2, draw_by="uniform", max_draws=2)
STANDING = ReplayConfig(groups_per_step=2, max_staleness=100, draw_by="uniform", lookahead="full")
DROP = ReplayConfig(
    groups_per_step=2, max_staleness=50, staleness_policy="drop", max_groups=12, evict_by="uniform"
)
BYTES = ReplayConfig(groups_per_step=2, max_staleness=50, max_bytes=ByteSize(40_000))


async def play(replay: MemoryReplay, version: int) -> None:
    """Two groups at this version."""
    for slot in await replay.admit(2, PolicyVersion(version), 1.0):
        await replay.add(slot, build_group(slot, version=version))


async def step(replay: MemoryReplay) -> list[str]:
    """The ids of a step that is drawn and trained."""
    lease = await replay.draw(1.0)
    await replay.acknowledge(lease, PolicyVersion(lease.version + 1))
    return [group.group_id for group in lease.groups]


def moved(replay: MemoryReplay, config: ReplayConfig) -> MemoryReplay:
    """Another buffer, by way of bytes."""
    other = MemoryReplay(config)
    encoded = msgspec.msgpack.encode(replay.state())
    other.go_on(msgspec.msgpack.decode(encoded, type=BufferState))
    return other


@pytest.mark.parametrize("config", [EXACT, UNIFORM])
async def test_the_next_steps_are_those_of_the_buffer_that_was_left(config: ReplayConfig):
    replay = MemoryReplay(config)
    # Under exact the ramp's draw at 0 wants the whole window: three steps' groups of version 0.
    for _ in range(3):
        await play(replay, 0)
    await step(replay)
    await play(replay, 1)
    other = moved(replay, config)
    assert await other.group_ids() == await replay.group_ids()
    assert [await step(other) for _ in range(1)] == [await step(replay) for _ in range(1)]
    before, after = await replay.stats(), await other.stats()
    assert after.learner_version == before.learner_version == 2
    assert (after.num_ready, after.num_bytes, after.num_trained) == (
        before.num_ready,
        before.num_bytes,
        before.num_trained,
    )
    # Under exact what comes is two versions old, as it would have been: the ramp is not begun anew.
    assert after.outstanding == before.outstanding


async def test_the_ramp_that_began_with_a_resumed_learner_goes_on():
    replay = MemoryReplay(EXACT)
    await replay.restore_version(PolicyVersion(3))
    for _ in range(3):
        await play(replay, 3)
    other = moved(replay, EXACT)
    first, second = await replay.draw(1.0), await other.draw(1.0)
    assert second.ramp_version == first.ramp_version == 3


class Numbered:
    """A buffer whose groups are told by the order in which they came; their ids are random."""

    def __init__(self, replay: MemoryReplay) -> None:
        self.replay = replay
        self.numbers: dict[str, int] = {}

    async def add(self, version: int) -> None:
        await play(self.replay, version)
        for group_id in await self.replay.group_ids():
            self.numbers.setdefault(group_id, len(self.numbers))

    async def held(self) -> list[int]:
        return [self.numbers[group_id] for group_id in await self.replay.group_ids()]

    def moved(self, config: ReplayConfig) -> Numbered:
        other = Numbered(moved(self.replay, config))
        other.numbers = dict(self.numbers)
        return other


async def test_the_order_of_uniform_draws_goes_on():
    """Groups that come later are put among those that are left, from where the draws have got."""
    buffers = [Numbered(MemoryReplay(STANDING))]
    for _ in range(5):
        await buffers[0].add(0)
    for version in range(20):
        await buffers[0].add(version)
        await step(buffers[0].replay)
    buffers.append(buffers[0].moved(STANDING))
    drawn: list[list[int]] = [[], []]
    for version in range(20, 30):
        for buffer, numbers in zip(buffers, drawn, strict=True):
            await buffer.add(version)
            numbers += [buffer.numbers[group_id] for group_id in await step(buffer.replay)]
    assert drawn[1] == drawn[0]


async def test_the_order_of_uniform_evictions_goes_on():
    buffers = [Numbered(MemoryReplay(DROP))]
    for _ in range(30):
        await buffers[0].add(0)
    await step(buffers[0].replay)  # what comes next needs no eviction
    buffers.append(buffers[0].moved(DROP))
    for _ in range(6):
        for buffer in buffers:
            await buffer.add(0)
    assert await buffers[1].held() == await buffers[0].held()


async def test_a_slot_still_counts_as_large_as_the_largest_group_there_was():
    replay = MemoryReplay(BYTES)
    (slot,) = await replay.admit(1, PolicyVersion(0), 1.0)
    await replay.add(slot, build_group(slot, num_tokens=1000))
    await play(replay, 0)
    await step(replay)  # the large one is gone with it
    other = moved(replay, BYTES)
    admitted = [len(await each.admit(100, PolicyVersion(1), 1.0)) for each in (replay, other)]
    assert admitted[0] == admitted[1] < 100


async def test_a_buffer_with_a_lease_has_no_such_state():
    replay = MemoryReplay(UNIFORM)
    await play(replay, 0)
    await replay.draw(1.0)
    with pytest.raises(AssertionError, match="under a lease"):
        replay.state()


async def test_a_buffer_that_is_used_goes_on_from_nothing():
    replay = MemoryReplay(UNIFORM)
    await play(replay, 0)
    with pytest.raises(AssertionError, match="in use"):
        replay.go_on(replay.state())
