"""Who leads a run: at most one of those that would, for as long as it keeps saying so.

take(me) -> me: it leads for LEAD_S more       take(me) -> other: that one leads
nothing said for LEAD_S: the next that takes it leads
"""

from __future__ import annotations

from typing import Final

from leeway.replay.connection import Link, ScriptSet
from leeway.replay.keys import BoardKeys

LEAD_S: Final = 15.0
"""How long a lead lasts after it was taken. Whoever does not hear by then that it still leads
stops what only the leader may do."""


class RunLead:
    """Of one run, in Redis."""

    def __init__(self, keys: BoardKeys, link: Link) -> None:
        self._scripts = ScriptSet(link, keys)

    async def take(self, candidate: str) -> str:
        """Who leads now: `candidate`, for LEAD_S from now on, unless another leads already."""
        leader = await self._scripts.run("lead", id=candidate, ttl_ms=int(LEAD_S * 1000))
        return bytes(leader).decode()

    async def resign(self, candidate: str) -> None:
        """Let the next one lead at once; harmless where `candidate` does not lead."""
        await self._scripts.run("resign", id=candidate)
