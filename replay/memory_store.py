"""The replay buffer in one process: for tests and single-process experiments.

Who waits for whom: `admit` and `draw` wait on one asyncio.Condition, which every change notifies;
they also wake when the nearest slot or lease expires. Nothing survives the process.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal

from leeway.replay.bounds import (
    check_fills,
    check_priorities,
    check_staleness,
    checked_number,
)
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import WaitTimeout
from leeway.replay.memory_buffer import Buffer, BufferState
from leeway.replay.schema import Group, GroupId, PolicyVersion, columns_of
from leeway.replay.store import Lease, ReplayStats, Slot, VersionSource, Waiting
from leeway.replay.stored import Drawn, entry_of, read_lease
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

RECHECK_S = 0.02
"""How often a waiting admission asks its version source again: it is outside the buffer, and no
event says that it moved."""


class MemoryReplay:
    """Replay over a Buffer. `clock` gives seconds and decides when slots and leases expire."""

    def __init__(self, config: ReplayConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._buffer = Buffer(config, clock)
        self._changed = asyncio.Condition()

    async def admit(
        self, n: int, version: PolicyVersion | VersionSource, timeout_s: float
    ) -> list[Slot]:
        """See Replay. A version source must not call this buffer: it is asked under its lock."""
        n = checked_number(n)
        wait, waiter = Wait(timeout_s), uuid.uuid4().hex
        was_open = False
        async with self._changed:
            try:
                while isinstance(granted := self._buffer.admit(n, await current(version)), Refusal):
                    is_told_to_stop = was_open and granted.reason == "paused"
                    was_open = granted.reason != "paused"
                    if wait.is_over or is_told_to_stop:
                        raise WaitTimeout(describe_refusal(granted, self.config, wait.elapsed_s))
                    left_s = wait.next_s(granted.expires_in_s)
                    self._buffer.note_wait(waiter, Waiting("rollout", granted.reason, 0.0))
                    await self._sleep(min(left_s, RECHECK_S) if callable(version) else left_s)
            finally:
                self._end(waiter, "room", wait)
        return granted

    async def add(self, slot: Slot, group: Group) -> None:
        """See Replay."""
        columns = columns_of(group)
        check_fills(slot, group, self.config, columns)
        async with self._changed:
            outcome = self._buffer.add(slot.slot_id, entry_of(group, columns))
            self._changed.notify_all()
        if outcome == "expired":
            raise slot_expired(slot, self.config)

    async def drop(self, slot: Slot, reason: str) -> None:
        """See Replay."""
        async with self._changed:
            self._buffer.drop(slot.slot_id, reason)
            self._changed.notify_all()

    async def draw(self, timeout_s: float) -> Lease:
        """See Replay. While a lease is held, the next draw is for the version after it."""
        wait = Wait(timeout_s)
        while True:
            lease_id, drawn = await self._draw_encoded(wait)
            try:
                lease = read_lease(lease_id, drawn, wait.split_s())
                if isinstance(lease, Lease):
                    check_staleness(lease, self.config)
                    return lease
            except BaseException:  # no fault of the groups: they go back as if not drawn
                await self._return(lease_id, counts=False)
                raise
            lease.log()
            async with self._changed:
                self._buffer.drop_unreadable(lease_id, lease.faults)
                self._changed.notify_all()

    async def _draw_encoded(self, wait: Wait) -> tuple[str, Drawn]:
        waiter = uuid.uuid4().hex
        async with self._changed:
            try:
                held_back = self._buffer.num_held_back
                while isinstance(drawn := self._buffer.draw(), Shortage):
                    if wait.is_over:
                        why = describe_shortage(drawn, self.config, wait.elapsed_s)
                        raise WaitTimeout(why, waited_s=wait.split_s())
                    self._buffer.note_wait(waiter, Waiting("learner", drawn.reason, 0.0))
                    if self._buffer.num_held_back != held_back:  # what is short may be admitted
                        held_back = self._buffer.num_held_back
                        self._changed.notify_all()
                    await self._sleep(wait.next_s(drawn.expires_in_s, drawn.reason))
            finally:
                self._end(waiter, "data", wait)
                self._changed.notify_all()  # a draw may have dropped groups, which makes room
        return drawn

    async def acknowledge(self, lease: Lease, version: PolicyVersion) -> None:
        """See Replay. Idempotent by lease id."""
        async with self._changed:
            outcome = self._buffer.acknowledge(lease.lease_id, version)
            self._changed.notify_all()
        if outcome == "expired":
            raise lease_expired(lease, self.config)

    async def release(self, lease: Lease) -> None:
        """See Replay."""
        await self._return(lease.lease_id, counts=True)

    async def withdraw(self, lease: Lease) -> None:
        """Hand the groups back as if they had not been drawn."""
        await self._return(lease.lease_id, counts=False)

    async def _return(self, lease_id: str, counts: bool) -> None:
        async with self._changed:
            self._buffer.reclaim()
            self._buffer.return_lease(lease_id, counts)
            self._changed.notify_all()

    async def update_priorities(self, priorities: Mapping[str, float]) -> int:
        """See Replay."""
        check_priorities(priorities)
        async with self._changed:
            return self._buffer.update_priorities(priorities)

    async def restore_version(self, version: PolicyVersion) -> int:
        """See Replay."""
        async with self._changed:
            num_dropped = self._buffer.restore_version(version)
            self._changed.notify_all()
        return num_dropped

    async def pause_admission(self, paused: bool) -> None:
        """See Replay."""
        async with self._changed:
            self._buffer.is_paused = paused
            self._changed.notify_all()

    async def stats(self) -> ReplayStats:
        """See Replay."""
        async with self._changed:
            return self._buffer.stats()

    async def group_ids(self) -> list[GroupId]:
        """See Replay."""
        return [GroupId(group_id) for group_id in self._buffer.order()]

    async def close(self) -> None:
        """See Replay. There is nothing to close."""

    def state(self) -> BufferState:
        """What it holds, for another buffer to go on from. No lease may be held."""
        return self._buffer.state()

    def go_on(self, state: BufferState) -> None:
        """Hold what another one held; nobody may have used this one yet."""
        self._buffer.go_on(state)

    async def _sleep(self, seconds: float) -> None:
        """Until notified or `seconds` have passed. The condition is held before and after."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def _end(self, waiter: str, name: Literal["room", "data"], wait: Wait) -> None:
        """Add a wait to its sum, once it is over. The first try is not waiting."""
        self._buffer.seconds[name] += wait.waited_s
        self._buffer.waits.pop(waiter, None)
