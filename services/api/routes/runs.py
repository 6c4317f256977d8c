"""The status of the run, and the runs of its folder."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response

from leeway.replay.errors import ConfigurationError
from leeway.services.api import parameters
from leeway.services.api.examples import RUN, example
from leeway.services.api.models import Status
from leeway.services.api.reader import Look
from leeway.services.api.resources import Page, RunItem
from leeway.services.api.served import PROCESS, Served
from leeway.services.api.tags import answer
from leeway.services.layout import RunDirectory
from leeway.services.snapshot import SILENT_S

OWN_LOOP: Final = f"loop:{PROCESS}"
"""The section that this API writes, however long the run has been over."""
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class _Summary(msgspec.Struct, frozen=True):
    """What is read of a summary.json."""

    steps: int | None = None
    exact_match_after: float | None = None


def runs_router(served: Served) -> APIRouter:
    """`/v1/status` and `/v1/runs`."""
    router = APIRouter(prefix="/v1", tags=["runs"])

    @router.get("/status", response_model=Status, responses=example("status"))
    async def status(request: Request) -> Response:
        """The run at this moment; at most half a second old."""
        look = await served.reader.look()
        return answer(request.headers, look.body, look.tag)

    @router.get("/runs", responses=example("runs"))
    async def runs(
        cursor: Annotated[str | None, parameters.cursor(RUN, pattern=NAME)] = None,
        limit: Annotated[int, parameters.limit(200)] = 50,
    ) -> Page[RunItem]:
        """Runs in the folder that this API sees, newest name first; the served one among them."""
        look = await served.reader.look()
        return await asyncio.to_thread(_page, served, look, cursor, limit)

    @router.get("/runs/{name}", responses=example("run"))
    async def run(
        name: Annotated[str, parameters.name(RUN, "Name of a run: that of its directory.")],
    ) -> RunItem:
        """One of them."""
        look = await served.reader.look()
        found = await asyncio.to_thread(_one, served, look, name)
        if found is None:
            raise HTTPException(404, "no run of this name in the folder of this API")
        return found

    return router


# The folder may hold thousands of runs on a slow disk: what follows runs on a thread.


def _page(served: Served, look: Look, cursor: str | None, limit: int) -> Page[RunItem]:
    names = sorted(_names(served), reverse=True)
    behind = [name for name in names if cursor is None or name < cursor]
    page = [_item(served, look, name) for name in behind[:limit]]
    return Page(items=page, next=page[-1].name if len(behind) > limit else None)


def _one(served: Served, look: Look, name: str) -> RunItem | None:
    return _item(served, look, name) if name in _names(served) else None


def _names(served: Served) -> set[str]:
    """Of the runs in the folder, the served one among them: its directory may be elsewhere."""
    folder = served.run.parent
    return {path.parent.name for path in folder.glob("*/config.toml")} | {served.run.name}


def _item(served: Served, look: Look, name: str) -> RunItem:
    directory = RunDirectory(served.run.parent / name)
    is_current = name == served.run.name
    summary = _summary(directory.summary)
    try:
        state = directory.read_state()
        is_running = directory.running_pid() is not None
    except ConfigurationError:
        state, is_running = None, False
    is_over = summary is not None or (is_current and look.phase == "done")
    run = look.snapshot.run
    started_at = look.section("run").get("started_at") if is_current else None
    if is_current:
        is_running = is_running or _is_alive(look)
    return RunItem(
        name=name,
        is_current=is_current,
        state="done" if is_over else "running" if is_running else "stopped",
        phase=run.phase if is_current else None,
        started_at=state.started_at if state else started_at,
        step=run.step if is_current else summary.steps if summary else None,
        exact_match=summary.exact_match_after if summary else None,
    )


def _is_alive(look: Look) -> bool:
    """Whether any process of the run but this one has written to its board a moment ago."""
    return any(
        time.time() - section.get("updated_at", 0.0) <= SILENT_S
        for name, section in look.sections.items()
        if name != OWN_LOOP
    )


def _summary(file: Path) -> _Summary | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Summary)
    except (OSError, msgspec.DecodeError):
        return None
