"""Random calls to each store, beside a model of a few dicts that knows what must be true.

Every run of the tests makes the same calls. LEEWAY_SEED=7 makes others, LEEWAY_SEED=random new ones
each time; a failure shows the seed.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import uuid
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import redis
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from leeway.replay.codec import encode
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import DataError, LeaseExpired, SlotExpired, WaitTimeout
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.store import Replay, Slot
from leeway.replay.synthetic import build_group
from tests.chaos.replay_ledger import (
    LEASE_S,
    SLOT_S,
    Played,
    Stored,
    Trained,
    configs,
    scripts_on_our_clock,
    set_clock,
)
from tests.integration.replay_model import LimitedModel

T = TypeVar("T")

RUN_OF_CALLS = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.generate],  # a shorter example would take longer than a test may
)

TIGHT = [
    ReplayConfig.model_validate(
        {
            "groups_per_step": 2,
            "max_staleness": 2,
            "max_groups": 9,
            "max_draws": 3,
            "max_returns": 1,
            "slot_timeout_s": SLOT_S,
            "lease_timeout_s": LEASE_S,
            "staleness_policy": policy,
            **limits,
        }
    )
    for policy in ("pace", "drop")
    for limits in (
        {"limiter": "queue", "queue_size": 3},
        {"limiter": "sample-to-insert", "samples_per_insert": 1.0, "error_buffer": 2.0},
        {"limiter": "sample-to-insert", "samples_per_insert": 1.5, "error_buffer": 3.0},
    )
]
"""Limiters that hold back both sides before any other bound does, which settings at random seldom
do: a group may be trained three times, and they let it be once or one and a half times."""


def run_with_seed(machine: type[RuleBasedStateMachine]) -> None:
    given = os.environ.get("LEEWAY_SEED", "0")
    number = random.randrange(2**32) if given == "random" else int(given)
    print(f"LEEWAY_SEED={number}")
    run_state_machine_as_test(seed(number)(machine), settings=RUN_OF_CALLS)


class MemoryMachine(RuleBasedStateMachine):
    """Calls to MemoryReplay on a clock of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.model: LimitedModel
        self.replay: Replay

    def open(self) -> Replay:
        return MemoryReplay(self.model.config, clock=lambda: self.model.now_s)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(coroutine, 20))

    @initialize(config=st.one_of(configs(), st.sampled_from(TIGHT)))
    def begin(self, config: ReplayConfig) -> None:
        self.model = LimitedModel(config, most_draws=config.max_draws)
        self.replay = self.open()

    @rule(n=st.integers(1, 5), lag=st.sampled_from([0, 0, 0, 1, 2, -1]))
    def admit(self, n: int, lag: int) -> None:
        lag = max(lag, 0) if not self.model.leases else lag  # ahead while a step is on its way
        self.try_to_admit(n, max(0, self.model.learner - lag))

    def try_to_admit(self, n: int, version: int) -> str:
        """Why nothing was admitted, "" if something was."""
        m, words, slots = self.model, "", list[Slot]()
        if m.config.staleness_policy == "drop":
            m.drop_overdue()
        num_before = len(m.slots) + len(m.groups)
        try:
            slots = self.call(self.replay.admit(n, PolicyVersion(version), 0))
            assert 1 <= len(slots) <= n
            assert m.may_insert(len(slots)), "the limiter holds so many back"
        except WaitTimeout as refusal:
            words = str(refusal)
            assert m.may_refuse(words, version), words
        evicted = [i for i in m.free() if i not in self.call(self.replay.group_ids())]
        # Other policies let go only what was trained before. Nothing is let go in vain.
        may_go = [i for i in evicted if m.groups[i].draws]
        assert m.config.staleness_policy == "drop" or may_go == evicted
        m.forget(evicted, "evicted")
        if evicted:
            is_full = num_before + len(slots) > m.config.max_groups
            assert slots and (is_full or m.config.max_bytes)
        for slot in slots:
            m.slots[slot.slot_id] = Played(slot, m.now_s + SLOT_S)
        m.num["admitted"] += len(slots)
        if slots:
            m.check_window(version)
        return words

    @precondition(lambda self: self.model.slots)
    @rule(
        pick=st.integers(0, 99),
        later=st.sampled_from([0, 0, 1]),
        span=st.sampled_from([0, 0, 1, 2]),
        num_tokens=st.integers(8, 160),
        times=st.integers(1, 2),
    )
    def add(self, pick: int, later: int, span: int, num_tokens: int, times: int) -> None:
        """Its tokens begin `later` versions after the slot's and go over `span` versions more."""
        m = self.model
        held = list(m.slots.values())[pick % len(m.slots)]
        oldest, newest = held.slot.version + later, held.slot.version + later + span
        group = build_group(held.slot, oldest, num_tokens=num_tokens, seed=pick, newest=newest)
        if m.config.staleness_policy == "exact" and newest > held.slot.version:
            with pytest.raises(DataError, match="exact staleness"):
                self.call(self.replay.add(held.slot, group))
            return
        for _ in range(times):
            self.call(self.replay.add(held.slot, group))
        m.end_slot(held.slot.slot_id)
        m.added.add(held.slot.slot_id)
        if newest > held.ceiling:
            m.count_dropped("lost-version", num_tokens)
            return
        m.num["added"] += 1
        m.inserts += 1
        version = oldest if m.config.staleness_policy == "drop" else held.slot.version
        m.groups[held.slot.slot_id] = Stored(version, newest, len(encode(group)), tokens=num_tokens)

    @precondition(lambda self: self.model.past_slots)
    @rule(pick=st.integers(0, 99))
    def add_to_a_slot_that_is_over(self, pick: int) -> None:
        slot = self.model.past_slots[pick % len(self.model.past_slots)]
        if slot.slot_id in self.model.added:
            self.call(self.replay.add(slot, build_group(slot)))
        else:
            with pytest.raises(SlotExpired):
                self.call(self.replay.add(slot, build_group(slot)))

    @precondition(lambda self: self.model.slots)
    @rule(pick=st.integers(0, 99), times=st.integers(1, 2))
    def drop(self, pick: int, times: int) -> None:
        slot_id = list(self.model.slots)[pick % len(self.model.slots)]
        held = self.model.end_slot(slot_id)
        self.model.dropped["test"] += 1
        for _ in range(times):
            self.call(self.replay.drop(held.slot, "test"))

    @rule()
    def draw(self) -> None:
        self.try_to_draw()

    def try_to_draw(self) -> str:
        """Why nothing was drawn, "" if a step was."""
        m, c = self.model, self.model.config
        m.drop_overdue()
        if c.staleness_policy == "exact":
            m.drop_mixed()
        free = m.free()
        try:
            lease = self.call(self.replay.draw(0))
        except WaitTimeout as shortage:
            wanted = c.window if c.staleness_policy == "exact" else c.groups_per_step
            is_awaited = bool(m.slots) and c.staleness_policy != "drop"
            assert len(free) < wanted or is_awaited or not m.may_sample(), shortage
            return str(shortage)
        assert m.may_sample(), "the limiter holds the step back"
        assert lease.version == m.next_version
        held = Trained(lease, m.now_s + LEASE_S)
        assert len(set(held.ids)) == c.groups_per_step
        assert set(held.ids) <= set(free), "a group is under one lease at most"
        assert all(lease.version - g.oldest_version <= c.max_staleness for g in lease.groups)
        assert all(m.groups[i].draws < c.max_draws for i in held.ids)
        m.leases[lease.lease_id] = held
        m.samples += c.groups_per_step
        m.num["drawn"] += c.groups_per_step
        return ""

    @rule(n=st.integers(1, 9), num_draws=st.integers(1, 3), gives_back=st.booleans())
    def go_on(self, n: int, num_draws: int, gives_back: bool) -> None:
        """A stretch to where bounds hold: single calls seldom come that far."""
        self.hand_in_everything()
        self.try_to_admit(n, self.model.learner)
        self.hand_in_everything()
        for _ in range(num_draws):
            if not self.try_to_draw() and gives_back:
                self.release(pick=-1, times=1)
                self.try_to_draw()
            self.hand_in_everything()

    @precondition(lambda self: self.model.leases)
    @rule(pick=st.sampled_from([0, 0, 0, 0, 1]), times=st.integers(1, 2))
    def acknowledge(self, pick: int, times: int) -> None:
        held = list(self.model.leases.values())[pick % len(self.model.leases)]
        version = PolicyVersion(self.model.learner + 1)
        for _ in range(times):
            self.call(self.replay.acknowledge(held.lease, version))
        self.model.acknowledge(held.lease.lease_id, version)

    @precondition(lambda self: self.model.past_leases)
    @rule(pick=st.integers(0, 99))
    def acknowledge_a_lease_that_is_over(self, pick: int) -> None:
        lease = self.model.past_leases[pick % len(self.model.past_leases)]
        acknowledging = self.replay.acknowledge(lease, PolicyVersion(self.model.learner + 1))
        if lease.lease_id in self.model.acknowledged:
            self.call(acknowledging)
        else:
            with pytest.raises(LeaseExpired):
                self.call(acknowledging)

    @precondition(lambda self: self.model.leases)
    @rule(pick=st.sampled_from([-1, -1, -1, 0]), times=st.integers(1, 2))
    def release(self, pick: int, times: int) -> None:
        held = list(self.model.leases.values())[pick]
        for _ in range(times):
            self.call(self.replay.release(held.lease))
        self.model.return_lease(held.lease.lease_id)

    @rule(priorities=st.lists(st.floats(0, 9), max_size=4))
    def update_priorities(self, priorities: list[float]) -> None:
        named = dict(zip([*self.model.groups, "unknown"], priorities, strict=False))
        found = self.call(self.replay.update_priorities(named))
        assert found == len(named.keys() & self.model.groups.keys())

    @rule(back=st.integers(-1, 2), is_meant=st.booleans())
    def restore_version(self, back: int, is_meant: bool) -> None:
        if is_meant:
            version = max(0, self.model.learner - back)
            dropped = self.call(self.replay.restore_version(PolicyVersion(version)))
            assert dropped == self.model.restore(version)

    @rule(quarters=st.sampled_from([1, 1, 2, 4, 13]))
    def let_time_pass(self, quarters: int) -> None:
        self.model.let_time_pass(quarters / 4)
        self.show_time()

    @precondition(lambda self: self.model.slots or self.model.leases)
    @rule(which=st.sampled_from(["slot", "lease"]), late_s=st.sampled_from([-0.25, 0.0, 0.0]))
    def let_one_run_out(self, which: str, late_s: float) -> None:
        """To the very moment at which the next slot or lease ends, or just before it."""
        m = self.model
        held = [*(m.slots if which == "slot" or not m.leases else m.leases).values()]
        ends_s = min((one.expires_s for one in held), default=m.now_s)
        m.let_time_pass(max(0.0, ends_s + late_s - m.now_s))
        self.show_time()

    def show_time(self) -> None:
        """The store sees the model's time at once."""

    @invariant()
    def counters_agree_and_nothing_acknowledged_is_lost(self) -> None:
        m, stats = self.model, self.call(self.replay.stats())
        assert set(self.call(self.replay.group_ids())) == set(m.groups)
        free = m.free()
        assert (stats.num_ready, stats.num_leased) == (len(free), len(m.groups) - len(free))
        assert stats.num_bytes == sum(group.size for group in m.groups.values())
        assert {held.id for held in stats.slots} == set(m.slots) and stats.num_slots == len(m.slots)
        assert {held.id for held in stats.leases} == set(m.leases)
        untrained = [group.version for group in m.groups.values() if group.draws == 0]
        playing = [held.slot.version for held in m.slots.values()]
        assert stats.outstanding == Counter(untrained + playing)
        assert stats.learner_version == m.learner
        assert stats.dropped == +m.dropped
        lengths = {(r, n): k for r, row in stats.dropped_tokens.items() for n, k in row.items()}
        assert lengths == m.dropped_lengths
        in_turns = Counter[str]()
        for (reason, _), count in m.dropped_lengths.items():
            in_turns[reason] += count
        assert stats.dropped_turns == {reason: {2: count} for reason, count in in_turns.items()}
        names = ("admitted", "added", "drawn", "trained", "slots_expired", "leases_expired")
        assert [getattr(stats, f"num_{name}") for name in names] == [m.num[name] for name in names]
        assert all(n <= m.most_draws for n in m.num_trained_of.values())

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.steps_go_on_when_everyone_does_its_part()
                self.nothing_is_left_when_everything_is_drained()
        finally:
            if hasattr(self, "replay"):
                self.call(self.replay.close())
            self.runner.close()

    def steps_go_on_when_everyone_does_its_part(self) -> None:
        """Workers add what they play and the learner trains; a limit that forbids it is named."""
        num_steps, words = 0, list[str]()
        while num_steps < 3 and len(words) < 9:
            self.hand_in_everything()
            refusal = self.try_to_admit(9, self.model.learner)
            self.hand_in_everything()
            shortage = self.try_to_draw()
            num_steps += not shortage
            # More than once may be: a draw that finds groups overdue makes room by dropping them.
            words = [*words, f"{refusal}; {shortage}"] if shortage else []
        assert num_steps == 3 or "raise max_bytes" in words[-1], f"both sides wait: {words[-1]}"

    def hand_in_everything(self) -> None:
        while self.model.slots:
            self.add(pick=0, later=0, span=0, num_tokens=40, times=1)
        while self.model.leases:
            self.acknowledge(pick=0, times=1)

    def nothing_is_left_when_everything_is_drained(self) -> None:
        self.let_time_pass(quarters=13)
        beyond = PolicyVersion(self.model.learner + 9)
        assert self.call(self.replay.restore_version(beyond)) == self.model.restore(beyond)
        assert self.try_to_draw()
        self.counters_agree_and_nothing_acknowledged_is_lost()
        assert not self.model.groups and not self.model.slots and not self.model.leases


class RedisMachine(MemoryMachine):
    """The same calls to RedisReplay, which is opened again now and then, with other limits or on a
    server that ended or was killed."""

    servers: ClassVar[list[EmbeddedRedis]]

    def __init__(self) -> None:
        super().__init__()
        self.admin: Any = redis.Redis.from_url(self.servers[-1].admin_url)
        self.run_name = f"test-{uuid.uuid4().hex}"
        self.num_restarts = 0

    def open(self) -> Replay:
        set_clock(self.admin, self.model.now_s)
        return RedisReplay(self.servers[-1].url, self.run_name, self.model.config)

    @precondition(lambda self: self.num_restarts < 2)
    @rule(end=st.sampled_from(["store", "server", "kill"]))
    def restart(self, end: str) -> None:
        self.num_restarts += 1
        self.call(self.replay.close())
        if end != "store":
            server = self.servers[-1]
            # Every reply came after its fsync (appendfsync always), so a crash loses nothing.
            (server.kill if end == "kill" else server.stop)()
            self.servers.append(EmbeddedRedis.start(server.directory))
        self.replay = self.open()

    @precondition(lambda self: self.num_restarts < 2)
    @rule(config=configs())
    def resume_with_other_limits(self, config: ReplayConfig) -> None:
        self.num_restarts += 1
        self.call(self.replay.close())
        dropped = self.model.go_by(config)
        self.replay = self.open()
        version = PolicyVersion(self.model.learner)
        assert self.call(self.replay.restore_version(version)) == dropped

    def show_time(self) -> None:
        set_clock(self.admin, self.model.now_s)

    @invariant()
    def keys_agree(self) -> None:
        """The sums in the state against the data they sum."""
        m, db, prefix = self.model, self.admin, f"leeway:{{{self.run_name}}}:"
        assert isinstance(self.replay, RedisReplay)
        records = self.call(self.replay.buffer.records())
        stored = {i: db.strlen(f"{prefix}payload:{i}") for i in records}
        assert stored == {i: record.size for i, record in records.items()}
        facts = {i: (g.version, g.size, g.draws, g.returns) for i, g in m.groups.items()}
        assert facts == {i: (r.version, r.size, r.draws, r.returns) for i, r in records.items()}
        for key in db.scan_iter(f"{prefix}payload:*"):
            is_stored = key.decode().removeprefix(f"{prefix}payload:") in records
            assert (db.ttl(key) == -1) == is_stored, "what no record knows expires by itself"
        c, num_free = m.config, len(m.free())
        has_pick = c.draw_by != "fifo" or c.max_draws > 1
        is_dropping = c.staleness_policy == "drop"
        has_evict = (is_dropping or c.max_draws > 1) and c.evict_by != "fifo"
        num_evictable = sum(is_dropping or m.groups[i].draws > 0 for i in m.free())
        sizes = [db.zcard(f"{prefix}{name}") for name in ("pick", "evict", "slots", "leases")]
        ranked = [num_free * has_pick, num_evictable * has_evict]
        assert sizes == [*ranked, len(m.slots), len(m.leases)]
        assert db.zcard(f"{prefix}ready") + db.zcard(f"{prefix}again") == num_free
        assert db.hlen(f"{prefix}lease") == len(m.leases)
        members = db.zrange(f"{prefix}slots", 0, -1)
        held = {member.decode().partition(" ")[0] for member in members}
        assert {slot_id.decode() for slot_id in db.hkeys(f"{prefix}ceilings")} <= held

    def teardown(self) -> None:
        super().teardown()
        self.admin.flushdb()
        self.admin.close()


@pytest.mark.timeout(900)
def test_memory_keeps_every_rule_under_random_calls():
    run_with_seed(MemoryMachine)


@pytest.mark.timeout(900)
def test_redis_keeps_every_rule_under_random_calls_and_restarts(tmp_path: Path):
    with scripts_on_our_clock(), EmbeddedRedis.start(tmp_path) as server:
        RedisMachine.servers = [server]
        try:
            run_with_seed(RedisMachine)
        finally:
            RedisMachine.servers[-1].stop()


async def test_a_group_of_two_versions_goes_when_a_run_resumes_under_exact(tmp_path: Path):
    pace = ReplayConfig(groups_per_step=1, max_staleness=1, max_groups=8)
    exact = ReplayConfig.model_validate(
        pace.model_dump() | {"staleness_policy": "exact", "lookahead": None}
    )
    with EmbeddedRedis.start(tmp_path) as server:
        before, after = (RedisReplay(server.url, "run", config) for config in (pace, exact))
        await before.restore_version(PolicyVersion(1))
        (slot,) = await before.admit(1, PolicyVersion(0), 0)
        await before.add(slot, build_group(slot, newest=1))
        await before.close()
        assert await after.restore_version(PolicyVersion(1)) == 0
        with pytest.raises(WaitTimeout):
            await after.draw(0)
        stats = await after.stats()
        assert (stats.dropped, stats.num_ready) == ({"mixed-versions": 1}, 0)
        await after.close()


async def test_a_limiter_of_a_resumed_run_begins_with_what_the_buffer_holds(tmp_path: Path):
    """What the one before let in and out would hold it back for ever: two groups drawn twice make
    four samples of two inserts, and under `queue` a step needs an insert for each sample."""
    often = ReplayConfig(
        groups_per_step=2,
        max_draws=3,
        max_groups=8,
        limiter="sample-to-insert",
        samples_per_insert=2.0,
        error_buffer=6.0,
    )
    queue = ReplayConfig(groups_per_step=2, max_staleness=0, limiter="queue", queue_size=2)
    with EmbeddedRedis.start(tmp_path) as server:
        before, after = (RedisReplay(server.url, "run", config) for config in (often, queue))
        for slot in await before.admit(2, PolicyVersion(0), 0):
            await before.add(slot, build_group(slot))
        for version in (1, 2):
            await before.acknowledge(await before.draw(0), PolicyVersion(version))
        unfinished = await before.draw(0)
        await before.close()
        assert len(unfinished.groups) == 2
        await after.restore_version(PolicyVersion(2))
        for version in (2, 3, 4):
            for slot in await after.admit(2, PolicyVersion(version), 0):
                await after.add(slot, build_group(slot))
            await after.acknowledge(await after.draw(0), PolicyVersion(version + 1))
        assert (await after.stats()).num_trained == 4 + 6
        await after.close()
