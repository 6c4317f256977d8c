"""The buffer in Redis as it is stored: groups as bytes, every operation one Lua script.

    admit ─> slot ─> add (SET payload, then script) ─> ready ─> draw (script, then GETs) ─> lease
                                                         ^                                    │
                                                         └── release, expiry ─────────────────┤
                                                                            acknowledge ─> gone

A payload never passes through Lua, where it would be copied twice. It is set in front of the
script that takes it, to expire by itself; so a caller that dies between the two leaves nothing. A
drawn payload is read behind the script that leased it, and nobody else may remove it meanwhile.

redis_store.py adds encoding, checks and waiting. lua/base.lua is what every script starts with.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from leeway.replay.batches import Batches
from leeway.replay.callers import together
from leeway.replay.config import ReplayConfig
from leeway.replay.connection import Command, Link, ScriptSet
from leeway.replay.errors import ConfigurationError, StoreError
from leeway.replay.keys import replay_prefix
from leeway.replay.redis_replies import (
    AdmitReply,
    DrawReply,
    StatsReply,
    for_scripts,
    pairs,
    seconds,
    shape,
    to_record,
    to_stats,
)
from leeway.replay.schema import SCHEMA_VERSION, PolicyVersion
from leeway.replay.store import ReplayStats, Slot
from leeway.replay.stored import Drawn, Entry, Leased, StoredGroup
from leeway.replay.waiting import NO_ENGINE, Refusal, Shortage

T = TypeVar("T")

MAX_BATCH_BYTES: Final = 2**20
"""Payloads in front of one script that adds groups: enough of small ones that the script costs
each of them little, and no more, so that what many producers add goes over several connections."""

READ_BYTES: Final = 2**19
"""Of payloads that are read over one connection, about."""

MAX_READS: Final = 4
"""Connections over which the payloads of one draw are read."""

MAX_BATCH: Final = 256
"""Groups of one such script; callers of one that admits."""

MAX_BATCH_SLOTS: Final = 1000
"""Slots that one script is asked for, unless one caller asks for more."""

ORPHAN_MS: Final = 60_000
"""How long a payload lives whose script never came."""


Outcome = Literal["added", "dropped", "expired"]

OUTCOMES: Final[Mapping[bytes, Outcome]] = {
    b"added": "added",
    b"dropped": "dropped",
    b"expired": "expired",
}


class _Request(msgspec.Struct, frozen=True):
    """Slots that one caller asks for."""

    slot_ids: Sequence[str]
    version: PolicyVersion | None
    callers: Mapping[str, Any] | None


class RedisBuffer:
    """One shard. Nothing here waits but for Redis; every call is harmless to repeat."""

    def __init__(self, link: Link, run: str, config: ReplayConfig, shard: int = 0) -> None:
        self._link = link
        self.prefix = replay_prefix(run, shard)
        self._scripts = ScriptSet(link, self.prefix, is_of_buffer=True)
        self._limits = for_scripts(config)
        self._admitting = Batches(self._admit_all, MAX_BATCH_SLOTS, MAX_BATCH)
        self._adding = Batches(self._add_all, MAX_BATCH_BYTES, MAX_BATCH)
        self._num_read = 0
        """Bytes of the payloads of the last draw."""
        self._orphan_ms = int(config.slot_timeout_s * 1000) + ORPHAN_MS

    def admit(
        self,
        slot_ids: Sequence[str],
        version: PolicyVersion | None,
        callers: Mapping[str, Any] | None = None,
    ) -> asyncio.Future[list[Slot] | Refusal]:
        """Between 1 and all of the slots. `callers` is a report of callers.py, to be noted.

        What is asked for in the same turn of the event loop is asked by one script, and granted in
        the order in which it was asked.
        """
        return self._admitting.call(_Request(slot_ids, version, callers), len(slot_ids))

    async def _admit_all(
        self, batch: Sequence[_Request]
    ) -> list[list[Slot] | Refusal | StoreError]:
        """What was granted stays granted, whatever becomes of the others."""
        outcomes: dict[int, list[Slot] | Refusal | StoreError] = {}
        while waiting := [i for i in range(len(batch)) if i not in outcomes]:
            version = batch[waiting[0]].version
            asking = [i for i in waiting if batch[i].version == version]
            try:
                outcome = await self._admit_ids(
                    [slot_id for i in asking for slot_id in batch[i].slot_ids],
                    version,
                    together([batch[i].callers for i in asking]),
                )
            except StoreError as error:
                outcome = error
            if isinstance(outcome, Refusal | StoreError):
                outcomes |= dict.fromkeys(asking, outcome)
                continue
            granted = {slot.slot_id: slot for slot in outcome}
            for i in asking:
                slots = [granted[i] for i in batch[i].slot_ids if i in granted]
                if slots:
                    outcomes[i] = slots
        return [outcomes[i] for i in range(len(batch))]

    async def _admit_ids(
        self,
        slot_ids: Sequence[str],
        version: PolicyVersion | None,
        callers: Mapping[str, Any] | None,
    ) -> list[Slot] | Refusal:
        reply = await self._run(
            "admit",
            AdmitReply,
            slot_ids=slot_ids,
            version=NO_ENGINE if version is None else version,
            callers=callers,
        )
        if version is not None and reply.granted:
            return [Slot(slot_id, version) for slot_id in reply.granted]
        return Refusal(
            reason=reply.reason,
            version=version,
            learner_version=reply.learner_version,
            next_version=reply.next_version,
            num_groups=reply.num_groups,
            num_slots=reply.num_slots,
            num_bytes=reply.num_bytes,
            num_held_back=reply.num_held_back,
            largest=reply.largest,
            inserts=reply.inserts,
            samples=reply.samples,
            outstanding=pairs(reply.outstanding),
            expires_in_s=seconds(reply.expires_in_ms),
            signal=reply.signal,
        )

    def add(self, slot: Slot, entry: Entry) -> asyncio.Future[Outcome]:
        """Fill a slot. `dropped`: it holds tokens of a version that was lost in a crash.

        Groups that come in the same turn of the event loop go in by one script.
        """
        return self._adding.call((slot, entry), len(entry.payload))

    async def _add_all(self, batch: Sequence[tuple[Slot, Entry]]) -> list[Outcome | StoreError]:
        sets: list[Command] = [
            ("SET", self._payload(slot.slot_id), entry.payload, "NX", "PX", self._orphan_ms)
            for slot, entry in batch
        ]
        entries = [entry for _, entry in batch]
        outcomes: list[bytes] = await self._call(
            "add",
            sets,
            ids=[slot.slot_id for slot, _ in batch],
            versions=[slot.version for slot, _ in batch],
            sizes=[len(entry.payload) for entry in entries],
            oldest=[entry.oldest for entry in entries],
            newest=[entry.newest for entry in entries],
            priorities=[entry.priority for entry in entries],
            shapes=[shape(entry.trajectories) for entry in entries],
        )
        return [
            OUTCOMES.get(outcome)
            or StoreError(f"Redis took no payload for group {slot.slot_id}: {outcome.decode()}")
            for (slot, _), outcome in zip(batch, outcomes, strict=True)
        ]

    async def drop(self, slot: Slot, reason: str) -> None:
        """Give a slot back unfilled."""
        await self._call(
            "drop", id=slot.slot_id, version=slot.version, reason=reason, sets_limits=False
        )

    async def read(self, leased: Leased) -> Drawn:
        """The leased payloads; no bytes of one that is gone. As many bytes as last time are
        expected, which decides over how many connections they come."""
        gets = [("GET", self._payload(group_id)) for group_id in leased.ids]
        num_reads = min(MAX_READS, len(gets), -(-self._num_read // READ_BYTES))
        if num_reads < 2:
            payloads = await self._link.execute(*gets)
        else:
            size = -(-len(gets) // num_reads)
            parts = (gets[i : i + size] for i in range(0, len(gets), size))
            calls = (self._link.execute(*part, is_alone=True) for part in parts)
            payloads = [payload for part in await asyncio.gather(*calls) for payload in part]
        payloads = [payload or b"" for payload in payloads]
        self._num_read = sum(map(len, payloads))
        return Drawn(leased.version, leased.ramp_version, leased.ids, payloads)

    async def lease(
        self, lease_id: str, callers: Mapping[str, Any] | None = None
    ) -> Leased | Shortage:
        """Lease one step's groups; `callers` as in admit."""
        reply = await self._run(
            "draw",
            DrawReply,
            lease_id=lease_id,
            callers=callers,
        )
        if reply.ids:
            return Leased(lease_id, reply.version, reply.ramp_version, reply.ids)
        return Shortage(
            version=reply.version,
            missing=reply.missing,
            blocking_until=reply.blocking_until,
            is_limited=reply.is_limited,
            num_stored=reply.num_stored,
            largest=reply.largest,
            inserts=reply.inserts,
            samples=reply.samples,
            playing=pairs(reply.playing),
            awaited=reply.awaited,
            expires_in_s=seconds(reply.expires_in_ms),
            signal=reply.signal,
        )

    async def acknowledge(self, lease_id: str, version: int) -> Literal["ok", "expired"]:
        """The lease's groups were trained and made `version`."""
        reply: bytes = await self._call("acknowledge", lease_id=lease_id, version=version)
        return "ok" if reply == b"ok" else "expired"

    async def release(
        self, lease_id: str, counts: bool = True, unreadable: Sequence[str] = ()
    ) -> None:
        """Hand the lease's groups back; whether that counts against max_returns. Those that are
        `unreadable` are dropped."""
        await self._call(
            "release", lease_id=lease_id, counts=counts, unreadable=unreadable, sets_limits=False
        )

    async def update_priorities(self, priorities: Mapping[str, float]) -> int:
        """How many of the groups are stored."""
        if not priorities:
            return 0
        return await self._call(
            "update_priorities",
            ids=list(priorities),
            priorities=list(priorities.values()),
            sets_limits=False,
        )

    async def restore_version(self, version: int) -> int:
        """The learner resumed at `version`; how many groups and slots were dropped."""
        return await self._call("restore_version", version=version)

    async def pause(self, paused: bool) -> None:
        """Stop or resume granting slots."""
        await self._call("pause", paused=paused, sets_limits=False)

    async def end_wait(self, callers: Mapping[str, Any]) -> None:
        """A caller gave up waiting; the report is of those that are left."""
        await self._call("waited", callers=callers, sets_limits=False)

    async def stats(self) -> ReplayStats:
        """A snapshot, by one script."""
        # Without limits: somebody who looks must not set those of the run.
        packed: bytes = await self._call("stats", sets_limits=False)
        return to_stats(msgspec.msgpack.decode(packed, type=StatsReply))

    async def records(self) -> dict[str, StoredGroup]:
        """Every stored group's record by id, earliest arrival first."""
        flat: list[bytes] | dict[bytes, bytes] = (
            await self._link.execute(("HGETALL", f"{self.prefix}groups"))
        )[0]
        pairs = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
        records = {group_id.decode(): to_record(packed) for group_id, packed in pairs}
        return dict(sorted(records.items(), key=lambda item: item[1].arrival))

    async def payloads(self, ids: Sequence[str]) -> AsyncIterator[bytes | None]:
        """Encoded groups, None for one that is gone; a few are read at a time."""
        for start in range(0, len(ids), 16):
            gets = [("GET", self._payload(group_id)) for group_id in ids[start : start + 16]]
            for payload in await self._link.execute(*gets):
                yield None if payload is None else bytes(payload)

    async def put_back(
        self, group_id: str, record: StoredGroup, payload: bytes
    ) -> Literal["added", "held", "trained"]:
        """Store a group that was taken out of a buffer, unless one of its id is held or it was
        trained as often as today's limits allow.

        Raises StoreError if Redis took no payload.
        """
        put = ("SET", self._payload(group_id), payload, "NX", "PX", self._orphan_ms)
        reply: bytes = await self._call(
            "put_back",
            before=[put],
            id=group_id,
            version=record.version,
            newest=record.newest,
            draws=record.draws,
            returns=record.returns,
            priority=record.priority,
            shape=shape(record.trajectories),
        )
        if reply == b"no-payload":
            raise StoreError(f"Redis took no payload for group {group_id}")
        return "added" if reply == b"added" else "trained" if reply == b"trained" else "held"

    async def _run(self, name: str, type: type[T], **arguments: object) -> T:
        packed: bytes = await self._call(name, (), True, **arguments)
        return msgspec.msgpack.decode(packed, type=type)

    async def _call(
        self,
        name: str,
        before: Sequence[Command] = (),
        sets_limits: bool = True,
        **arguments: object,
    ) -> Any:
        """Run a script. Raises ConfigurationError where another program's layout or schema lies
        in the buffer.

        `sets_limits`: the buffer goes by those of this process from here on.
        """
        try:
            limits = self._limits if sets_limits else None
            return await self._scripts.run(
                name, before=before, limits=limits, schema=SCHEMA_VERSION, **arguments
            )
        except StoreError as error:
            found = re.search(r"(LAYOUT|SCHEMA) (\d+) (\d+)", str(error))
            if found is None:
                raise
            kind, theirs, ours = found.groups()
            what = "has layout" if kind == "LAYOUT" else "holds groups of schema version"
            raise ConfigurationError(
                f"the buffer {self.prefix} {what} {theirs} and this program reads {ours}; nothing "
                "was changed: go on with the version of Leeway that wrote it, or take another run "
                "name"
            ) from error

    def _payload(self, group_id: str) -> str:
        return f"{self.prefix}payload:{group_id}"
