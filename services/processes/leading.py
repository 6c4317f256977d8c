"""One course at a time, however many processes would lead the run.

A new Ray cluster that KubeRay starts beside the old one brings a course of its own, as a second
`leeway serve` does. Both would ask for evaluations and move the phase. So each asks the run board
whether it leads, every BEAT_S; those that do not wait for LEAD_S of silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from leeway.replay.errors import LeewayError
from leeway.replay.run_lead import LEAD_S, RunLead

log = logging.getLogger(__name__)

BEAT_S: Final = 3.0
RESIGN_S: Final = 2.0

Work = Callable[[], Coroutine[Any, Any, None]]
"""What only the leader may do. It is cancelled when the lead is lost, and begun again with it."""


async def while_leading(lead: RunLead, work: Work) -> None:
    """Do `work` whenever this process leads the run, never else. Returns when `work` does; raises
    what it raises, and StoreUnavailable when Redis gives no answer for long."""
    me = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    seen = me
    try:
        while True:
            asked = time.monotonic()
            leader = await lead.take(me)
            if leader == me and await _led(lead, me, work, until=asked + LEAD_S):
                return
            if leader not in (me, seen):
                log.info("%s leads this run; waiting until it ends or is silent", leader)
            seen = leader
            await asyncio.sleep(BEAT_S)
    finally:
        # Where Redis does not answer, its clock ends the lead.
        with contextlib.suppress(TimeoutError, LeewayError):
            await asyncio.wait_for(lead.resign(me), RESIGN_S)


async def _led(lead: RunLead, me: str, work: Work, until: float) -> bool:
    """Whether `work` came to its end, before the lead was lost. `until`: when the lead ends unless
    it is taken again, on the monotonic clock."""
    doing = asyncio.create_task(work())
    asking: asyncio.Task[bool] | None = None
    try:
        while True:
            begun = time.monotonic()
            asking = asyncio.create_task(_again(lead, me))
            await asyncio.wait(
                {doing, asking}, timeout=until - begun, return_when=asyncio.FIRST_COMPLETED
            )
            if doing.done():
                doing.result()
                return True
            if not asking.done() or not asking.result():
                log.warning("lost the lead of this run: another has it, or Redis is silent")
                return False
            # Redis was asked after this moment and a beat, so it never ends the lead first.
            until = begun + BEAT_S + LEAD_S
    finally:
        tasks: list[asyncio.Task[Any]] = [doing] if asking is None else [doing, asking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _again(lead: RunLead, me: str) -> bool:
    """Whether the lead was still to be had, a beat from now."""
    await asyncio.sleep(BEAT_S)
    return await lead.take(me) == me
