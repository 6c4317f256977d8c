"""Probes, for Kubernetes or whoever watches the process. They need no token and hold no data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

from fastapi import APIRouter, Response

from leeway.replay.board import EngineRecord
from leeway.replay.errors import LeewayError
from leeway.services.api.examples import example, shown
from leeway.services.api.models import Health
from leeway.services.api.reader import REFRESH_S, Look, answer_deadline
from leeway.services.api.served import Served
from leeway.services.processes.joining import JOINED

HOLD_S: Final = 5.0
"""A run that was ready stays so for as long, while an engine lives: between a step and the commit
of its weights a tight bound leaves no engine, many times a minute."""


def health_router(served: Served) -> APIRouter:
    """`/livez`, `/readyz` and `/startupz`."""
    router = APIRouter(tags=["probes"])
    readiness = Readiness(served)
    not_ready: dict[int | str, dict[str, Any]] = {
        200: shown("ok"),
        503: {
            "model": Health,
            "description": "Not ready, with the reasons",
            **shown("not-ready"),
        },
    }

    @router.get("/livez", responses=example("ok"))
    async def livez() -> Health:
        """The process answers; says nothing about Redis, whose faults no restart of this heals."""
        return Health()

    @router.get("/startupz", responses=not_ready)
    async def startupz(response: Response) -> Health:
        """Redis has answered once since the process started."""
        if not served.reader.has_answered:
            try:
                await served.reader.look()
            except LeewayError as error:
                return _not_ready(response, [str(error)])
        return Health()

    @router.get("/readyz", responses=not_ready)
    async def readyz(response: Response) -> Health:
        """Redis answers, the learner has joined the run, and an engine lives that holds a version
        which may be sampled from.
        """
        try:
            reasons = await readiness.reasons()
        except LeewayError as error:
            return _not_ready(response, [str(error)])
        return _not_ready(response, reasons) if reasons else Health()

    return router


class Readiness:
    """Whether the run can play, looked at once every REFRESH_S however many ask: probes need no
    token, so they must not be a way to load Redis.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._engines: Sequence[EngineRecord] = ()
        self._looked_at = self._ready_at = float("-inf")
        self._looking = asyncio.Lock()

    async def reasons(self) -> list[str]:
        """Why not; none when it can. Raises StoreUnavailable."""
        look = await self._served.reader.look()
        async with answer_deadline(), self._looking:
            if time.monotonic() - self._looked_at > REFRESH_S:
                self._engines = await self._served.engines()
                self._looked_at = time.monotonic()
        now = time.monotonic()
        found = reasons_against(look, self._engines, self._served.config.replay.max_staleness)
        if not found:
            self._ready_at = now
        is_held = bool(self._engines) and now - self._ready_at < HOLD_S
        return [] if is_held else found


def reasons_against(look: Look, engines: Sequence[EngineRecord], max_staleness: int) -> list[str]:
    """Why the run is not ready to play. Learner at 7, bound 4, a new engine at 2 -> one reason.

    Version 0 is the model that both sides load. It is a version of the run once the learner has
    joined at it; before, nobody knows whether the learner resumes at a later one. An engine may be
    one ahead of what the buffer says: the learner publishes a version before it acknowledges it.
    """
    if look.phase == "done":
        return []
    if not engines:
        return ["no engine has registered yet"]
    if JOINED not in look.sections:
        return ["the learner has not joined yet, so what the engines hold may be no version of it"]
    newest = look.stats.learner_version
    if any(-1 <= newest - engine.version <= max_staleness for engine in engines):
        return []
    return [
        f"{engine.engine_id} holds version {engine.version}, the learner is at {newest} and the "
        f"bound is {max_staleness}"
        for engine in engines
    ]


def _not_ready(response: Response, reasons: list[str]) -> Health:
    response.status_code = 503
    return Health(status="not-ready", reasons=reasons)
