"""The slots that a rollout worker holds, written down: its successor gives them back at once.

A worker that is killed leaves slots that nobody fills. Until they expire, `replay.slot_timeout_s`,
the version window counts them, and the learner may have to wait for groups that cannot come.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final, Protocol

import msgspec

from leeway.replay.errors import SlotExpired, StoreUnavailable
from leeway.replay.schema import Group, PolicyVersion
from leeway.replay.store import Replay, Slot, VersionSource
from leeway.replay.traced_replay import TracedReplay

REASON: Final = "worker-died"
"""Of a drop."""


class Sections(Protocol):
    """Where it is written down: the run board."""

    async def put(self, section: str, value: dict[str, Any]) -> None: ...
    async def get_all(self) -> dict[str, dict[str, Any]]: ...


class HeldSlots(TracedReplay):
    """The Replay of one worker, whose slots are in the section `slots:WORKER` of the run board.

    The section may name slots that were filled since: to drop one of those does nothing.
    """

    def __init__(self, replay: Replay, board: Sections, worker_id: str) -> None:
        super().__init__(replay)
        self._board = board
        self._section = f"slots:{worker_id}"
        self._held: dict[str, Slot] = {}

    async def return_those_of_the_dead(self) -> int:
        """Drop what a worker of this name has left behind; how many it had written down. Call it
        before the first admission, once it is known to be dead."""
        section = (await self._board.get_all()).get(self._section, {})
        left = msgspec.convert(section.get("slots", []), list[Slot])
        for slot in left:
            await self._replay.drop(slot, REASON)
        await self._write()
        return len(left)

    async def admit(
        self, n: int, version: PolicyVersion | VersionSource, timeout_s: float
    ) -> list[Slot]:
        """See Replay.admit."""
        slots = await super().admit(n, version, timeout_s)
        self._held |= {slot.slot_id: slot for slot in slots}
        # A worker plays with what it was granted, whether or not that could be written down.
        with contextlib.suppress(StoreUnavailable):
            await self._write()
        return slots

    async def add(self, slot: Slot, group: Group) -> None:
        """See Replay.add."""
        try:
            await super().add(slot, group)
        except SlotExpired:
            self._held.pop(slot.slot_id, None)
            raise
        self._held.pop(slot.slot_id, None)

    async def drop(self, slot: Slot, reason: str) -> None:
        """See Replay.drop."""
        await super().drop(slot, reason)
        self._held.pop(slot.slot_id, None)

    async def _write(self) -> None:
        slots = msgspec.to_builtins(list(self._held.values()))
        await self._board.put(self._section, {"slots": slots})
