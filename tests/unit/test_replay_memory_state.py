"""A buffer in memory that another one goes on from: what is drawn next is the same."""

from __future__ import annotations

import msgspec
import pytest

from leeway.replay.config import ReplayConfig
from leeway.replay.memory_buffer import BufferState
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.synthetic import build_group

EXACT = ReplayConfig(groups_per_step=2, max_staleness=2, staleness_policy="exact")
UNIFORM = ReplayConfig(groups_per_step=2, max_staleness=2, draw_by="uniform", max_draws=2)


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
