"""Probes, for Kubernetes or whoever watches the process. They need no token and hold no data."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from leeway.replay.errors import LeewayError
from leeway.services.api.models import Health
from leeway.services.api.reader import Look
from leeway.services.api.served import Served


def health_router(served: Served) -> APIRouter:
    """`/livez`, `/readyz` and `/startupz`."""
    router = APIRouter(tags=["probes"])
    not_ready: dict[int | str, dict[str, Any]] = {
        503: {"model": Health, "description": "Not ready, with the reasons"}
    }

    @router.get("/livez")
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
        """Redis answers, and an engine lives that holds a version which may be sampled from."""
        try:
            look = await served.reader.look()
        except LeewayError as error:
            return _not_ready(response, [str(error)])
        reasons = reasons_against(look, served.config.replay.max_staleness)
        return _not_ready(response, reasons) if reasons else Health()

    return router


def reasons_against(look: Look, max_staleness: int) -> list[str]:
    """Why the run is not ready to play. Learner at 7, bound 4, a new engine at 2 -> one reason.

    An engine that has answered requests is ready, whatever its section says: it tells its version
    once a second, in which a fast learner may make several; and Serve gives no request to an engine
    that lacks a recent version.
    """
    if look.phase == "done":
        return []
    engines = look.each("policy")
    newest = look.stats.learner_version
    held = [(name, engine.get("version"), engine.get("num_requests")) for name, engine in engines]
    if any(
        version is not None and (0 <= newest - version <= max_staleness or num_requests)
        for _, version, num_requests in held
    ):
        return []
    return [
        f"{name} holds "
        + ("no version yet" if version is None else f"version {version}")
        + f", the learner is at {newest} and the bound is {max_staleness}"
        for name, version, _ in held
    ] or ["no engine has registered yet"]


def _not_ready(response: Response, reasons: list[str]) -> Health:
    response.status_code = 503
    return Health(status="not-ready", reasons=reasons)
