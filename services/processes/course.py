"""The course of a run: who moves it through its phases, and asks for evaluations.

    starting -> evaluating-before -> training -> evaluating-after -> done
                                              ^ the learner ends it

Workers start and stop themselves by the phase they read. The course acts on the phase that the
board shows, never on one that it remembers: so it may be started again at any point of a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from leeway.replay.board import RunBoard
from leeway.replay.errors import LeewayError
from leeway.services.config import RunConfig
from leeway.services.processes.leading import while_leading

WATCH_S: Final = 1.0

Evaluate = Callable[[int], Awaitable[dict[str, Any]]]
"""Plays so many held-out questions; see RolloutServer.evaluate."""


class RunFailed(LeewayError):
    """A part of the run reported that it cannot go on."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        """`exit_code`: that of the error; see LeewayError."""
        super().__init__(message)
        self.exit_code = exit_code


class Course:
    """Of one run; `keep` sees to it that one acts at a time."""

    def __init__(self, board: RunBoard, config: RunConfig, evaluate: Evaluate) -> None:
        self._board = board
        self._config = config
        self._play = evaluate
        self._evaluated: int | None = None
        """Step of the last evaluation of this phase of training; None outside of it."""

    async def keep(self) -> None:
        """Follow the run while no other process does, and again when it goes on after its end;
        until cancelled. Raises RunFailed when a worker reports that it cannot go on."""
        await while_leading(self._board.lead, self._follow_on)

    async def _follow_on(self) -> None:
        while True:
            await self.follow()
            await asyncio.sleep(WATCH_S)

    async def follow(self) -> None:
        """Returns when the run is done. Raises RunFailed."""
        await self._board.put("failure", {"reason": None})
        while (phase := await self._board.phase()) != "done":
            await self._check()
            if phase == "training":
                await self._evaluate_meanwhile()
                await asyncio.sleep(WATCH_S)
            elif phase == "evaluating-after":
                await self._finish()
            else:
                await self._open(phase)

    async def _check(self) -> None:
        failure = (await self._board.get_all()).get("failure", {})
        if failure.get("reason"):
            reason = f"rollouts cannot go on: {failure['reason']}"
            raise RunFailed(reason, failure.get("exit_code", 1))

    async def _open(self, phase: str | None) -> None:
        """Evaluate before training, unless that was done; then let the workers play."""
        results = await self._results()
        if results.get("after"):
            results["history"].append(results.pop("after"))
            await self._board.put("eval", results)
        if "before" not in results:
            if phase != "evaluating-before":
                await self._board.set_phase("evaluating-before")
                phase = "evaluating-before"
            results["before"] = await self._evaluate(0)
            await self._board.put("eval", results)
        await self._move(phase, "training")

    async def _evaluate_meanwhile(self) -> None:
        """Once more whenever training has passed `eval.every_steps` steps."""
        every, step = self._config.eval.every_steps, await self._step()
        if self._evaluated is None:
            self._evaluated = step
        elif every and step // every > self._evaluated // every:
            self._evaluated = step
            results = await self._results()
            evaluation = await self._evaluate(step)
            # The board is read every second by several: transcripts of the newest one only, or what
            # they read grows for as long as the run. eval.json keeps them all.
            for earlier in filter(None, results["history"]):
                earlier.pop("samples", None)
            results["history"].append(evaluation)
            await self._board.put("eval", results)

    async def _finish(self) -> None:
        self._evaluated = None
        results = await self._results()
        # A drained run ends before learner.num_steps; one that had nothing to train says nothing.
        step = await self._step(default=self._config.learner.num_steps)
        results["after"] = await self._evaluate(step)
        # Before the phase: the learner writes the results down when it reads `done`.
        await self._board.put("eval", results)
        await self._move("evaluating-after", "done")

    async def _move(self, expected: str | None, phase: str) -> None:
        """Unless somebody has moved the run meanwhile: the learner has ended training, or has begun
        it anew."""
        if await self._board.phase() == expected:
            await self._board.set_phase(phase)

    async def _results(self) -> dict[str, Any]:
        return (await self._board.get_all()).get("eval", {"history": []})

    async def _step(self, default: int = 0) -> int:
        return (await self._board.get_all()).get("learner", {}).get("step", default)

    async def _evaluate(self, step: int) -> dict[str, Any] | None:
        count = self._config.eval.num_questions
        if count == 0:
            return None
        result = await self._play(count)
        exact_match = result["scores"]["exact_match"]
        await self._board.append_event(
            "evaluation", f"step {step}: held-out exact match {exact_match:.3f}"
        )
        return {"step": step, **result}
