"""Publishing a policy version to every live engine, over a process group of its own.

    learner                                 engine (actors/membership.py)
    read membership from the policy board
    announce  ---------------------------->  join the group if it is new, report `joined`
    wait for `joined` of all
    broadcast into their staging  -------->  generation goes on; report `staged`
                                             pause, swap, resume; report `committed`
    confirm: wait for `committed`,
    compare checksums, evict who differs

`publish` returns after the broadcast, so that the learner trains on while engines commit; `confirm`
is called before the next publish and at the end. A failure or a change of membership makes a new
numbered group; whoever misses a deadline is left out of it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Mapping

import msgspec
import torch
import torch.distributed as dist

from leeway.replay import transfer
from leeway.replay.board import Announcement, EngineRecord, EngineReport, PolicyBoard
from leeway.replay.errors import TransferError, WaitTimeout
from leeway.replay.schema import PolicyVersion

log = logging.getLogger(__name__)


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one publish."""

    version: PolicyVersion
    num_engines: int
    transfer_s: float
    """From the announcement until every engine held the bytes."""
    pause_s: list[float]
    """Per engine, seconds in which it generated nothing."""
    evicted: dict[str, str]
    """Engine id -> why it was left out."""


class Publisher:
    """Rank 0 of the learner owns one."""

    def __init__(self, board: PolicyBoard, device: torch.device, timeout_s: float) -> None:
        self._board = board
        self._device = device
        self._timeout_s = timeout_s
        self._host = _own_address()
        self._publish_id = 0
        self._group_number = 0
        self._group: dist.ProcessGroup | None = None
        self._store: dist.TCPStore | None = None
        self._members: dict[str, int] = {}
        self._pending: tuple[Announcement, float] | None = None
        self._evicted: dict[str, str] = {}

    async def resume(self) -> None:
        """Continue the numbering of announcements that a learner before this one made."""
        latest = await self._board.latest_announcement()
        if latest is not None:
            self._publish_id, self._group_number = latest.publish_id, latest.group_number

    async def publish(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> int:
        """Send `weights` as `version` to every live engine; returns how many received it.

        Raises TransferError when engines are alive and none could be reached twice in a row.
        """
        for attempt in (1, 2):
            engines = {e.engine_id: e for e in await self._board.engines()}
            if not engines:
                return 0
            try:
                return await self._send(version, weights, engines)
            except (TransferError, WaitTimeout) as error:
                log.warning("publish of version %d, attempt %d: %s", version, attempt, error)
                self._group = None
        raise TransferError(f"version {version} reached no engine: {error_summary(self._evicted)}")

    async def _send(
        self,
        version: PolicyVersion,
        weights: Mapping[str, torch.Tensor],
        engines: Mapping[str, EngineRecord],
    ) -> int:
        announcement = self._announcement(version, weights, engines)
        joining = self._start_joining(announcement) if announcement.new_group else None
        began = time.monotonic()
        await self._board.announce(announcement)
        await self._await_stage(announcement, "joined")
        if joining is not None:
            await asyncio.to_thread(self._finish_joining, joining, announcement)
        assert self._group is not None
        await asyncio.to_thread(transfer.send, self._group, weights)
        self._pending = (announcement, began)
        return len(announcement.rank_offsets)

    def _announcement(
        self,
        version: PolicyVersion,
        weights: Mapping[str, torch.Tensor],
        engines: Mapping[str, EngineRecord],
    ) -> Announcement:
        members = {engine_id: record.num_ranks for engine_id, record in engines.items()}
        new_group = self._group is None or members != self._members
        if new_group:
            self._group, self._members = None, members
            self._store = transfer.build_store("0.0.0.0", 0, True, self._timeout_s)
            self._group_number += 1
        assert self._store is not None
        offsets, rank = {}, 1
        for engine_id, num_ranks in sorted(members.items()):
            offsets[engine_id] = rank
            rank += num_ranks
        self._publish_id += 1
        return Announcement(
            publish_id=self._publish_id,
            version=version,
            group_number=self._group_number,
            new_group=new_group,
            host=self._host,
            port=self._store.port,
            world_size=rank,
            rank_offsets=offsets,
            manifest=transfer.describe(weights),
            checksum=transfer.checksum(weights),
            deadline_s=self._timeout_s,
        )

    def _start_joining(self, announcement: Announcement) -> _Joining:
        assert self._store is not None
        return _Joining(self._store, announcement.world_size, self._device, self._timeout_s)

    def _finish_joining(self, joining: _Joining, announcement: Announcement) -> None:
        self._group = joining.result()
        log.info(
            "transfer group %d: %d engines",
            announcement.group_number,
            len(announcement.rank_offsets),
        )

    async def _await_stage(self, announcement: Announcement, stage: str) -> dict[str, EngineReport]:
        """Reports of every member at `stage`; a member that fails or is late is evicted."""
        reports = await self._board.reports(
            announcement.publish_id,
            list(announcement.rank_offsets),
            stage,  # pyright: ignore[reportArgumentType]
            self._timeout_s,
        )
        failed = {
            e: r.error or "no reason given" for e, r in reports.items() if r.stage == "failed"
        }
        if failed:
            self._evicted.update(failed)
            for engine_id in failed:
                await self._board.withdraw(engine_id)
            raise TransferError(error_summary(failed))
        return reports

    async def confirm(self) -> Published | None:
        """Wait until the last published version is in use everywhere; None if there was none.

        An engine that reports another checksum is evicted: it holds weights nobody trained.
        """
        if self._pending is None:
            return None
        announcement, began = self._pending
        self._pending = None
        evicted: dict[str, str] = {}
        try:
            reports = await self._await_stage(announcement, "committed")
        except (TransferError, WaitTimeout) as error:
            log.warning("version %d was not confirmed: %s", announcement.version, error)
            self._group = None
            evicted, self._evicted = dict(self._evicted), {}
            reports = {}
        for engine_id, report in reports.items():
            if report.checksum != announcement.checksum:
                evicted[engine_id] = f"checksum {report.checksum}, sent {announcement.checksum}"
                await self._board.withdraw(engine_id)
                self._group = None
        good = [r for e, r in reports.items() if e not in evicted]
        return Published(
            version=PolicyVersion(announcement.version),
            num_engines=len(good),
            transfer_s=max((r.transfer_s for r in good), default=time.monotonic() - began),
            pause_s=[r.pause_s for r in good],
            evicted=evicted,
        )


class _Joining:
    """Building the group needs every engine, so it runs beside the wait for their reports."""

    def __init__(
        self, store: dist.TCPStore, size: int, device: torch.device, timeout_s: float
    ) -> None:
        self._group: dist.ProcessGroup | None = None
        self._error: Exception | None = None
        self._timeout_s = timeout_s

        def join() -> None:
            try:
                self._group = transfer.build_group(store, 0, size, device, timeout_s)
            except TransferError as error:
                self._error = error

        self._thread = threading.Thread(target=join, name="leeway-join", daemon=True)
        self._thread.start()

    def result(self) -> dist.ProcessGroup:
        """The group, or the reason there is none."""
        self._thread.join(self._timeout_s)
        if self._error is not None:
            raise self._error
        if self._group is None:
            raise TransferError(
                f"the transfer group was not complete within {self._timeout_s:.0f} s"
            )
        return self._group


def error_summary(failed: Mapping[str, str]) -> str:
    """`engine-1: reason; engine-2: reason`."""
    return "; ".join(f"{engine}: {reason}" for engine, reason in failed.items()) or "no reply"


def _own_address() -> str:
    """The address other machines reach this one at; loopback where there is no network."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
    return address
