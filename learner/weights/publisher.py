"""Publishing a policy version to every live engine.

    learner                                 engine (actors/membership.py)
    read membership from the policy board
    announce  ---------------------------->  can it load the manifest? report `ready`
    wait for `ready` of all, then form
    the group if it is new  -------------->  join it, report `joined`
    wait for `joined` of all
    send it into their staging  ---------->  generation goes on
                                             pause, swap, resume; report `committed`
    confirm: wait for `committed`,
    compare checksums, evict who differs

Engines whose memory the learner can reach are shown where to write (`joined` says where), and told
by a report of the learner's, `sent`, that it has. All others receive a broadcast, for which the
group is a process group of its own.

`publish` returns when the bytes are sent, so that the learner trains on while engines commit;
`confirm` is called before the next publish and at the end.

Forming a group needs every member at once, and one that is missing makes it fail for all. Hence
`ready` comes first, through Redis: whoever died or is late shows there by name and is evicted, and
the others are announced to again, for a new numbered group. A failure later on makes a new group,
too; then `ready` tells again who is left.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterable, Mapping

import msgspec
import torch
import torch.distributed as dist

from leeway.learner.weights.outcome import MAX_FAILURES, Lost, Outcome, error_summary
from leeway.learner.weights.routes import (
    Collective,
    Direct,
    Route,
    chunk_bytes,
    reach,
    transport_of,
)
from leeway.learner.weights.sender import Sender
from leeway.replay import transfer
from leeway.replay.board import (
    LEARNER,
    Announcement,
    EngineRecord,
    EngineReport,
    PolicyBoard,
    Stage,
    TensorSpec,
    Transport,
)
from leeway.replay.errors import TransferError, WaitTimeout
from leeway.replay.flat_weights import FlatWeights, Layout
from leeway.replay.schema import PolicyVersion

log = logging.getLogger(__name__)

MAX_DEADLINES = 6
"""A publish waits for four things, some twice; engines that are lost one after the other may not
make it last longer than so many deadlines."""
LOOK_S = 1.0
"""Seconds between two looks, while waiting for reports, which engines still live."""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one publish."""

    version: PolicyVersion
    num_engines: int
    num_bytes: int
    transport: str
    """direct, nccl or gloo."""
    checksum: str
    transfer_s: float
    """From `ready` until every engine held the bytes."""
    wire_s: float
    """Seconds of it that the bytes were on the wire, for the slowest engine."""
    pause_s: list[float]
    """Per engine, seconds in which it generated nothing."""
    copy_s: list[float]
    """Per engine, seconds of it in which the weights were taken in."""
    evicted: dict[str, str]
    """Engine id -> why it was left out."""


class Publisher:
    """Rank 0 of the learner owns one."""

    def __init__(
        self, board: PolicyBoard, device: torch.device, timeout_s: float, choice: str = "auto"
    ) -> None:
        """`timeout_s` bounds each wait: for `ready`, the group, the bytes, and `committed`.
        `choice` is learner.transport."""
        self._board = board
        self._device = device
        self._timeout_s = timeout_s
        self._host = _own_address()
        self._publish_id = 0
        self._group_number = 0
        self._wire_dtype = torch.float32
        self._transport: Transport = "nccl" if device.type == "cuda" else "gloo"
        self.choice = choice
        self._out_of_reach: set[str] = set()
        """Engines whose memory could not be opened; while one lives, weights are broadcast."""
        self._route: Route | None = None
        self._store: dist.TCPStore | None = None
        self._members: tuple[Transport, dict[str, int], list[TensorSpec]] | None = None
        """What the route was made for: transport, ranks by engine, and the manifest if direct."""
        self._sender = Sender()
        self._wire_s = 0.0
        """Seconds that the last version was on the wire."""
        self._pending: tuple[Announcement, float, int] | None = None
        self._version = PolicyVersion(0)
        self._evicted: dict[str, str] = {}

    async def resume(self) -> None:
        """Continue the numbering of announcements that a learner before this one made."""
        latest = await self._board.latest_announcement()
        if latest is not None:
            self._publish_id, self._group_number = latest.publish_id, latest.group_number

    async def wire_dtype(self) -> torch.dtype:
        """In which dtype floating-point weights are best sent: that of the engines.

        Engines that compute in bfloat16 would round float32 themselves: half the bytes, the same
        weights. Where they do not agree it is float32; where none lives, what it was before.
        """
        dtypes = {engine.dtype for engine in await self._board.engines()}
        if dtypes:
            self._wire_dtype = torch.bfloat16 if dtypes == {"bfloat16"} else torch.float32
        return self._wire_dtype

    async def publish(self, version: PolicyVersion, weights: FlatWeights) -> int:
        """Send `weights` as `version` to every live engine; returns how many received it.

        Engines that died or are late are evicted, the others get it. Raises TransferError when
        every engine that lives refuses, when sending fails MAX_FAILURES times, or when all of it
        takes longer than MAX_DEADLINES deadlines.
        """
        self._version = version
        limit_s = MAX_DEADLINES * self._timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._publish(version, weights)
        except TimeoutError:
            self._drop_group()
            raise TransferError(
                f"version {version} was not published within {limit_s:g} s; lost meanwhile: "
                f"{error_summary(self._evicted)}"
            ) from None

    async def _publish(self, version: PolicyVersion, weights: FlatWeights) -> int:
        lost, reason = Lost(), ""
        while lost.num_transfers < MAX_FAILURES:
            engines = [e for e in await self._board.engines() if e.engine_id not in lost.engines]
            if not engines:
                break
            announcement = self._announcement(engines, weights)
            try:
                if await self._send(announcement, weights, lost):
                    return len(engines)
            except TransferError as error:
                log.warning("publish of version %d: %s", version, error)
                lost.num_transfers += 1
                reason = str(error)
            self._drop_group()
        else:
            raise TransferError(f"version {version} was not published: {reason}")
        if lost.refusal is not None:
            raise TransferError(f"version {version} was not published: {lost.refusal}")
        return 0

    async def _send(self, announcement: Announcement, weights: FlatWeights, lost: Lost) -> bool:
        """Announce and send. False if an engine was not ready; raises TransferError otherwise."""
        began = time.monotonic()
        await self._board.announce(announcement)
        outcome = await self._await_stage(announcement, "ready")
        if not outcome.is_complete:
            await self._evict(lost.add(outcome))
            return False
        is_direct = announcement.transport == "direct"
        if self._route is None and not is_direct:
            self._route = await self._form_group(announcement)
        outcome = await self._await_stage(announcement, "joined")
        if not outcome.is_complete:
            evicted = lost.add(outcome)
            await self._evict(evicted)
            if evicted:
                return False
            raise TransferError(error_summary(outcome.failed))
        if self._route is None:
            self._route = self._open(announcement, outcome.reached.values())
        route = self._route
        try:
            usual_s = 0.0 if announcement.new_group else self._wire_s
            self._wire_s = await self._sender.run(
                lambda: route.send(weights, announcement, self._timeout_s, usual_s),
                self._timeout_s,
            )
        except TransferError as error:
            raise TransferError(f"to {_names(announcement)}: {error}") from error
        if is_direct:
            await self._say_sent(announcement)
        self._pending = (announcement, began, weights.layout.num_bytes)
        return True

    def _announcement(self, engines: list[EngineRecord], weights: FlatWeights) -> Announcement:
        ranks = {engine.engine_id: engine.num_ranks for engine in engines}
        is_broadcast = not self._out_of_reach.isdisjoint(ranks)
        choice = "collective" if is_broadcast else self.choice
        self._transport = transport_of(self._device, engines, choice)
        manifest = list(weights.layout.manifest)
        # Memory is exposed for one manifest; a process group carries any.
        members = (self._transport, ranks, manifest if self._transport == "direct" else [])
        new_group = self._route is None or members != self._members
        if new_group:
            self._drop_group()
            self._members = members
            if self._transport != "direct":
                listens_on = self._host if self._host == transfer.LOOPBACK else "0.0.0.0"
                self._store = transfer.build_store(listens_on, 0, True, self._timeout_s)
            self._group_number += 1
        offsets, rank = {}, 1
        for engine_id, num_ranks in sorted(ranks.items()):
            offsets[engine_id] = rank
            rank += num_ranks
        self._publish_id += 1
        return Announcement(
            publish_id=self._publish_id,
            version=self._version,
            group_number=self._group_number,
            new_group=new_group,
            host=self._host,
            port=self._store.port if self._store is not None else 0,
            transport=self._transport,
            world_size=rank,
            rank_offsets=offsets,
            manifest=manifest,
            chunk_bytes=chunk_bytes(self._transport, engines, weights),
            checksum=weights.checksum,
            deadline_s=self._timeout_s,
        )

    def _open(self, announcement: Announcement, joined: Iterable[EngineReport]) -> Route:
        """Raises TransferError where the memory of an engine is out of reach; of all such engines
        that is noted, and the rest may be written to when they are gone."""
        assert self._members is not None
        ranks = self._members[1]
        num_bytes = Layout(announcement.manifest).num_bytes
        targets: list[torch.Tensor] = []
        failed: dict[str, str] = {}
        for report in joined:
            try:
                if len(report.memory) != ranks[report.engine_id]:
                    raise TransferError(f"{len(report.memory)} of its memories were shown")
                targets += reach(report.memory, num_bytes, self._device)
            except TransferError as error:
                failed[report.engine_id] = str(error)
        if failed:
            self._out_of_reach |= failed.keys()
            problem = error_summary(failed)
            log.warning("weights are broadcast while this engine lives: %s", problem)
            raise TransferError(problem)
        return Direct(targets, self._device)

    async def _say_sent(self, announcement: Announcement) -> None:
        await self._board.report(
            EngineReport(
                publish_id=announcement.publish_id,
                engine_id=LEARNER,
                stage="sent",
                version=announcement.version,
                wire_s=self._wire_s,
            )
        )

    async def _form_group(self, announcement: Announcement) -> Route:
        store, size, timeout_s = self._store, announcement.world_size, self._timeout_s
        device = transfer.wire_device(announcement.transport, self._device)
        assert store is not None
        given_up = threading.Event()

        def build() -> dist.ProcessGroup:
            group = transfer.build_group(store, 0, size, device, timeout_s)
            if given_up.is_set():  # nobody would ever drop it
                transfer.drop(group)
            return group

        try:
            group = await self._sender.run(build, timeout_s)
        except asyncio.CancelledError:
            given_up.set()
            raise
        except TransferError as error:
            given_up.set()
            # It says nothing about who was missing; the engines may have.
            outcome = await self._await_stage(announcement, "joined", timeout_s=LOOK_S)
            engines = error_summary(outcome.failed | outcome.silent)
            raise TransferError(f"{error}; engines: {engines}") from error
        log.info("transfer group %d: %s", announcement.group_number, _names(announcement))
        return Collective(group, device)

    async def _await_stage(
        self, announcement: Announcement, stage: Stage, timeout_s: float | None = None
    ) -> Outcome:
        """Until each engine has reached `stage`, failed, died, or `timeout_s` is over."""
        outcome = Outcome()
        waiting = set(announcement.rank_offsets)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                reports = await self._board.reports(
                    announcement.publish_id, waiting, stage, min(LOOK_S, left_s)
                )
            except WaitTimeout as timeout:
                late = f"not {stage} within {timeout_s:g} s" if left_s <= LOOK_S else None
                outcome.silent |= await self._silent(timeout.missing, late)
            else:
                outcome.add(reports, stage)
            waiting -= outcome.engines
        return outcome

    async def _silent(self, missing: tuple[str, ...], late: str | None) -> dict[str, str]:
        """Those of the missing that are not waited for any longer, and why.

        `late` is why the living are not; None waits on for them.
        """
        living = {engine.engine_id for engine in await self._board.engines()}
        dead = {e: "its heartbeat ended" for e in missing if e not in living}
        return dead if late is None else dict.fromkeys(missing, late) | dead

    async def _evict(self, engines: Mapping[str, str]) -> None:
        for engine_id, reason in engines.items():
            log.warning("version %d: %s is evicted: %s", self._version, engine_id, reason)
            await self._board.withdraw(engine_id)
            self._evicted[engine_id] = reason
            self._drop_group()

    def _drop_group(self) -> None:
        if self._route is not None:
            self._route.drop()
        self._route = self._store = None

    async def confirm(self) -> Published | None:
        """Wait until the last published version is in use everywhere.

        None if nothing was published since. An engine that is late, failed, or reports another
        checksum is evicted: it holds weights nobody trained, or older ones.
        """
        pending, self._pending = self._pending, None
        outcome, began, num_bytes, checksum = Outcome(), time.monotonic(), 0, ""
        if pending is not None:
            announcement, began, num_bytes = pending
            checksum = announcement.checksum
            outcome = await self._await_stage(announcement, "committed")
            wrong = {
                e: f"checksum {r.checksum}, sent {announcement.checksum}"
                for e, r in outcome.reached.items()
                if r.checksum != announcement.checksum
            }
            await self._evict(outcome.failed | outcome.silent | wrong)
        evicted, self._evicted = self._evicted, {}
        if pending is None and not evicted:
            return None
        good = [r for e, r in outcome.reached.items() if e not in evicted]
        return Published(
            version=self._version,
            num_engines=len(good),
            num_bytes=num_bytes,
            transport=self._transport,
            checksum=checksum,
            transfer_s=max((r.transfer_s for r in good), default=time.monotonic() - began),
            wire_s=max((r.wire_s for r in good), default=0.0),
            pause_s=[r.pause_s for r in good],
            copy_s=[r.copy_s for r in good],
            evicted=evicted,
        )


def _names(announcement: Announcement) -> str:
    return ", ".join(announcement.rank_offsets)


def _own_address() -> str:
    """The address other machines reach this one at; loopback where there is no network, or none is
    to be used.

    The host's own name may stand for 127.0.1.1. Nothing is sent: connecting a datagram socket only
    chooses the interface.
    """
    if transfer.stays_on_this_machine():
        return transfer.LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
