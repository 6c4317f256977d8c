"""The last trajectories, and one of them turn by turn."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, HTTPException

from leeway.services.api import parameters
from leeway.services.api.examples import TRAJECTORY, example
from leeway.services.api.reader import answer_deadline
from leeway.services.api.resources import Page, TrajectoryDetail, TrajectoryItem
from leeway.services.api.served import Served


def trajectories_router(served: Served) -> APIRouter:
    """`/v1/trajectories`."""
    router = APIRouter(prefix="/v1/trajectories", tags=["trajectories"])

    @router.get("", responses=example("trajectories"))
    async def trajectories(
        cursor: Annotated[int | None, parameters.cursor(41, ge=1, le=2**53)] = None,
        limit: Annotated[int, parameters.limit(200)] = 20,
    ) -> Page[TrajectoryItem]:
        """The last ones that reached the buffer, newest first. This API keeps up to 256 groups,
        also those that have been trained since; when many come at once it passes some over.
        """
        async with answer_deadline():
            await served.recent.look()
        items, following = served.recent.page(cursor, limit)
        return Page(items=items, next=None if following is None else str(following))

    @router.get("/{trajectory_id}", responses=example("trajectory"))
    async def trajectory(
        trajectory_id: Annotated[
            str, parameters.name(TRAJECTORY, "As the list has it.", min_length=1, max_length=300)
        ],
    ) -> TrajectoryDetail:
        """One of them, as text, turn by turn."""
        async with answer_deadline():
            await served.recent.look()
        found = await served.recent.detail(trajectory_id)
        if found is None:
            raise HTTPException(404, "it is not among the last trajectories")
        return found

    return router
