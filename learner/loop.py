"""The learner's loop: draw, train, publish, acknowledge. A page on purpose.

wait for a batch   (replay: who is missing?)       engines generate all the while
train one step     -> policy version v
confirm v-1, publish v
acknowledge        -> the window moves, rollouts are admitted
"""

from __future__ import annotations

import time
from typing import Protocol

import msgspec

from leeway.learner.errors import LearnerStopped
from leeway.learner.weights.publisher import Published
from leeway.replay.errors import NoAnswer, WaitTimeout
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Lease, Replay
from leeway.replay.waiting import added

DRAW_SLICE_S = 5.0
"""A wait for a batch is cut into slices; between them stops are noticed, engines caught up."""


class Learning(Protocol):
    """What the loop drives; services/learning.py is the real one."""

    version: PolicyVersion
    num_steps: int
    draw_timeout_s: float

    async def stop_requested(self) -> bool: ...
    async def train(self, lease: Lease) -> None: ...
    async def publish(self) -> None: ...
    async def answer_requests(self) -> None: ...
    async def is_paused(self) -> bool: ...
    async def is_drained(self) -> bool: ...
    async def catch_up(self) -> None: ...
    async def confirm(self) -> Published | None: ...
    async def after_step(self, wait_s: float, published: Published | None) -> None: ...


async def run(learning: Learning, replay: Replay) -> None:
    """Train until `num_steps`, or until nothing is left of a drained run. Raises LearnerStopped
    when asked to stop, with nothing half done.
    """
    while learning.version < learning.num_steps:
        began = time.monotonic()
        lease = await draw(learning, replay)
        if lease is None:
            break
        wait_s = time.monotonic() - began
        await learning.train(lease)
        published = await learning.confirm()
        await learning.publish()
        await replay.acknowledge(lease, learning.version)
        await learning.after_step(wait_s, published)
        await learning.answer_requests()
    await learning.confirm()


async def draw(learning: Learning, replay: Replay) -> Lease | None:
    """The next batch, with the waits of all slices; None when the run is being drained and no batch
    can come. Raises WaitTimeout, naming who is missing, after `draw_timeout_s`, in which a pause
    does not count.
    """
    deadline = time.monotonic() + learning.draw_timeout_s
    is_drained = False
    waited_s: dict[str, float] = {}
    while True:
        if await learning.stop_requested():
            raise LearnerStopped(f"stopped before step {learning.version + 1}")
        try:
            lease = await replay.draw(timeout_s=0.0 if is_drained else DRAW_SLICE_S)
            return msgspec.structs.replace(lease, waited_s=added(waited_s, lease.waited_s))
        except WaitTimeout as timeout:
            waited_s = added(waited_s, timeout.waited_s)
            if is_drained and not isinstance(timeout, NoAnswer):
                return None
            await learning.answer_requests()
            # The last group may have come between the draw and this look: one more draw tells.
            is_drained = await learning.is_drained()
            if is_drained:
                continue
            if await learning.is_paused():
                deadline = time.monotonic() + learning.draw_timeout_s
            elif time.monotonic() > deadline:
                raise
        await learning.catch_up()
