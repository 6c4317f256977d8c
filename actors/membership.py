"""An engine's side of publishing: keep its place on the policy board, follow announcements.

One task per engine. What it waits for: the next announcement, for ever but in slices, so that a
stop is noticed; everything after an announcement has that announcement's deadline, and ends sooner
when the learner gave up on it and announced anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from leeway.actors.weight_receiver import Committed, Delivery, Rendezvous
from leeway.replay.board import (
    LEARNER,
    Announcement,
    EngineRecord,
    EngineReport,
    PolicyBoard,
    Stage,
    TensorSpec,
)
from leeway.replay.errors import ChecksumMismatch, StoreUnavailable, TransferError
from leeway.replay.memory_handle import MemoryHandle, machine
from leeway.replay.schema import PolicyVersion

log = logging.getLogger(__name__)

T = TypeVar("T")

HEARTBEAT_S = 3.0
"""An engine is dead for everybody after three heartbeats missed."""
SUPERSEDED_S = 0.5
"""Seconds between two looks, while receiving, whether a newer announcement has come."""
MAX_DEADLINES = 3
"""Joining and receiving end by themselves at the announcement's deadline. An engine that is not
through both after so many deadlines answers nobody: it hangs, and is given up."""
CANCEL_S = 5.0
"""How long work that was given up may take to end."""


class ReceivingPolicy(Protocol):
    """A policy that takes weights while it generates."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def gpus(self) -> list[str]: ...
    @property
    def stages(self) -> bool: ...
    async def version(self) -> PolicyVersion: ...
    async def check_manifest(self, manifest: list[TensorSpec]) -> None: ...
    async def expose(self, delivery: Delivery) -> list[MemoryHandle]: ...
    async def arrived(self, checksum: str, wire_s: float) -> None: ...
    async def join(self, rendezvous: Rendezvous) -> None: ...
    async def stage(self, delivery: Delivery) -> float: ...
    async def commit(self, version: PolicyVersion, checksum: str) -> Committed: ...
    async def abandon(self) -> None: ...


class Membership:
    """Keeps one engine on the board and its weights current."""

    def __init__(
        self,
        board: PolicyBoard,
        policy: ReceivingPolicy,
        engine_id: str,
        address: str,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._board = board
        self._policy = policy
        self._engine_id = engine_id
        self._address = address
        self._heartbeat_s = heartbeat_s
        self._group_number = -1
        self._beating = asyncio.Lock()
        self.version = PolicyVersion(0)
        """What the engine samples with, as last put on the board."""
        self.receiving = (0.0, 0.0)
        """From when to when the last version came, by the monotonic clock."""
        self.last: EngineReport | None = None
        """The report of the last publish, for the status."""
        self.broken: str | None = None
        """Why the engine must not go on: it hangs, or its weights are unknown since a commit failed
        half way."""

    async def run(self) -> None:
        """Until cancelled, or broken: that raises TransferError. Then it leaves the board."""
        latest = await self._board.latest_announcement()
        seen = latest.publish_id if latest else 0
        await self._beat()
        beating = asyncio.create_task(self._keep_beating())
        try:
            while True:
                announcement = await self._board.next_announcement(
                    seen, timeout_s=self._heartbeat_s
                )
                if beating.done():
                    await beating
                if announcement is None:
                    continue
                seen = announcement.publish_id
                if self._engine_id in announcement.rank_offsets:
                    await self._follow(announcement)
                if self.broken is not None:
                    raise TransferError(self.broken)
        finally:
            await self._end(beating)
            try:
                await self._board.withdraw(self._engine_id)
            except StoreUnavailable as error:
                log.warning("%s stays on the board until it expires: %s", self._engine_id, error)

    async def _end(self, beating: asyncio.Task[None]) -> None:
        """Between two beats, if that can be: one that is cancelled may be on its way to Redis, and
        would put the engine back behind its withdrawal."""
        is_between = False
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                is_between = await self._beating.acquire()
        beating.cancel()
        await asyncio.wait({beating}, timeout=CANCEL_S)
        if is_between:
            self._beating.release()

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self._beat()

    async def _beat(self, *, is_new: bool = False) -> None:
        """`is_new`: leave the board first, which lets the version go down."""
        # One at a time: a beat under way would put the version of before back on the board.
        async with self._beating:
            if is_new:
                await self._board.withdraw(self._engine_id)
            await self._register()

    async def _register(self) -> None:
        self.version = await self._policy.version()
        record = EngineRecord(
            engine_id=self._engine_id,
            num_ranks=self._policy.num_ranks,
            dtype=self._policy.dtype,
            gpus=self._policy.gpus,
            version=self.version,
            address=self._address,
            stages=self._policy.stages,
            machine=machine() if self._policy.stages else "",
        )
        await self._board.heartbeat(record, ttl_s=3 * self._heartbeat_s)

    async def _follow(self, announcement: Announcement) -> None:
        """Receive one version and say how it went; a failure is a report, not the engine's end."""
        # Before the commit: a beat under way during it sets `self.version` to the new one.
        held = self.version
        try:
            transfer_s = await self._unless_superseded(announcement, self._receive(announcement))
            committed = await self._commit(announcement)
            # A learner that lost versions in a crash starts below them. On the board a version
            # only moves up, so the engine enters anew.
            await self._beat(is_new=announcement.version < held)
            await self._say(
                announcement,
                "committed",
                checksum=committed.checksum,
                transfer_s=transfer_s,
                wire_s=committed.wire_s,
                pause_s=committed.pause_s,
                copy_s=committed.copy_s,
            )
        except Exception as error:
            await self._fail(announcement, error)

    async def _receive(self, announcement: Announcement) -> float:
        """Until the new weights are staged; returns the seconds it took."""
        await self._policy.check_manifest(announcement.manifest)
        delivery = Delivery(
            manifest=announcement.manifest,
            chunk_bytes=announcement.chunk_bytes,
            timeout_s=announcement.deadline_s,
        )
        is_direct = announcement.transport == "direct"
        ready_at = time.monotonic()
        await self._say(announcement, "ready")
        memory: list[MemoryHandle] = []
        if self._is_new(announcement):
            if is_direct:
                memory = await self._policy.expose(delivery)
            else:
                await self._join(announcement)
            self._group_number = announcement.group_number
        await self._say(announcement, "joined", memory=memory)
        began = time.monotonic()
        if is_direct:
            await self._let_write(announcement)
        else:
            await self._policy.stage(delivery)
        self.receiving = (began, time.monotonic())
        return time.monotonic() - ready_at

    async def _let_write(self, announcement: Announcement) -> None:
        """Until the learner has written the version into the memory that it was shown."""
        reports = await self._board.reports(
            announcement.publish_id, (LEARNER,), "sent", announcement.deadline_s
        )
        await self._policy.arrived(announcement.checksum, reports[LEARNER].wire_s)

    async def _unless_superseded(
        self, announcement: Announcement, work: Coroutine[Any, Any, T]
    ) -> T:
        """Do `work`, but give up once the learner has announced anew: it sends no more of this.

        Raises TransferError then, and when the engine hangs: it is broken in that case.
        """
        task = asyncio.create_task(work)
        limit_s = MAX_DEADLINES * announcement.deadline_s
        began = time.monotonic()
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=SUPERSEDED_S)
                latest = None if task.done() else await self._board.latest_announcement()
                is_over = latest is not None and latest.publish_id > announcement.publish_id
                if latest is not None and is_over and not task.done():
                    raise TransferError(f"the learner went on to publish {latest.publish_id}")
                if not task.done() and time.monotonic() - began > limit_s:
                    raise self._hangs(announcement, limit_s)
            return task.result()
        finally:
            task.cancel()
            _, running = await asyncio.wait({task}, timeout=CANCEL_S)
            if running:
                self._hangs(announcement, CANCEL_S)

    def _hangs(self, announcement: Announcement, waited_s: float) -> TransferError:
        reason = (
            f"version {announcement.version} was not received: the engine did not answer within "
            f"{waited_s:g} s"
        )
        # What broke it first is the cause.
        self.broken = self.broken or reason
        return TransferError(reason)

    async def _commit(self, announcement: Announcement) -> Committed:
        deadline_s, sent = announcement.deadline_s, announcement.checksum
        try:
            async with asyncio.timeout(deadline_s):
                committed = await self._policy.commit(PolicyVersion(announcement.version), sent)
            if committed.checksum != sent:
                raise TransferError(f"checksum {committed.checksum} is in use, {sent} was sent")
            return committed
        except ChecksumMismatch:
            raise
        except Exception as error:
            late = isinstance(error, TimeoutError)
            reason = f"not done within {deadline_s:g} s" if late else str(error)
            self.broken = f"version {announcement.version} was not taken into use: {reason}"
            raise TransferError(self.broken) from error

    def _is_new(self, announcement: Announcement) -> bool:
        if announcement.group_number == self._group_number:
            return False
        if not announcement.new_group:
            raise TransferError(f"not in transfer group {announcement.group_number}")
        return True

    async def _join(self, announcement: Announcement) -> None:
        await self._policy.join(
            Rendezvous(
                host=announcement.host,
                port=announcement.port,
                rank_offset=announcement.rank_offsets[self._engine_id],
                world_size=announcement.world_size,
                transport=announcement.transport,
                timeout_s=announcement.deadline_s,
            )
        )

    async def _fail(self, announcement: Announcement, error: Exception) -> None:
        log.warning(
            "engine %s did not take version %d: %s",
            self._engine_id,
            announcement.version,
            error,
            exc_info=self.broken is not None,
        )
        self._group_number = -1
        try:
            async with asyncio.timeout(announcement.deadline_s):
                await self._policy.abandon()
        except TimeoutError:
            self._hangs(announcement, announcement.deadline_s)
        finally:
            await self._say(announcement, "failed", error=f"{type(error).__name__}: {error}")

    async def _say(self, announcement: Announcement, stage: Stage, **facts: Any) -> None:
        report = EngineReport(
            publish_id=announcement.publish_id,
            engine_id=self._engine_id,
            stage=stage,
            version=announcement.version,
            **facts,
        )
        if stage in ("committed", "failed"):
            self.last = report
        await self._board.report(report)
