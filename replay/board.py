"""The policy board: which engines live, what the learner publishes, and how each engine fared.

    learner    engines() -> announce(a) -> reports(.., "ready") -> form the group
               -> reports(.., "joined") -> send [-> report(.., "sent")] -> reports(.., "committed")
    engine     heartbeat(record) every few seconds; next_announcement(seen) -> report(..) per stage

The learner waits for the stream of reports of one publish, an engine for the stream of
announcements; both block in Redis. `RunBoard`, the run-wide state, is in run_board.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final, Literal

import msgspec

from leeway.replay.connection import BLOCK_MS, Link, ScriptSet, stream_entries
from leeway.replay.errors import WaitTimeout
from leeway.replay.keys import board_keys
from leeway.replay.memory_handle import MemoryHandle
from leeway.replay.run_board import Event, RunBoard
from leeway.replay.schema import PolicyVersion

__all__ = [
    "LEARNER",
    "Announcement",
    "EngineRecord",
    "EngineReport",
    "Event",
    "PolicyBoard",
    "RunBoard",
    "Stage",
    "TensorSpec",
    "Transport",
]

PUBLISHES_KEPT: Final = 16
"""Announcements that stay, and publishes whose reports do. They are not left to expire: a clock set
forward would take those that somebody waits for."""

Transport = Literal["direct", "nccl", "gloo"]
"""What carries the bytes. direct: the learner copies them into memory that the engines of its
machine expose. Else a broadcast: NCCL from GPU to GPU, gloo from host memory to host memory."""

Stage = Literal["ready", "joined", "sent", "committed", "failed"]
"""How far a publish is. An engine lives and can load what the manifest lists, is in the transfer
group, uses the new weights; or it gave up. `sent` is what the learner says of a direct transfer."""

_PROGRESS: Final[dict[Stage, int]] = {
    "ready": 1,
    "joined": 2,
    "sent": 3,
    "committed": 4,
    "failed": 5,
}

LEARNER: Final = "learner"
"""In place of an engine's id, where the learner reports."""


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of a publish."""

    name: str
    dtype: str
    """Name without `torch.`, such as bfloat16."""
    shape: list[int]


class EngineRecord(msgspec.Struct, frozen=True):
    """A living engine."""

    engine_id: str
    num_ranks: int
    """Processes that join a transfer group."""
    dtype: str
    """Of its weights, such as bfloat16."""
    gpus: list[str]
    """UUIDs of the GPUs its ranks compute on; none on CPUs."""
    version: int
    """Version of the weights it samples with."""
    address: str
    stages: bool = False
    """It has room for a whole version beside the one in use."""
    machine: str = ""
    """See memory_handle.machine; empty if its memory is not to be written by others."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """The learner is about to send one version."""

    publish_id: int
    """Goes up by one with each publish."""
    version: int
    group_number: int
    """Number of the transfer group: the engines of a publish, and the way to them."""
    new_group: bool
    """The group must be formed first."""
    host: str
    port: int
    """Where the group meets."""
    transport: Transport
    world_size: int
    """Ranks of the group: the learner's and all engines'."""
    rank_offsets: dict[str, int]
    """First rank of each engine; an engine that is missing here takes no part."""
    manifest: list[TensorSpec]
    """Every tensor, in the order in which it is sent; see leeway.replay.flat_weights.Layout."""
    chunk_bytes: int
    """Bytes of one broadcast."""
    checksum: str
    """Of what is sent; an engine that received anything else keeps the weights it has."""
    deadline_s: float
    """Seconds for each stage."""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """One engine reached one stage of one publish."""

    publish_id: int
    engine_id: str
    stage: Stage
    version: int
    checksum: str = ""
    """Of the weights it uses, after `committed`; see leeway.replay.flat_weights.checksum."""
    transfer_s: float = 0.0
    """Seconds from `ready` until everything was received, joining a new group included."""
    wire_s: float = 0.0
    """Seconds of it that the bytes were on the wire."""
    pause_s: float = 0.0
    """Seconds without generation."""
    copy_s: float = 0.0
    """Seconds of the pause in which the weights were taken in."""
    memory: list[MemoryHandle] = []
    """With `joined` of a new group of a direct transfer: where each rank takes a version."""
    error: str | None = None
    """Why it failed; None unless the stage is `failed`."""

    def has_reached(self, stage: Stage) -> bool:
        """At `stage` or further; an engine that failed is at none but `failed`."""
        if self.stage == "failed":
            return stage == "failed"
        return _PROGRESS[self.stage] >= _PROGRESS[stage]


class PolicyBoard:
    """Membership and publishing of one run, over Redis. One instance per event loop."""

    def __init__(self, url: str, run: str, retry_s: float = 30.0) -> None:
        """`retry_s` bounds how long a call is tried again while Redis does not answer."""
        self._keys = board_keys(run)
        self._link = Link(url, retry_s)
        self._client = self._link.client
        self._scripts = ScriptSet(self._link, self._keys)

    async def heartbeat(self, record: EngineRecord, ttl_s: float) -> None:
        """Register the engine for `ttl_s`; without another beat by then it counts as dead.

        While it lives its version only moves up: registered at 5, a late beat with 4 leaves 5.
        """
        await self._scripts.run(
            "heartbeat",
            record=msgspec.json.encode(record).decode(),
            id=record.engine_id,
            version=record.version,
            ttl_ms=int(ttl_s * 1000),
        )

    async def withdraw(self, engine_id: str) -> None:
        """Take an engine off the board: it leaves, or it is evicted."""
        keys = self._keys

        async def remove() -> None:
            async with self._client.pipeline(transaction=True) as pipeline:
                pipeline.zrem(keys.engine_expiry, engine_id)
                pipeline.hdel(keys.engine_version, engine_id)
                pipeline.hdel(keys.engines, engine_id)
                pipeline.xadd(keys.room, {"withdrawn": engine_id}, maxlen=16)
                await pipeline.execute()

        await self._link.call(remove)

    async def engines(self) -> list[EngineRecord]:
        """The living engines, by id."""
        flat = await self._scripts.run("engines")
        records = [
            msgspec.structs.replace(
                msgspec.json.decode(record, type=EngineRecord), version=int(version)
            )
            for record, version in zip(flat[::2], flat[1::2], strict=True)
        ]
        return sorted(records, key=lambda record: record.engine_id)

    async def oldest_version(self) -> PolicyVersion | None:
        """The oldest version a living engine samples with; None when none lives."""
        versions = [record.version for record in await self.engines()]
        return PolicyVersion(min(versions)) if versions else None

    async def announce(self, announcement: Announcement) -> None:
        """Tell the engines of a publish. Repeating one is harmless: it has the same id."""
        fields = {b"json": msgspec.json.encode(announcement)}
        await self._link.call(
            lambda: self._client.xadd(
                self._keys.announcements, fields, maxlen=PUBLISHES_KEPT, approximate=False
            )
        )

    async def latest_announcement(self) -> Announcement | None:
        """The newest announcement of the run; None before the first."""
        entries = await self._link.call(
            lambda: self._client.xrevrange(self._keys.announcements, count=1)
        )
        return _announcement(entries[0][1]) if entries else None

    async def next_announcement(
        self, after_publish_id: int, timeout_s: float
    ) -> Announcement | None:
        """The newest announcement after `after_publish_id`; None if none comes in `timeout_s`.

        An engine that missed some gets the newest: the ones before it are over.
        """
        deadline = _now() + timeout_s
        last_id = "0-0"
        while True:
            left_s = max(0.0, deadline - _now())
            entries = await self._read(self._keys.announcements, last_id, left_s)
            if entries:
                last_id = entries[-1][0].decode()
                newest = _announcement(entries[-1][1])
                if newest.publish_id > after_publish_id:
                    return newest
            elif _now() >= deadline:
                return None

    async def report(self, report: EngineReport) -> None:
        """Say how far this engine is."""
        stream, over = (
            f"{self._keys.reports}:{publish_id}"
            for publish_id in (report.publish_id, report.publish_id - PUBLISHES_KEPT)
        )
        fields = {b"json": msgspec.json.encode(report)}

        async def write() -> None:
            async with self._client.pipeline(transaction=True) as pipeline:
                pipeline.xadd(stream, fields)
                pipeline.unlink(over)
                await pipeline.execute()

        await self._link.call(write)

    async def reports(
        self, publish_id: int, engine_ids: Collection[str], stage: Stage, timeout_s: float
    ) -> dict[str, EngineReport]:
        """The furthest report of each engine, once all have reached `stage` or one has failed.

        Raises WaitTimeout naming the engines that have not; its `missing` lists them.
        """
        deadline = _now() + timeout_s
        last_id = "0-0"
        furthest: dict[str, EngineReport] = {}
        while True:
            missing = _missing(furthest, engine_ids, stage)
            if not missing or any(report.stage == "failed" for report in furthest.values()):
                return furthest
            is_last_look = _now() >= deadline
            entries = await self._read(
                f"{self._keys.reports}:{publish_id}", last_id, deadline - _now()
            )
            if is_last_look and not entries:
                raise WaitTimeout(_describe_missing(publish_id, stage, timeout_s, missing), missing)
            for entry_id, fields in entries:
                last_id = entry_id.decode()
                report = msgspec.json.decode(fields[b"json"], type=EngineReport)
                held = furthest.get(report.engine_id)
                is_further = not held or _PROGRESS[report.stage] >= _PROGRESS[held.stage]
                if report.engine_id in engine_ids and is_further:
                    furthest[report.engine_id] = report

    async def close(self) -> None:
        """Close connections. The board stays."""
        await self._link.close()

    async def _read(
        self, stream: str, last_id: str, timeout_s: float
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Entries after `last_id`, waiting for at most `timeout_s`; none may come sooner."""
        block_ms = max(1, min(BLOCK_MS, int(timeout_s * 1000)))
        reply = await self._link.call(lambda: self._client.xread({stream: last_id}, block=block_ms))
        return stream_entries(reply)


def _missing(
    furthest: dict[str, EngineReport], engine_ids: Collection[str], stage: Stage
) -> tuple[str, ...]:
    return tuple(
        engine_id
        for engine_id in sorted(engine_ids)
        if engine_id not in furthest or _PROGRESS[furthest[engine_id].stage] < _PROGRESS[stage]
    )


def _describe_missing(
    publish_id: int, stage: Stage, timeout_s: float, missing: tuple[str, ...]
) -> str:
    return (
        f"publish {publish_id}: no report of stage {stage} within {timeout_s:.1f} s from "
        f"{', '.join(missing)}"
    )


def _announcement(fields: dict[bytes, bytes]) -> Announcement:
    return msgspec.json.decode(fields[b"json"], type=Announcement)


def _now() -> float:
    return asyncio.get_running_loop().time()
