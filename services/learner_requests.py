"""What REST asks of the learner, answered between two steps: checkpoint, publish, drain.

API   RunBoard.ask ---> waiting ---> working ---> done, failed
                        |            here, on rank 0 of the learner
                        expired: not taken up before its deadline

A drain closes admission when it is taken up, not when it is asked for: one that expires changes
nothing.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

from leeway.learner.weights.publisher import Published
from leeway.replay.board import RunBoard
from leeway.replay.errors import LeewayError
from leeway.replay.run_records import Action, ControlRequest
from leeway.replay.schema import PolicyVersion

log = logging.getLogger(__name__)

ORDER: Final[tuple[Action, ...]] = ("publish", "checkpoint", "drain")
"""Who asks for several at once gets the shorter ones first."""


class Steered(Protocol):
    """What requests are about; services/learning.py is the real one."""

    version: PolicyVersion

    async def save_now(self) -> None: ...
    async def publish(self) -> None: ...
    async def confirm(self) -> Published | None: ...
    async def close_admission(self) -> None: ...


class Requests:
    """Of one learner process."""

    def __init__(self, board: RunBoard, learning: Steered) -> None:
        self._board = board
        self._learning = learning
        self._drain: ControlRequest | None = None

    @property
    def is_draining(self) -> bool:
        """Whether the run is to end when nothing is left to train."""
        return self._drain is not None

    async def forget(self) -> bool:
        """At the start: what an earlier process was asked for, or began, is not done any more.
        Whether a drain was among it, which had closed admission."""
        was_draining = False
        for request in (await self._board.requests()).values():
            if request.is_open:
                was_draining |= (request.action, request.state) == ("drain", "working")
                text = "the learner started anew before it was done; ask again"
                await self._board.answer(request, "failed", text)
        return was_draining

    async def answer(self) -> None:
        """Do what is waiting. What fails is answered so, and training goes on. While the run is
        drained admission is kept closed, though somebody has opened it who knew nothing of it.
        """
        if self._drain is not None:
            await self._learning.close_admission()
        found = await self._board.requests()
        for action in ORDER:
            request = found.get(action)
            if request is not None and request.state == "waiting":
                await self._do(request)

    async def ended(self) -> None:
        """Training is over and its last checkpoint on the disk. What was asked for too late is
        answered so.
        """
        for request in (await self._board.requests()).values():
            if request.state == "waiting":
                text = "training had ended before it was taken up"
                await self._board.answer(request, "failed", text)
        if self._drain is not None:
            text = f"drained: training ended at version {self._learning.version}, with a checkpoint"
            await self._board.answer(self._drain, "done", text)
            await self._board.append_event("control", text)

    async def _do(self, request: ControlRequest) -> None:
        if not await self._board.answer(request, "working", request.detail):
            return
        try:
            text = await self._act(request)
        except LeewayError as error:
            log.warning("%s: %s", request.action, error)
            await self._board.answer(request, "failed", str(error))
            return
        if request.action != "drain":
            await self._board.answer(request, "done", text)
        await self._board.append_event("control", text)

    async def _act(self, request: ControlRequest) -> str:
        version = self._learning.version
        if request.action == "drain":
            await self._learning.close_admission()
            self._drain = request
            return "draining: training what is left"
        if request.action == "checkpoint":
            if version == 0:
                return "version 0 is the model that the run began with; there is nothing to write"
            await self._learning.save_now()
            return f"a checkpoint of version {version} is on the disk"
        await self._learning.confirm()
        await self._learning.publish()
        published = await self._learning.confirm()
        num_engines = published.num_engines if published else 0
        return f"version {version} is in use by {num_engines} engine{'s' * (num_engines != 1)}"
