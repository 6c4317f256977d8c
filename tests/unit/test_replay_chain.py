"""Who waits for whom, from stats to links."""

from __future__ import annotations

from typing import Any

import msgspec

from leeway.replay.chain import Seconds, chain, seconds_by_side
from leeway.replay.config import ReplayConfig
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.store import Held, ReplayStats, Waiting

SLOT = Held("slot", 4, 31.0, 89.0)
OLDER = Held("older", 4, 33.0, 87.0)
LEASE = Held("lease", 5, 7.0, 293.0, 16)


async def stats(**changes: Any) -> ReplayStats:
    empty = await MemoryReplay(ReplayConfig()).stats()
    return msgspec.structs.replace(empty, **changes)


async def test_a_learner_waits_for_the_slot_that_is_held_longest():
    found = chain(await stats(waits=(Waiting("learner", "missing", 12.0),), slots=(SLOT, OLDER)))
    assert [(w.waiter, w.awaited, w.held, w.since_s) for w in found] == [
        ("learner", "rollout", OLDER, 12.0)
    ]


async def test_rollouts_that_wait_for_the_same_are_one_link():
    waits = (Waiting("rollout", "window", 2.0), Waiting("rollout", "window", 9.0))
    (link,) = chain(await stats(waits=waits, leases=(LEASE,)))
    assert (link.num_waiting, link.since_s, link.awaited, link.held) == (2, 9.0, "learner", LEASE)


async def test_engines_and_the_operator_are_waited_for_by_name():
    waits = (Waiting("rollout", "engine-behind", 1.0), Waiting("rollout", "paused", 3.0))
    assert [w.awaited for w in chain(await stats(waits=waits))] == ["operator", "engines"]


async def test_two_sides_that_wait_for_each_other_and_hold_nothing_stand_still():
    waits = (Waiting("learner", "missing", 5.0), Waiting("rollout", "capacity", 4.0))
    assert [w.awaited for w in chain(await stats(waits=waits))] == ["nobody", "nobody"]


async def test_a_learner_alone_waits_for_rollouts_that_have_not_come_yet():
    (link,) = chain(await stats(waits=(Waiting("learner", "missing", 5.0),)))
    assert (link.awaited, link.held) == ("rollout", None)


async def test_seconds_of_both_sides_and_their_shares():
    sides = seconds_by_side(await stats(wait_room_s=3.0, play_s=9.0, wait_data_s=0.0))
    assert sides == {"rollout": Seconds(3.0, 9.0), "learner": Seconds(0.0, 0.0)}
    assert sides["rollout"].waiting_share == 0.25
    assert sides["learner"].waiting_share == 0.0
