"""The replay buffer in Redis. Every operation is one Lua script; lua/base.lua is their base.

Who waits for whom: `admit` waits for the stream `room`, which acknowledge, drop, release, expiry,
restore, pause and (on the policy board) an engine with a newer version write to. `draw` waits for
the stream `data`, written by add, drop, release, expiry, restore and acknowledge. A waiter also
wakes when the nearest slot or lease expires, since expiry happens inside whichever script runs
next. Counters come from Redis, limits from this process's configuration.
"""

from __future__ import annotations

import uuid
from typing import Final

import msgspec

from leeway.replay.bounds import check_fills, check_staleness, newest_version
from leeway.replay.codec import decode, encode
from leeway.replay.config import ReplayConfig
from leeway.replay.connection import Link, ScriptSet
from leeway.replay.errors import WaitTimeout
from leeway.replay.keys import replay_keys
from leeway.replay.schema import Group, GroupId, PolicyVersion
from leeway.replay.store import Lease, RefusalReason, ReplayStats, Slot, VersionSource
from leeway.replay.waiting import (
    NO_ENGINE,
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

PRELUDE: Final = ("rule", "base")
"""What every script of the buffer starts with."""

RECHECK_S: Final = 1.0
"""How often a waiting admission asks its version source again. An engine that moves on wakes it
sooner; one that dies makes no event."""


class _AdmitReply(msgspec.Struct):
    granted: list[str] = []
    reason: RefusalReason = "window"
    learner_version: int = 0
    next_version: int = 0
    num_groups: int = 0
    outstanding: list[int] = []
    expires_in_ms: float | None = None


class _DrawReply(msgspec.Struct):
    version: int
    ramp_version: int = 0
    ids: list[str] = []
    missing: int = 0
    blocking_until: int | None = None
    playing: list[int] = []
    awaited: list[str] = []
    expires_in_ms: float | None = None


class _StatsReply(msgspec.Struct):
    state: list[str]
    dropped: list[str]
    outstanding: list[int]
    num_slots: int
    num_ready: int
    num_stored: int


class RedisReplay:
    """Replay over Redis. One instance serves many callers of one event loop."""

    def __init__(self, url: str, run: str, config: ReplayConfig, retry_s: float = 30.0) -> None:
        """`retry_s` bounds how long a call is tried again while Redis does not answer."""
        self.config = config
        self._keys = replay_keys(run)
        self._link = Link(url, retry_s)
        self._scripts = ScriptSet(self._link, self._keys, PRELUDE)
        self._room = Wakeups(self._link, self._keys.room)
        self._data = Wakeups(self._link, self._keys.data)

    async def admit(
        self, n: int, version: PolicyVersion | VersionSource, timeout_s: float
    ) -> list[Slot]:
        """See Replay. The slot ids are made here, so a repeated request is granted once."""
        slot_ids = [uuid.uuid4().hex for _ in range(n)]
        wait = Wait(timeout_s)
        was_open = False
        while True:
            seen = self._room.seen
            granted = await self._try_admit(slot_ids, await current(version))
            if not isinstance(granted, Refusal):
                await self._record("wait_room_s", wait)
                return granted
            is_told_to_stop = was_open and granted.reason == "paused"
            was_open = granted.reason != "paused"
            if wait.is_over or is_told_to_stop:
                await self._record("wait_room_s", wait)
                raise WaitTimeout(describe_refusal(granted, self.config, wait.elapsed_s))
            left_s = wait.next_s(granted.expires_in_s)
            await self._room.wait(seen, min(left_s, RECHECK_S) if callable(version) else left_s)

    async def add(self, slot: Slot, group: Group) -> None:
        """See Replay."""
        check_fills(slot, group, self.config)
        reply = await self._scripts.run(
            "add", encode(group), id=group.group_id, newest=newest_version(group)
        )
        if reply == b"expired":
            raise slot_expired(slot, self.config)

    async def drop(self, slot: Slot, reason: str) -> None:
        """See Replay."""
        await self._scripts.run("drop", id=slot.slot_id, reason=reason)

    async def draw(self, timeout_s: float) -> Lease:
        """See Replay. While a lease is held, the next draw is for the version after it."""
        lease_id = uuid.uuid4().hex
        wait = Wait(timeout_s)
        while True:
            seen = self._data.seen
            lease = await self._try_draw(lease_id)
            if isinstance(lease, Lease):
                await self._record("wait_data_s", wait)
                check_staleness(lease, self.config)
                return lease
            if wait.is_over:
                await self._record("wait_data_s", wait)
                raise WaitTimeout(describe_shortage(lease, self.config, wait.elapsed_s))
            await self._data.wait(seen, wait.next_s(lease.expires_in_s))

    async def acknowledge(self, lease: Lease, version: PolicyVersion) -> None:
        """See Replay. Idempotent by lease id."""
        reply = await self._scripts.run("acknowledge", lease_id=lease.lease_id, version=version)
        if reply == b"expired":
            raise lease_expired(lease, self.config)

    async def release(self, lease: Lease) -> None:
        """See Replay."""
        await self._scripts.run("release", lease_id=lease.lease_id)

    async def restore_version(self, version: PolicyVersion) -> int:
        """See Replay."""
        return await self._scripts.run("restore_version", version=version)

    async def pause_admission(self, paused: bool) -> None:
        """See Replay."""
        await self._scripts.run("pause", paused=paused)

    async def stats(self) -> ReplayStats:
        """See Replay."""
        packed = await self._scripts.run("stats")
        return _to_stats(msgspec.msgpack.decode(packed, type=_StatsReply))

    async def group_ids(self) -> list[GroupId]:
        """See Replay."""
        ids = await self._link.call(lambda: self._link.client.zrange(self._keys.order, 0, -1))
        return [GroupId(group_id.decode()) for group_id in ids]

    async def close(self) -> None:
        """See Replay."""
        await self._room.close()
        await self._data.close()
        await self._link.close()

    async def _try_admit(
        self, slot_ids: list[str], version: PolicyVersion | None
    ) -> list[Slot] | Refusal:
        packed = await self._scripts.run(
            "admit",
            slot_ids=slot_ids,
            version=NO_ENGINE if version is None else version,
            max_staleness=self.config.max_staleness,
            staleness_policy=self.config.staleness_policy,
            groups_per_step=self.config.groups_per_step,
            max_groups=self.config.max_groups,
            slot_timeout_ms=int(self.config.slot_timeout_s * 1000),
        )
        reply = msgspec.msgpack.decode(packed, type=_AdmitReply)
        if version is not None and reply.granted:
            return [Slot(slot_id, version) for slot_id in reply.granted]
        return Refusal(
            reason=reply.reason,
            version=version,
            learner_version=reply.learner_version,
            next_version=reply.next_version,
            num_groups=reply.num_groups,
            outstanding=_pairs(reply.outstanding),
            expires_in_s=_seconds(reply.expires_in_ms),
        )

    async def _try_draw(self, lease_id: str) -> Lease | Shortage:
        head, *payloads = await self._scripts.run(
            "draw",
            lease_id=lease_id,
            max_staleness=self.config.max_staleness,
            staleness_policy=self.config.staleness_policy,
            groups_per_step=self.config.groups_per_step,
            max_draws=self.config.max_draws,
            lease_timeout_ms=int(self.config.lease_timeout_s * 1000),
        )
        reply = msgspec.msgpack.decode(head, type=_DrawReply)
        if payloads:
            groups = tuple(decode(payload) for payload in payloads)
            version, ramp_version = PolicyVersion(reply.version), PolicyVersion(reply.ramp_version)
            return Lease(lease_id, version, groups, ramp_version)
        return Shortage(
            version=reply.version,
            missing=reply.missing,
            blocking_until=reply.blocking_until,
            playing=_pairs(reply.playing),
            awaited=reply.awaited,
            expires_in_s=_seconds(reply.expires_in_ms),
        )

    async def _record(self, field: str, wait: Wait) -> None:
        """Add a wait to its sum, once it is over. The first try is not waiting."""
        if wait.waited_s:
            waited_s = wait.waited_s
            await self._link.call(
                lambda: self._link.client.hincrbyfloat(self._keys.state, field, waited_s)
            )


def _to_stats(reply: _StatsReply) -> ReplayStats:
    state = dict(zip(reply.state[::2], reply.state[1::2], strict=True))
    dropped = zip(reply.dropped[::2], reply.dropped[1::2], strict=True)

    def number(name: str) -> int:
        return int(state.get(name, 0))

    return ReplayStats(
        learner_version=PolicyVersion(number("learner_version")),
        num_slots=reply.num_slots,
        num_ready=reply.num_ready,
        num_leased=reply.num_stored - reply.num_ready,
        num_bytes=number("num_bytes"),
        admission_paused=state.get("paused") == "1",
        num_admitted=number("num_admitted"),
        num_added=number("num_added"),
        num_drawn=number("num_drawn"),
        num_trained=number("num_trained"),
        num_slots_expired=number("num_slots_expired"),
        num_leases_expired=number("num_leases_expired"),
        dropped={reason: int(n) for reason, n in dropped},
        outstanding=_pairs(reply.outstanding),
        wait_room_s=float(state.get("wait_room_s", 0)),
        wait_data_s=float(state.get("wait_data_s", 0)),
    )


def _pairs(flat: list[int]) -> dict[int, int]:
    """[4, 1, 5, 3] -> {4: 1, 5: 3}"""
    return dict(sorted(zip(flat[::2], flat[1::2], strict=True)))


def _seconds(milliseconds: float | None) -> float | None:
    """Two milliseconds late, so that the expiry is past when the next script asks the clock."""
    return None if milliseconds is None else max(milliseconds + 2, 2) / 1000
