"""A replay buffer whose calls show in the traces of the groups they are about."""

from __future__ import annotations

import time
from collections.abc import Mapping

from leeway.replay import tracing
from leeway.replay.schema import Group, GroupId, PolicyVersion
from leeway.replay.store import Lease, Replay, ReplayStats, Slot, VersionSource


def traced(replay: Replay) -> Replay:
    """The buffer itself while this process does not trace, so that tracing costs nothing then."""
    return TracedReplay(replay) if tracing.is_on() else replay


class TracedReplay:
    """A Replay over another."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    async def add(self, slot: Slot, group: Group) -> None:
        """See Replay.add. A child of the group's span, which is around the call."""
        with tracing.span("replay.add", {"leeway.num_tokens": group.num_tokens}):
            await self._replay.add(slot, group)

    async def draw(self, timeout_s: float) -> Lease:
        """See Replay.draw. In every group's trace the span is as long as the whole draw."""
        began = time.time()
        lease = await self._replay.draw(timeout_s)
        tracing.mark("replay.draw", _ids(lease), began)
        return lease

    async def acknowledge(self, lease: Lease, version: PolicyVersion) -> None:
        """See Replay.acknowledge."""
        began = time.time()
        await self._replay.acknowledge(lease, version)
        tracing.mark("replay.acknowledge", _ids(lease), began)

    async def release(self, lease: Lease) -> None:
        """See Replay.release."""
        began = time.time()
        await self._replay.release(lease)
        tracing.mark("replay.release", _ids(lease), began)

    async def admit(
        self, n: int, version: PolicyVersion | VersionSource, timeout_s: float
    ) -> list[Slot]:
        """See Replay.admit. A group's trace begins behind it."""
        return await self._replay.admit(n, version, timeout_s)

    async def drop(self, slot: Slot, reason: str) -> None:
        """See Replay.drop."""
        with tracing.span("replay.drop", {"leeway.reason": reason}):
            await self._replay.drop(slot, reason)

    async def update_priorities(self, priorities: Mapping[str, float]) -> int:
        """See Replay.update_priorities."""
        return await self._replay.update_priorities(priorities)

    async def restore_version(self, version: PolicyVersion) -> int:
        """See Replay.restore_version."""
        return await self._replay.restore_version(version)

    async def pause_admission(self, paused: bool) -> None:
        """See Replay.pause_admission."""
        await self._replay.pause_admission(paused)

    async def stats(self) -> ReplayStats:
        """See Replay.stats."""
        return await self._replay.stats()

    async def group_ids(self) -> list[GroupId]:
        """See Replay.group_ids."""
        return await self._replay.group_ids()

    async def close(self) -> None:
        """See Replay.close."""
        await self._replay.close()


def _ids(lease: Lease) -> list[str]:
    return [group.group_id for group in lease.groups]
