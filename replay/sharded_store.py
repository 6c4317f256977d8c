"""A buffer of several shards, each a table of its own on another node of a Redis Cluster.

Every step takes an equal part from every shard, so each keeps the bounds for its part: of
groups_per_step 16 in 4 shards, each is a buffer of 4 groups a step with the same max_staleness, a
quarter of max_groups, max_bytes and the limiter's numbers. A call on one shard is atomic; a step is
not, across shards: a learner that dies between two acknowledgements leaves shards at two versions,
and restore_version, with which it resumes, brings them together.

Who waits for whom: as in redis_store.py, a caller of admit at the shard whose turn it is. Room in
another is noticed within RECHECK_S, and so is an engine with a newer version: it signals to the
first shard alone.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol, TypeVar

import msgspec

from leeway.replay.bounds import checked_number
from leeway.replay.config import ReplayConfig
from leeway.replay.connection import Link
from leeway.replay.errors import (
    ConfigurationError,
    LeaseExpired,
    LeewayError,
    NoAnswer,
    StoreUnavailable,
    WaitTimeout,
)
from leeway.replay.keys import replay_prefix
from leeway.replay.late import ANSWER_S
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import Group, GroupId, PolicyVersion
from leeway.replay.store import Lease, Replay, ReplayStats, Slot, VersionSource
from leeway.replay.waiting import Wait, added, current, lease_expired

K = TypeVar("K", int, str)

RECHECK_S: Final = 1.0
"""How long a caller waits at one shard before it asks the others again."""
HAND_BACK_S: Final = 1.0
"""How long a draw in vain goes on trying to hand back what single shards leased."""
REMEMBERED: Final = 64
"""Leases, newest, that can be acknowledged or released, also once more."""


def connect_replay(url: str, run: str, config: ReplayConfig, retry_s: float = 30.0) -> Replay:
    """The buffer of `run`. `retry_s` bounds how long a call is tried while Redis is silent."""
    if config.num_shards == 1:
        return RedisReplay(url, run, config, retry_s)
    of_shard = config.of_shard()
    shards = [RedisReplay(url, run, of_shard, retry_s, k) for k in range(config.num_shards)]
    return ShardedReplay(shards, config)


async def check_shards(url: str, run: str, num_shards: int, retry_s: float = 30.0) -> bool:
    """Whether Redis holds a buffer of `run`.

    Raises ConfigurationError if it has more than `num_shards` shards: what the others hold would
    never be drawn.
    """
    link = Link(url, retry_s)
    try:
        is_there, is_larger = [
            (await link.execute(("EXISTS", f"{replay_prefix(run, shard)}state")))[0]
            for shard in (0, num_shards)
        ]
    finally:
        await link.close()
    if is_larger:
        raise ConfigurationError(
            f"the buffer of {run} has more shards than num_shards = {num_shards}; give the "
            "configuration that it was made with"
        )
    return bool(is_there)


class Shard(Replay, Protocol):
    """A buffer that can also undo a draw."""

    async def withdraw(self, lease: Lease) -> None:
        """Hand the groups back as if they had not been drawn."""
        ...


class ShardedReplay:
    """Replay over shards."""

    def __init__(self, shards: Sequence[Shard], config: ReplayConfig) -> None:
        """`shards` are configured as `config.of_shard()` says."""
        self.config = config
        self._shards = shards
        self._turn = 0
        self._parts: dict[str, list[Lease]] = {}
        """What each shard leased of each lease."""
        self._live: set[str] = set()
        """Leases neither acknowledged nor released."""
        self._owed: list[tuple[Shard, Lease]] = []
        """What single shards leased of draws in vain, and have not taken back yet."""

    async def admit(
        self, n: int, version: PolicyVersion | VersionSource, timeout_s: float
    ) -> list[Slot]:
        """See Replay."""
        n = checked_number(n)
        wait = Wait(timeout_s)
        home = self._turn = (self._turn + 1) % len(self._shards)
        was_open = not await self._is_paused(home)
        while True:
            left_s = min(wait.next_s(None), RECHECK_S)
            try:
                return await self._admit_somewhere(n, version, home, left_s)
            except WaitTimeout:
                is_open = not await self._is_paused(home)
                if wait.is_over or (was_open and not is_open):
                    raise
                was_open = is_open

    async def _admit_somewhere(
        self, n: int, version: PolicyVersion | VersionSource, home: int, timeout_s: float
    ) -> list[Slot]:
        """From the shards that have room now, each its part, else from `home` when it has."""
        number = len(self._shards)
        now = await current(version)
        slots: list[Slot] = []
        for k in ((home + i) % number for i in range(number)):
            part = min(n - len(slots), -(-n // number))
            if now is None or part == 0:
                break
            try:
                slots += _placed(await self._shards[k].admit(part, now, 0.0), k)
            except WaitTimeout:
                continue
            except StoreUnavailable:
                if slots:  # somebody must play these; the next call hears of it
                    break
                raise
        return slots or _placed(await self._shards[home].admit(n, version, timeout_s), home)

    async def _is_paused(self, shard: int) -> bool:
        return (await self._shards[shard].stats()).admission_paused

    async def add(self, slot: Slot, group: Group) -> None:
        """See Replay."""
        await self._shards[slot.shard].add(slot, group)

    async def drop(self, slot: Slot, reason: str) -> None:
        """See Replay."""
        await self._shards[slot.shard].drop(slot, reason)

    async def draw(self, timeout_s: float) -> Lease:
        """See Replay. All shards or none."""
        wait = Wait(timeout_s)
        parts: list[Lease] = []
        await self._settle_debts(wait)
        try:
            for shard in self._shards:
                parts.append(await shard.draw(wait.next_s(None)))
            parts = await self._at_one_version(parts, wait)
        except BaseException:
            # The learner draws in slices: what came of one shard in vain counts as not drawn. A
            # shard that does not answer must not hold the call up, and gets it with the next one.
            self._owed += zip(self._shards, parts, strict=False)
            with suppress(LeewayError, TimeoutError):
                await self._hand_back(HAND_BACK_S)
            raise
        lease = Lease(
            uuid.uuid4().hex,
            parts[0].version,
            tuple(group for part in parts for group in part.groups),
            max(part.ramp_version for part in parts),
            added(*(part.waited_s for part in parts)),
        )
        # Without the groups, which the caller has.
        self._live.add(lease.lease_id)
        self._parts[lease.lease_id] = [msgspec.structs.replace(p, groups=()) for p in parts]
        if len(self._parts) > REMEMBERED:
            del self._parts[next(iter(self._parts))]
        return lease

    async def _settle_debts(self, wait: Wait) -> None:
        try:
            await self._hand_back(wait.left_s + ANSWER_S)
        except TimeoutError:
            raise NoAnswer(
                f"no answer from Redis in {wait.elapsed_s:.1f} s; waiting for shards that are to "
                "take back what they leased for an earlier draw"
            ) from None

    async def _hand_back(self, timeout_s: float) -> None:
        async def hand_back(owed: tuple[Shard, Lease]) -> None:
            shard, part = owed
            await shard.withdraw(part)
            if owed in self._owed:  # else a draw beside this one has handed it back, too
                self._owed.remove(owed)

        if self._owed:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*map(hand_back, self._owed))

    async def _at_one_version(self, parts: list[Lease], wait: Wait) -> list[Lease]:
        """A shard whose last step was not acknowledged draws again, for the others' version.

        Raises LeaseExpired where another lease is in hand: one shard's part of it has ended.
        """
        newest = max(part.version for part in parts)
        for k, shard in enumerate(self._shards):
            if parts[k].version != newest:
                if self._live:
                    raise LeaseExpired(
                        f"shard {k} draws for version {parts[k].version} and another for {newest}: "
                        "its part of the lease before has expired; release that and draw again"
                    )
                await shard.withdraw(parts[k])
                await shard.restore_version(newest)
                parts[k] = await shard.draw(wait.next_s(None))
        return parts

    async def acknowledge(self, lease: Lease, version: PolicyVersion) -> None:
        """See Replay. Where one shard's lease has ended, the others' groups count as trained."""
        parts = self._parts.get(lease.lease_id)
        if parts is None:
            raise lease_expired(lease, self.config)
        self._live.discard(lease.lease_id)
        pairs = zip(self._shards, parts, strict=True)
        calls = [shard.acknowledge(part, version) for shard, part in pairs]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def release(self, lease: Lease) -> None:
        """See Replay."""
        self._live.discard(lease.lease_id)
        pairs = zip(self._shards, self._parts.pop(lease.lease_id, []), strict=False)
        await asyncio.gather(*(shard.release(part) for shard, part in pairs))

    async def update_priorities(self, priorities: Mapping[str, float]) -> int:
        """See Replay."""
        calls = [shard.update_priorities(priorities) for shard in self._shards]
        return sum(await asyncio.gather(*calls))

    async def restore_version(self, version: PolicyVersion) -> int:
        """See Replay."""
        self._parts.clear()
        self._live.clear()
        self._owed.clear()  # no lease outlives this
        return sum(await asyncio.gather(*(s.restore_version(version) for s in self._shards)))

    async def pause_admission(self, paused: bool) -> None:
        """See Replay."""
        await asyncio.gather(*(shard.pause_admission(paused) for shard in self._shards))

    async def stats(self) -> ReplayStats:
        """See Replay. One snapshot of each shard, added up."""
        return _sum(await asyncio.gather(*(shard.stats() for shard in self._shards)))

    async def group_ids(self) -> list[GroupId]:
        """See Replay: of each shard, one shard after the other."""
        lists = await asyncio.gather(*(shard.group_ids() for shard in self._shards))
        return [group_id for of_shard in lists for group_id in of_shard]

    async def close(self) -> None:
        """See Replay."""
        with suppress(LeewayError, TimeoutError):
            await self._hand_back(HAND_BACK_S)
        await asyncio.gather(*(shard.close() for shard in self._shards))


def _placed(slots: Iterable[Slot], shard: int) -> list[Slot]:
    return [msgspec.structs.replace(slot, shard=shard) for slot in slots]


def _sum(parts: Sequence[ReplayStats]) -> ReplayStats:
    """Counts and seconds added up; the learner is as far as the shard furthest behind.

    It trains while the last shard's lease is held: the others' begin while it still waits for more,
    and there is one for every shard.
    """
    numbers = {
        name: sum(getattr(part, name) for part in parts)
        for name in ReplayStats.__struct_fields__
        if name.startswith("num_") or (name.endswith("_s") and name != "train_s")
    }
    return ReplayStats(
        **numbers,
        train_s=parts[-1].train_s,
        learner_version=min(part.learner_version for part in parts),
        admission_paused=any(part.admission_paused for part in parts),
        dropped=_merged(part.dropped for part in parts),
        dropped_turns=_merged_tables(part.dropped_turns for part in parts),
        dropped_tokens=_merged_tables(part.dropped_tokens for part in parts),
        outstanding=dict(sorted(_merged(part.outstanding for part in parts).items())),
        waits=tuple(wait for part in parts for wait in part.waits),
        slots=tuple(slot for part in parts for slot in part.slots),
        leases=tuple(lease for part in parts for lease in part.leases),
    )


def _merged(counts: Iterable[Mapping[K, int]]) -> dict[K, int]:
    total: Counter[K] = Counter()
    for part in counts:
        total.update(part)
    return dict(total)


def _merged_tables(
    tables: Iterable[Mapping[str, Mapping[int, int]]],
) -> dict[str, dict[int, int]]:
    rows: dict[str, list[Mapping[int, int]]] = {}
    for table in tables:
        for reason, row in table.items():
            rows.setdefault(reason, []).append(row)
    return {reason: dict(sorted(_merged(row).items())) for reason, row in rows.items()}
