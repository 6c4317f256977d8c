"""Steering the run: pause, resume, drain, checkpoint, publish.

Admission is the buffer's, so the API opens and closes it itself for pause and resume. The rest is a
request on the run board, which the learner takes up between two steps; for a drain the learner
closes admission then, so that a request which nobody takes up changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Final, Literal

from fastapi import APIRouter, HTTPException, Response

from leeway.replay.run_records import Action, ControlRequest
from leeway.services.api import parameters
from leeway.services.api.examples import example, shown
from leeway.services.api.parameters import WaitS
from leeway.services.api.problems import documented
from leeway.services.api.reader import answer_deadline
from leeway.services.api.resources import ControlAnswer
from leeway.services.api.served import Served

TAKE_UP_S: Final = 600.0
"""Within which the learner may take up a request; a step may be long."""
LOOK_S: Final = 0.1

_AWAITED: Final[dict[Action, str]] = {
    "drain": "the learner closes admission, trains what is left, writes a checkpoint and ends",
    "checkpoint": "the learner writes it after the step it is in",
    "publish": "the learner sends its version to every engine after the step it is in",
}


def control_router(served: Served) -> APIRouter:
    """`/v1/control`."""
    router = APIRouter(prefix="/v1/control", tags=["control"])
    accepted = {
        **example("control"),
        202: {
            "model": ControlAnswer,
            "description": "Accepted; ask again for the answer",
            **shown("control"),
        },
        **documented(409),
    }

    @router.post("/pause", responses=example("paused"))
    async def pause() -> ControlAnswer:
        """Close admission. Groups in play are played to their end, and what is buffered is trained;
        then the learner waits, for as long as the pause lasts.
        """
        return await _set_paused(served, True)

    @router.post("/resume", responses={**example("paused"), **documented(409)})
    async def resume() -> ControlAnswer:
        """Open admission again. 409 while a drain waits or is under way: it cannot be undone."""
        async with answer_deadline():
            drain = await served.board.request("drain")
        if drain is not None and drain.is_open:
            raise HTTPException(409, "the run is being drained and ends; resume it afterwards")
        return await _set_paused(served, False)

    @router.post("/drain", responses=accepted)
    async def drain(response: Response, wait_s: WaitS = 0) -> ControlAnswer:
        """The learner closes admission, trains what is left, writes a checkpoint, and ends the run
        as if learner.num_steps were reached. It can be resumed.
        """
        await _check_runs(served)
        return await _ask(served, "drain", response, wait_s)

    @router.post("/checkpoint", responses=accepted)
    async def checkpoint(response: Response, wait_s: WaitS = 5) -> ControlAnswer:
        """Write a checkpoint now."""
        await _check_runs(served)
        return await _ask(served, "checkpoint", response, wait_s)

    @router.post("/publish", responses=accepted)
    async def publish(response: Response, wait_s: WaitS = 5) -> ControlAnswer:
        """Send the learner's version to every engine now."""
        await _check_runs(served)
        return await _ask(served, "publish", response, wait_s)

    @router.get("/{action}", responses=example("control"))
    async def latest(
        action: Annotated[
            Literal["drain", "checkpoint", "publish"],
            parameters.name("checkpoint", "What was asked of the learner."),
        ],
    ) -> ControlAnswer:
        """How far the latest request of this kind is."""
        async with answer_deadline():
            request = await served.board.request(action)
        if request is None:
            raise HTTPException(404, "nobody has asked for it in this run")
        return _answer_of(request)

    return router


async def _check_runs(served: Served) -> None:
    look = await served.reader.look()
    if look.phase != "training":
        raise HTTPException(
            409, f"the run is in phase {look.phase}; the learner takes requests up in training"
        )


async def _set_paused(served: Served, paused: bool) -> ControlAnswer:
    now = time.time()
    async with answer_deadline():
        await served.replay.pause_admission(paused)
    text = "admission is closed" if paused else "admission is open"
    await served.note("control", text)
    return ControlAnswer(
        action="pause" if paused else "resume",
        request_id=None,
        state="done",
        detail=text,
        asked_at=now,
        deadline_at=None,
    )


async def _ask(served: Served, action: Action, response: Response, wait_s: float) -> ControlAnswer:
    async with answer_deadline():
        request = await served.board.ask(action, _AWAITED[action], TAKE_UP_S)
    ends_at = time.monotonic() + wait_s
    while request.is_open and time.monotonic() < ends_at:
        await asyncio.sleep(LOOK_S)
        async with answer_deadline():
            found = await served.board.request(action)
        if found is None or found.request_id != request.request_id:
            break
        request = found
    response.status_code = 202 if request.is_open else 200
    return _answer_of(request)


def _answer_of(request: ControlRequest) -> ControlAnswer:
    return ControlAnswer(
        action=request.action,
        request_id=request.request_id,
        state=request.state,
        detail=request.detail,
        asked_at=request.asked_at,
        deadline_at=request.deadline_at,
    )
