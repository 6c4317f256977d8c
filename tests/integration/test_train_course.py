"""The phases of a run and its evaluations, on a real run board, without engines or learner."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from leeway.replay.board import RunBoard
from leeway.replay.server import EmbeddedRedis
from leeway.services.config import RunConfig, load
from leeway.services.processes.serve import Course

CONFIG = load(None, ["learner.num_steps=5", "eval.num_questions=2"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
async def board(server: EmbeddedRedis) -> AsyncIterator[RunBoard]:
    found = RunBoard(server.url, f"test-{uuid.uuid4().hex}")
    await found.set_phase("starting")
    yield found
    await found.close()


class Workers:
    """Stands in for the Serve handle: each evaluation is better by a tenth."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.evaluate = SimpleNamespace(remote=self._evaluate)

    async def _evaluate(self, count: int) -> dict[str, Any]:
        self.num_asked += 1
        return {"scores": {"exact_match": self.num_asked / 10}, "num_questions": count}


def start(board: RunBoard, first_version: int, config: RunConfig = CONFIG) -> asyncio.Task[None]:
    course = Course(board, config, Workers(), first_version=first_version)
    return asyncio.create_task(course.follow())


async def evaluations(board: RunBoard) -> dict[str, Any]:
    return (await board.get_all())["eval"]


async def test_a_run_is_evaluated_before_and_after_and_trains_between(board: RunBoard):
    course = start(board, 0)
    await board.wait_phase("training", 5)
    assert (await evaluations(board))["before"]["scores"] == {"exact_match": 0.1}
    await board.set_phase("evaluating-after")
    await asyncio.wait_for(course, 5)
    assert await board.phase() == "done"
    after = (await evaluations(board))["after"]
    assert (after["step"], after["scores"]) == (5, {"exact_match": 0.2})


async def test_a_run_resumed_after_its_last_step_does_not_train_again(board: RunBoard):
    await board.put("eval", {"before": None, "history": []})
    course = start(board, 5)
    await asyncio.sleep(0.2)
    assert await board.phase() == "starting"
    await board.set_phase("evaluating-after")
    await asyncio.wait_for(course, 5)
    assert (await evaluations(board))["after"]["step"] == 5


async def test_a_learner_that_is_through_before_the_engines_are_up_is_not_overruled(board):
    await board.put("eval", {"before": None, "history": []})
    await board.set_phase("evaluating-after")
    await asyncio.wait_for(start(board, 5), 5)
    assert await board.phase() == "done"


async def test_a_run_resumed_for_more_steps_keeps_its_earlier_end_in_the_history(board: RunBoard):
    earlier = {"step": 3, "scores": {"exact_match": 0.7}}
    await board.put("eval", {"before": earlier, "history": [], "after": earlier})
    course = start(board, 3)
    await board.wait_phase("training", 5)
    await board.set_phase("evaluating-after")
    await asyncio.wait_for(course, 5)
    found = await evaluations(board)
    assert (found["history"], found["after"]["step"]) == ([earlier], 5)


async def test_without_questions_nothing_is_evaluated(board: RunBoard):
    course = start(board, 0, load(None, ["eval.num_questions=0"]))
    await board.wait_phase("training", 5)
    await board.set_phase("evaluating-after")
    await asyncio.wait_for(course, 5)
    found = await evaluations(board)
    assert (found["before"], found["after"]) == (None, None)


async def test_between_the_ends_it_evaluates_every_so_many_steps_also_when_resumed(board: RunBoard):
    every_two = load(None, ["learner.num_steps=9", "eval.num_questions=2", "eval.every_steps=2"])
    await board.put("eval", {"before": {"step": 0}, "history": []})
    await board.put("learner", {"step": 3})
    course = start(board, 3, every_two)
    await board.wait_phase("training", 5)
    await asyncio.sleep(0.2)
    assert (await evaluations(board))["history"] == []
    await board.put("learner", {"step": 4})
    async with asyncio.timeout(5):
        while not (history := (await evaluations(board))["history"]):
            await asyncio.sleep(0.05)
    assert [entry["step"] for entry in history] == [4]
    await board.set_phase("evaluating-after")
    await asyncio.wait_for(course, 5)
