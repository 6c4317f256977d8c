"""Redis and memory give the same answers to the same calls."""

from __future__ import annotations

import itertools
import random
import re
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest
import redis

from leeway.replay.config import ReplayConfig
from leeway.replay.errors import SlotExpired, WaitTimeout
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.store import Lease, Replay, Slot
from leeway.replay.synthetic import build_group
from tests.chaos.replay_ledger import scripts_on_our_clock, set_clock


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as running:
        yield running


class Twins:
    """The same calls to both stores. Slots and leases are named by their order."""

    def __init__(self, url: str, seed: int, settings: dict[str, Any]) -> None:
        config = ReplayConfig.model_validate(
            {
                "groups_per_step": 2,
                "max_staleness": 2,
                "max_groups": 9,
                "max_returns": 1,
                "lookahead": "full",
                **settings,
            }
        )
        self.is_exact = config.staleness_policy == "exact"
        self.is_adaptive = config.is_adaptive
        run = f"test-{uuid.uuid4().hex}"
        self.stores: tuple[Replay, Replay] = (RedisReplay(url, run, config), MemoryReplay(config))
        self.rng = random.Random(seed)
        self.learner = 0
        self.held_back: list[int] = []
        self.slots: list[tuple[Slot, Slot]] = []
        self.leases: list[tuple[Lease, Lease]] = []
        self.names: dict[str, int] = {}

    async def both(self, call: Callable[[int, Replay], Awaitable[Any]]) -> tuple[Any, Any] | None:
        """Results of both, or None when both refused with the same words."""
        results = [await self.attempt(call(i, store)) for i, store in enumerate(self.stores)]
        if any(isinstance(result, Exception) for result in results):
            assert _words(results[0]) == _words(results[1])
            return None
        return results[0], results[1]

    async def attempt(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except (WaitTimeout, SlotExpired) as error:
            return error

    def weights(self) -> tuple[float, float, float]:
        """Of draws, acknowledgements and releases. A learner that is slow and then fast has groups
        held back and given back."""
        if not self.is_adaptive:
            return 5, 5, 2
        return (2, 5, 0.5) if self.learner % 30 < 20 else (15, 9, 0.5)

    async def step(self) -> None:
        kinds = ("admit", "add", "prioritise", "drop", "draw", "finish", "release", "restore")
        await getattr(self, self.rng.choices(kinds, (5, 10, 1, 1, *self.weights(), 0.3))[0])()
        redis_stats, memory_stats = [await store.stats() for store in self.stores]
        even = dict.fromkeys(("wait_room_s", "play_s", "wait_data_s", "train_s"), 0.0)
        even |= {"slots": (), "leases": ()}
        assert msgspec.structs.replace(redis_stats, **even) == msgspec.structs.replace(
            memory_stats, **even
        )
        self.learner = memory_stats.learner_version
        self.held_back.append(memory_stats.num_held_back)

    async def admit(self) -> None:
        lag = self.rng.choice((0, 0, 0, 1, -1)) if self.is_exact else self.rng.randint(0, 3)
        version = PolicyVersion(max(0, self.learner - lag))
        n = self.rng.randint(1, 4)
        granted = await self.both(lambda i, store: store.admit(n, version, 0))
        pairs = list(zip(*granted, strict=True)) if granted else []
        for pair in pairs:
            number = len(self.names) // 2
            self.names |= {slot.slot_id: number for slot in pair}
        self.slots += pairs

    async def add(self) -> None:
        if self.slots:
            pair = self.slots.pop(self.rng.randrange(len(self.slots)))
            newest = pair[0].version + (0 if self.is_exact else self.rng.randint(0, 1))
            shape = (self.rng.randint(1, 3), 8 * self.rng.randint(1, 20), self.rng.randint(0, 9))
            await self.both(
                lambda i, store: store.add(pair[i], build_group(pair[i], newest, *shape))
            )

    async def prioritise(self) -> None:
        numbers = {number: self.rng.random() for number in self.rng.sample(range(40), 5)}
        priorities = [
            {i: numbers[n] for i, n in self.names.items() if n in numbers and i in ids}
            for ids in [set(await store.group_ids()) for store in self.stores]
        ]
        found = await self.both(lambda i, store: store.update_priorities(priorities[i]))
        assert found is not None and found[0] == found[1] == len(priorities[0])

    async def drop(self) -> None:
        if self.slots:
            pair = self.slots.pop()
            await self.both(lambda i, store: store.drop(pair[i], "test"))

    async def draw(self) -> None:
        drawn = await self.both(lambda i, store: store.draw(0))
        if drawn:
            assert drawn[0].version == drawn[1].version
            assert drawn[0].ramp_version == drawn[1].ramp_version
            # Groups are named by when they were admitted.
            arrivals = [[self.names[g.group_id] for g in lease.groups] for lease in drawn]
            assert arrivals[0] == arrivals[1]
            self.leases.append(drawn)

    async def finish(self) -> None:
        if self.leases:
            pair, version = self.leases.pop(0), PolicyVersion(self.learner + 1)
            await self.both(lambda i, store: store.acknowledge(pair[i], version))

    async def release(self) -> None:
        if self.leases:
            pair = self.leases.pop(self.rng.randrange(len(self.leases)))
            await self.both(lambda i, store: store.release(pair[i]))

    async def restore(self) -> None:
        version = PolicyVersion(max(0, self.learner - self.rng.randint(0, 2)))
        dropped = await self.both(lambda i, store: store.restore_version(version))
        assert dropped is not None and dropped[0] == dropped[1]
        self.leases.clear()


SETTINGS: dict[str, dict[str, Any]] = {
    "pace": {},
    "exact": {"staleness_policy": "exact"},
    "pace adaptive": {
        "lookahead": "adaptive",
        "groups_per_step": 1,
        "max_staleness": 9,
        "max_groups": 20,
    },
    "pace adaptive bounded": {
        "lookahead": "adaptive",
        "groups_per_step": 1,
        "max_staleness": 9,
    },
    "pace again": {"max_draws": 2, "draw_by": "freshest"},
    "pace evicting": {"max_draws": 3, "max_groups": 6, "max_staleness": 9, "evict_by": "uniform"},
    "pace uniform": {"draw_by": "uniform", "seed": 3},
    "pace queue": {"limiter": "queue", "queue_size": 3, "max_bytes": 6000},
    "drop": {"staleness_policy": "drop", "max_bytes": 9000},
    "drop prioritised": {
        "staleness_policy": "drop",
        "draw_by": "prioritised",
        "evict_by": "uniform",
        "max_draws": 3,
    },
    "drop lifo": {
        "staleness_policy": "drop",
        "draw_by": "lifo",
        "evict_by": "prioritised",
        "limiter": "sample-to-insert",
        "samples_per_insert": 0.5,
        "error_buffer": 3,
    },
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("seed", [1, 2])
async def test_redis_and_memory_agree_on_random_sequences_of_calls(server, seed, settings):
    twins = Twins(server.url, seed, settings)
    await twins.admit()  # in Redis limits are those of the last caller that has some
    for _ in range(500 if twins.is_exact else 1000 if twins.is_adaptive else 250):
        await twins.step()
    assert twins.learner > 5
    changes = [after - before for before, after in itertools.pairwise(twins.held_back)]
    is_both = min(changes) < 0 < max(changes)
    assert is_both or not twins.is_adaptive, "some were held back, and some admitted again"
    for store in twins.stores:
        await store.close()


async def test_a_draw_that_goes_on_waiting_has_more_admitted_every_five_seconds(server):
    """A window of 10 groups, of which a new buffer admits 5; a step is 1."""
    config = ReplayConfig(groups_per_step=1, max_staleness=9, lookahead="adaptive")
    now_s = 0.0
    with scripts_on_our_clock(), redis.Redis.from_url(server.admin_url) as admin:
        set_clock(admin, now_s)
        run = f"test-{uuid.uuid4().hex}"
        stores: tuple[Replay, ...] = (
            RedisReplay(server.url, run, config),
            MemoryReplay(config, clock=lambda: now_s),
        )
        seen: list[list[int]] = [[], []]
        for store in stores:
            with pytest.raises(WaitTimeout):
                await store.draw(0)  # the first of all finds none, which says nothing
            (slot,) = await store.admit(1, PolicyVersion(0), 0)
            await store.add(slot, build_group(slot))
            lease = await store.draw(0)
            await store.acknowledge(lease, PolicyVersion(1))
        for now_s in (1.0, 2.0, 5.75, 6.0, 6.25, 11.0):
            set_clock(admin, now_s)
            for store, held_back in zip(stores, seen, strict=True):
                with pytest.raises(WaitTimeout, match="0 are ready"):
                    await store.draw(0)
                held_back.append((await store.stats()).num_held_back)
        # The first try at 1 s: one is missing. Then at 6 and at 11 s.
        assert seen == [[4, 4, 4, 3, 3, 2]] * 2
        for store in stores:
            await store.close()


def _words(result: object) -> str:
    """What was said, without ids and seconds."""
    return re.sub(r"\b[0-9a-f]{32}\b|in [0-9.]+ s", "", repr(result))
