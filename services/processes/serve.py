"""The serving process: Ray, the Serve applications, and the course of a run.

    starting -> evaluating-before -> training -> evaluating-after -> done

It moves the phase from `starting` to `training`; the learner ends `training`; workers start and
stop themselves by the phase they read. Run as `python -m leeway.services.processes.serve RUN_DIR`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from leeway.replay.board import RunBoard
from leeway.services.config import RunConfig
from leeway.services.layout import RunDirectory, open_run
from leeway.services.wiring import actor_spec, local_ray, starting_point

log = logging.getLogger(__name__)

WATCH_S = 1.0

T = TypeVar("T")


async def serve(run: RunDirectory) -> None:
    """Deploy, evaluate, follow the run; at SIGTERM, done or not, take all down again."""
    stopping = asyncio.Event()
    _listen(stopping)
    with local_ray():
        _listen(stopping)  # again: Ray sets handlers of its own when it starts
        await asyncio.sleep(0.05)  # a signal that came while Ray started is seen now
        if not stopping.is_set():
            await _deploy_and_follow(run, stopping)


def _listen(stopping: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)


async def _deploy_and_follow(run: RunDirectory, stopping: asyncio.Event) -> None:
    from leeway.actors.serve_app import deploy, undeploy

    config, url = run.read_config(), run.read_redis_url()
    model, version = starting_point(run, config)
    deployed = await _unless(stopping, deploy(actor_spec(run, config, url, model, version)))
    if deployed is None:
        return  # replicas that still load have nothing to hand over; they end with Ray
    board = RunBoard(url, run.root.name)
    try:
        course = Course(board, config, deployed.rollout, first_version=version)
        await _unless(stopping, course.follow())
        await stopping.wait()
    finally:
        await asyncio.to_thread(undeploy)
        await board.close()


async def _unless(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None when the stop comes first, and `work` is cancelled."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        stopped.cancel()
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


class Course:
    """Moves a run through its phases and asks for evaluations."""

    def __init__(
        self, board: RunBoard, config: RunConfig, rollout: Any, *, first_version: int
    ) -> None:
        self._board = board
        self._config = config
        self._rollout = rollout
        self._first_version = first_version
        """The version that engines and learner start from."""

    async def follow(self) -> None:
        """Returns when the run is done."""
        sections = await self._board.get_all()
        results: dict[str, Any] = sections.get("eval", {})
        if results.get("after"):
            results["history"].append(results.pop("after"))
        if "before" not in results:
            await self._board.set_phase("evaluating-before")
            results = {"before": await self._evaluate(0), "history": []}
            await self._board.put("eval", results)
        if self._first_version < self._config.learner.num_steps:
            await self._board.set_phase("training")
            await self._evaluate_meanwhile(results)
        else:
            # Resumed after the last step: the learner has nothing to train and goes on by itself.
            await self._board.wait_phase("evaluating-after", self._config.learner.draw_timeout_s)
        results["after"] = await self._evaluate(self._config.learner.num_steps)
        await self._board.put("eval", results)
        await self._board.set_phase("done")

    async def _evaluate_meanwhile(self, results: dict[str, Any]) -> None:
        """Evaluate every `eval.every_steps` steps until the learner ends the phase."""
        every = self._config.eval.every_steps
        evaluated = self._first_version
        while await self._board.phase() == "training":
            step = (await self._board.get_all()).get("learner", {}).get("step", 0)
            if every and step // every > evaluated // every:
                evaluated = step
                results["history"].append(await self._evaluate(step))
                await self._board.put("eval", results)
            await asyncio.sleep(WATCH_S)

    async def _evaluate(self, step: int) -> dict[str, Any] | None:
        count = self._config.eval.num_questions
        if count == 0:
            return None
        result = await self._rollout.evaluate.remote(count)
        exact_match = result["scores"]["exact_match"]
        await self._board.append_event(
            "evaluation", f"step {step}: held-out exact match {exact_match:.3f}"
        )
        return {"step": step, **result}


def main() -> int:
    """Exit code 0 when stopped or done; an error is a traceback in the log and exit code 1."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(serve(open_run(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
