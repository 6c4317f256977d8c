"""An engine's side of publishing: keep its place on the policy board, follow announcements.

One task per engine. What it waits for: the next announcement, for ever but in slices, so that a
stop is noticed; everything after an announcement has that announcement's deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from leeway.actors.weight_receiver import Committed, Rendezvous
from leeway.replay.board import Announcement, EngineRecord, EngineReport, PolicyBoard, TensorSpec
from leeway.replay.errors import ChecksumMismatch
from leeway.replay.schema import PolicyVersion

log = logging.getLogger(__name__)

HEARTBEAT_S = 3.0
"""An engine is dead for everybody after three heartbeats missed."""


class ReceivingPolicy(Protocol):
    """A policy that takes weights while it generates."""

    async def version(self) -> PolicyVersion: ...
    async def join(self, rendezvous: Rendezvous) -> None: ...
    async def stage(self, manifest: list[TensorSpec], timeout_s: float) -> float: ...
    async def commit(self, version: PolicyVersion, checksum: str) -> Committed: ...
    async def abandon(self) -> None: ...


class Membership:
    """Keeps one engine on the board and its weights current."""

    def __init__(
        self, board: PolicyBoard, policy: ReceivingPolicy, engine_id: str, address: str
    ) -> None:
        self._board = board
        self._policy = policy
        self._engine_id = engine_id
        self._address = address
        self._group_number = -1
        self.version = PolicyVersion(0)
        """What the engine samples with, as last put on the board."""
        self.last: EngineReport | None = None
        """The report of the last publish, for the status."""
        self.broken: str | None = None
        """Why the engine must not go on: a commit failed half way, its weights are unknown."""

    async def run(self) -> None:
        """Until cancelled; then the engine leaves the board."""
        latest = await self._board.latest_announcement()
        seen = latest.publish_id if latest else 0
        await self._beat()
        beating = asyncio.create_task(self._keep_beating())
        try:
            while True:
                announcement = await self._board.next_announcement(seen, timeout_s=HEARTBEAT_S)
                if beating.done():
                    await beating
                if announcement is None:
                    continue
                seen = announcement.publish_id
                if self._engine_id in announcement.rank_offsets:
                    await self._follow(announcement)
        finally:
            beating.cancel()
            await self._board.withdraw(self._engine_id)

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._beat()

    async def _beat(self) -> None:
        self.version = await self._policy.version()
        record = EngineRecord(
            engine_id=self._engine_id,
            num_ranks=1,
            version=self.version,
            address=self._address,
        )
        await self._board.heartbeat(record, ttl_s=3 * HEARTBEAT_S)

    async def _follow(self, announcement: Announcement) -> None:
        """Receive one version and say how it went; a failure is a report, not the engine's end."""
        began = time.monotonic()
        try:
            await self._join_if_new(announcement)
            await self._say(announcement, "joined")
            await self._policy.stage(announcement.manifest, announcement.deadline_s)
            transfer_s = time.monotonic() - began
            committed = await self._commit(announcement)
            if announcement.version < self.version:
                # A learner that lost versions in a crash starts below them. On the board a version
                # only moves up, so the engine enters anew.
                await self._board.withdraw(self._engine_id)
            await self._beat()
            await self._say(
                announcement,
                "committed",
                checksum=committed.checksum,
                transfer_s=transfer_s,
                pause_s=committed.pause_s,
            )
        except Exception as error:
            await self._fail(announcement, error)

    async def _commit(self, announcement: Announcement) -> Committed:
        try:
            return await self._policy.commit(
                PolicyVersion(announcement.version), announcement.checksum
            )
        except ChecksumMismatch:
            raise
        except Exception as error:
            self.broken = f"version {announcement.version} was not taken into use: {error}"
            raise

    async def _join_if_new(self, announcement: Announcement) -> None:
        if announcement.group_number == self._group_number:
            return
        await self._policy.join(
            Rendezvous(
                host=announcement.host,
                port=announcement.port,
                rank_offset=announcement.rank_offsets[self._engine_id],
                world_size=announcement.world_size,
                timeout_s=announcement.deadline_s,
            )
        )
        self._group_number = announcement.group_number

    async def _fail(self, announcement: Announcement, error: Exception) -> None:
        log.exception("engine %s: version %d", self._engine_id, announcement.version)
        self._group_number = -1
        await self._policy.abandon()
        await self._say(announcement, "failed", error=f"{type(error).__name__}: {error}")

    async def _say(
        self,
        announcement: Announcement,
        stage: str,
        checksum: str = "",
        transfer_s: float = 0.0,
        pause_s: float = 0.0,
        error: str | None = None,
    ) -> None:
        report = EngineReport(
            publish_id=announcement.publish_id,
            engine_id=self._engine_id,
            stage=stage,  # pyright: ignore[reportArgumentType]
            version=announcement.version,
            checksum=checksum,
            transfer_s=transfer_s,
            pause_s=pause_s,
            error=error,
        )
        await self._board.report(report)
        if stage in ("committed", "failed"):
            self.last = report
