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
from typing import Any

from leeway.replay.board import RunBoard
from leeway.services.config import RunConfig
from leeway.services.layout import RunDirectory, open_run
from leeway.services.wiring import actor_spec, local_ray, starting_point

log = logging.getLogger(__name__)

WATCH_S = 1.0


async def serve(run: RunDirectory) -> None:
    """Deploy, evaluate, and follow the run until it is done and SIGTERM arrives, or SIGTERM alone."""
    config = run.read_config()
    url = run.read_redis_url()
    board = RunBoard(url, run.root.name)
    stopping = asyncio.Event()
    _listen(stopping)
    from leeway.actors.serve_app import undeploy

    with local_ray():
        _listen(stopping)  # again: Ray sets handlers of its own when it starts
        course = asyncio.create_task(_deploy_and_follow(run, config, url, board))
        stopped = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait({course, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if course.done():
                course.result()
                await stopped
        finally:
            course.cancel()
            await asyncio.gather(course, return_exceptions=True)
            await asyncio.to_thread(undeploy)
            await board.close()


def _listen(stopping: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)


async def _deploy_and_follow(
    run: RunDirectory, config: RunConfig, url: str, board: RunBoard
) -> None:
    from leeway.actors.serve_app import deploy

    model, version = starting_point(run, config)
    deployed = await deploy(actor_spec(run, config, url, model, version))
    await Course(board, config, deployed.rollout, first_version=version).follow()


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
        evaluated = 0
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
