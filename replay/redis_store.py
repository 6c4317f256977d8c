"""The replay buffer in Redis: redis_buffer.py, with encoding, checks and waiting.

Who waits for whom: `admit` waits for the stream `room`, which acknowledge, drop, release, expiry,
restore, pause, under a limiter or an adaptive lookahead draw (also one that finds too few), and (on
the policy board) an engine with a newer version write to. `draw` waits for the stream `data`,
written by an add that makes a step full, by drop, release, expiry, restore and acknowledge. A
waiter also wakes when the nearest slot or lease expires, since expiry happens inside whichever
script runs next. Counters come from Redis, limits from this process's configuration.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

from leeway.replay.allocator import keep_freed_memory
from leeway.replay.bounds import (
    check_fills,
    check_priorities,
    check_staleness,
    checked_number,
)
from leeway.replay.callers import Callers
from leeway.replay.config import ReplayConfig
from leeway.replay.connection import Link
from leeway.replay.errors import LeewayError, NoAnswer, WaitTimeout
from leeway.replay.late import Given, Late
from leeway.replay.portions import Portions
from leeway.replay.redis_buffer import RedisBuffer
from leeway.replay.schema import Group, GroupId, PolicyVersion, columns_of
from leeway.replay.store import Lease, ReplayStats, Slot, VersionSource
from leeway.replay.stored import Drawn, Leased, entry_of, read_lease
from leeway.replay.turns import Turns
from leeway.replay.waiting import (
    Refusal,
    Shortage,
    Wait,
    current,
    describe_refusal,
    describe_shortage,
    lease_expired,
    slot_expired,
)
from leeway.replay.wakeups import Wakeups

PORTION_BYTES: Final = 2**20
"""Of groups that are encoded before those done are sent: Redis takes them while others follow."""

RECHECK_S: Final = 1.0
"""How often a waiting admission asks its version source again. An engine that moves on wakes it
sooner; one that dies makes no event."""


class RedisReplay:
    """Replay over Redis. One instance serves many callers of one event loop."""

    def __init__(
        self, url: str, run: str, config: ReplayConfig, retry_s: float = 30.0, shard: int = 0
    ) -> None:
        """`retry_s` bounds how long a call is tried again while Redis does not answer. One with a
        deadline ends ANSWER_S of late.py after it."""
        keep_freed_memory()
        self.config = config
        self._link = Link(url, retry_s)
        self.buffer = RedisBuffer(self._link, run, config, shard)
        self._encoding = Portions(PORTION_BYTES)
        self._rollouts, self._learners = Callers("rollout"), Callers("learner")
        self._room = Wakeups(self._link, f"{self.buffer.prefix}room")
        self._data = Wakeups(self._link, f"{self.buffer.prefix}data")
        self._admitting: Turns[list[Slot], Refusal] = Turns(self._room, Refusal)
        self._drawing: Turns[Leased, Shortage] = Turns(self._data, Shortage)
        self._late_slots: Late[list[Slot], Refusal] = Late(
            self._link, Refusal, config.slot_timeout_s, self._leave_slots
        )
        self._late_draws: Late[tuple[str, Drawn], Shortage] = Late(
            self._link, Shortage, config.lease_timeout_s, lambda drawn: self._undo(drawn[0])
        )

    async def admit(
        self, n: int, version: PolicyVersion | VersionSource, timeout_s: float
    ) -> list[Slot]:
        """See Replay. The slot ids are made here, so a repeated request is granted once."""
        n = checked_number(n)
        wait, callers = Wait(timeout_s), self._rollouts
        was_open = False
        try:
            while True:
                now = await current(version)
                granted = await self._late_slots.ask(
                    lambda now=now: partial(
                        self._ask_for_slots, _new_ids(n), now, wait, timeout_s > 0
                    ),
                    wait,
                )
                if isinstance(granted, Given):
                    callers.end(wait)
                    slots, asked_s = granted
                    if slots[n:]:
                        self._late_slots.keep(Given(slots[n:], asked_s))
                    return slots[:n]
                is_told_to_stop = was_open and granted.reason == "paused"
                was_open = granted.reason != "paused"
                if wait.is_over or is_told_to_stop:
                    raise WaitTimeout(describe_refusal(granted, self.config, wait.elapsed_s))
                left_s = wait.next_s(granted.expires_in_s)
                callers.begin(wait)
                left_s = min(left_s, RECHECK_S) if callable(version) else left_s
                await self._room.wait(granted.signal, left_s)
        except NoAnswer:
            callers.end(wait)  # and no word of it to Redis
            raise
        finally:
            await self._give_up(callers, wait)

    async def _ask_for_slots(
        self, slot_ids: list[str], version: PolicyVersion | None, wait: Wait, is_patient: bool
    ) -> list[Slot] | Refusal:
        """One try. A caller that will not wait for the next signal asks itself."""
        if not is_patient:
            return await self.buffer.admit(slot_ids, version)

        async def attempt() -> list[Slot] | Refusal:
            return await self.buffer.admit(slot_ids, version, self._rollouts.report(wait))

        return await self._admitting.do(
            attempt, was_woken=wait.waited_s > 0, would_be=lambda r: r.version == version
        )

    async def add(self, slot: Slot, group: Group) -> None:
        """See Replay."""
        await self._encoding.turn()
        columns = columns_of(group)
        check_fills(slot, group, self.config, columns)
        entry = entry_of(group, columns)
        self._encoding.spend(len(entry.payload))
        if await self.buffer.add(slot, entry) == "expired":
            raise slot_expired(slot, self.config)

    async def drop(self, slot: Slot, reason: str) -> None:
        """See Replay."""
        await self.buffer.drop(slot, reason)

    async def draw(self, timeout_s: float) -> Lease:
        """See Replay. While a lease is held, the next draw is for the version after it."""
        wait = Wait(timeout_s)
        while True:
            lease_id, drawn = await self.draw_encoded(timeout_s, wait)
            async with self._undone_by_an_error(lease_id):
                lease = read_lease(lease_id, drawn, wait.split_s())
                if isinstance(lease, Lease):
                    check_staleness(lease, self.config)
                    return lease
            lease.log()
            await self.buffer.release(lease_id, counts=False, unreadable=list(lease.faults))

    async def draw_encoded(self, timeout_s: float, wait: Wait | None = None) -> tuple[str, Drawn]:
        """A lease's id and its groups as they are stored; waits and raises as `draw` does."""
        wait, callers = wait or Wait(timeout_s), self._learners

        try:
            while True:
                drawn = await self._late_draws.ask(
                    lambda: partial(self._lease, uuid.uuid4().hex, wait, timeout_s > 0), wait
                )
                if isinstance(drawn, Given):
                    callers.end(wait)
                    return drawn.granted
                if wait.is_over:
                    why = describe_shortage(drawn, self.config, wait.elapsed_s)
                    raise WaitTimeout(why, waited_s=wait.split_s())
                left_s = wait.next_s(drawn.expires_in_s, drawn.reason)
                callers.begin(wait)
                await self._data.wait(drawn.signal, left_s)
        except NoAnswer as silence:
            callers.end(wait)  # and no word of it to Redis
            raise NoAnswer(str(silence), waited_s=wait.split_s()) from None
        finally:
            await self._give_up(callers, wait)

    async def _lease(
        self, lease_id: str, wait: Wait, is_patient: bool
    ) -> tuple[str, Drawn] | Shortage:
        """One try. A caller that will not wait for the next signal asks itself."""

        async def attempt() -> Leased | Shortage:
            return await self.buffer.lease(lease_id, self._learners.report(wait))

        was_woken = wait.waited_s > 0
        leased = await (
            self._drawing.do(attempt, was_woken=was_woken)
            if is_patient
            else self.buffer.lease(lease_id)
        )
        if isinstance(leased, Shortage):
            return leased
        wait.split_s()  # what follows is reading
        async with self._undone_by_an_error(lease_id):
            return lease_id, await self.buffer.read(leased)

    async def acknowledge(self, lease: Lease, version: PolicyVersion) -> None:
        """See Replay. Idempotent by lease id."""
        if await self.buffer.acknowledge(lease.lease_id, version) == "expired":
            raise lease_expired(lease, self.config)

    async def release(self, lease: Lease) -> None:
        """See Replay."""
        await self.buffer.release(lease.lease_id)

    async def withdraw(self, lease: Lease) -> None:
        """Hand the groups back as if they had not been drawn."""
        await self.buffer.release(lease.lease_id, counts=False)

    async def update_priorities(self, priorities: Mapping[str, float]) -> int:
        """See Replay."""
        check_priorities(priorities)
        return await self.buffer.update_priorities(priorities)

    async def restore_version(self, version: PolicyVersion) -> int:
        """See Replay."""
        return await self.buffer.restore_version(version)

    async def pause_admission(self, paused: bool) -> None:
        """See Replay."""
        await self.buffer.pause(paused)

    async def stats(self) -> ReplayStats:
        """See Replay."""
        return await self.buffer.stats()

    async def group_ids(self) -> list[GroupId]:
        """See Replay."""
        return [GroupId(group_id) for group_id in await self.buffer.records()]

    async def close(self) -> None:
        """See Replay. What was granted and nobody came for goes back, if Redis answers."""
        for lease_id, _ in await self._late_draws.close():
            await self._undo(lease_id)
        with suppress(LeewayError, TimeoutError):
            async with asyncio.timeout(1.0):
                for slots in await self._late_slots.close():
                    await asyncio.gather(*(self.drop(slot, "shutdown") for slot in slots))
        await self._room.close()
        await self._data.close()
        await self._link.close()

    @asynccontextmanager
    async def _undone_by_an_error(self, lease_id: str) -> AsyncGenerator[None]:
        """What fails between a lease and its hand-over is no fault of the groups: they go back as
        if they had not been drawn. Where Redis does not answer either, they do when it expires. A
        caller that leaves is no failure: see late.py."""
        try:
            yield
        except Exception:
            await self._undo(lease_id)
            raise

    async def _leave_slots(self, slots: list[Slot]) -> None:
        """Nothing is in them: what has not run out yet soon has."""

    async def _undo(self, lease_id: str) -> None:
        with suppress(LeewayError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self.buffer.release(lease_id, counts=False)

    async def _give_up(self, callers: Callers, wait: Wait) -> None:
        """Note that a caller waits no longer, unless its success has. Only a statistic: it must
        not hide why the call ended, nor hold it up."""
        if callers.end(wait):
            with suppress(LeewayError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.buffer.end_wait(callers.report())


def _new_ids(n: int) -> list[str]:
    """Of 128 random bits each, all asked of the system at once."""
    digits = os.urandom(16 * n).hex()
    return [digits[i : i + 32] for i in range(0, 32 * n, 32)]
