"""The phases of a run and its evaluations, on a real run board, without engines or learner."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest.mock import ANY

import pytest

from leeway.replay.board import RunBoard
from leeway.replay.server import EmbeddedRedis
from leeway.services.config import RunConfig, load
from leeway.services.ending import until_done
from leeway.services.processes.course import Course, RunFailed

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
    """Stand in for the rollout workers: each evaluation is better by a tenth."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def evaluate(self, count: int) -> dict[str, Any]:
        self.num_asked += 1
        return {
            "scores": {"exact_match": self.num_asked / 10},
            "num_questions": count,
            "samples": [{"text": f"transcript {self.num_asked}"}],
        }


def start(board: RunBoard, config: RunConfig = CONFIG) -> asyncio.Task[None]:
    return asyncio.create_task(Course(board, config, Workers().evaluate).follow())


async def evaluations(board: RunBoard) -> dict[str, Any]:
    return (await board.get_all())["eval"]


async def test_a_run_is_evaluated_before_and_after_and_trains_between(board: RunBoard):
    course = start(board)
    await board.wait_phase("training", 5)
    assert (await evaluations(board))["before"]["scores"] == {"exact_match": 0.1}
    await board.set_phase("evaluating-after")
    await asyncio.wait_for(course, 5)
    assert await board.phase() == "done"
    after = (await evaluations(board))["after"]
    assert (after["step"], after["scores"]) == (5, {"exact_match": 0.2})


async def test_a_course_that_starts_again_while_the_run_trains_does_not_begin_anew(board: RunBoard):
    await board.put("eval", {"before": None, "history": []})
    await board.set_phase("training")
    course = start(board)
    await asyncio.sleep(0.2)
    assert (await board.phase(), await evaluations(board)) == (
        "training",
        {"before": None, "history": [], "updated_at": ANY},
    )
    course.cancel()


async def test_a_course_that_starts_again_before_the_last_evaluation_plays_it(board: RunBoard):
    await board.put("eval", {"before": None, "history": []})
    await board.set_phase("evaluating-after")
    await asyncio.wait_for(start(board), 5)
    assert await board.phase() == "done"
    assert (await evaluations(board))["after"]["step"] == 5


async def test_what_was_evaluated_before_training_is_not_evaluated_again(board: RunBoard):
    await board.put("eval", {"before": {"step": 0}, "history": []})
    course = start(board)
    await board.wait_phase("training", 5)
    await board.set_phase("evaluating-after")
    await asyncio.wait_for(course, 5)
    found = await evaluations(board)
    assert (found["before"], found["after"]["scores"]) == ({"step": 0}, {"exact_match": 0.1})


async def test_a_worker_that_cannot_go_on_ends_the_course_with_its_reason(board: RunBoard):
    course = start(board)
    await board.wait_phase("training", 5)
    await board.put("failure", {"reason": "worker-0: too many groups failed"})
    with pytest.raises(RunFailed, match="rollouts cannot go on: worker-0: too many groups"):
        await asyncio.wait_for(course, 5)


async def test_a_failure_of_an_earlier_attempt_is_forgotten(board: RunBoard):
    await board.put("failure", {"reason": "worker-0: yesterday"})
    course = start(board)
    assert await board.wait_phase("training", 5) == "training"
    course.cancel()


async def test_a_run_that_goes_on_after_its_end_is_followed_again(board: RunBoard):
    await board.put("eval", {"before": None, "history": []})
    await board.set_phase("done")
    course = asyncio.create_task(Course(board, CONFIG, Workers().evaluate).keep())
    await asyncio.sleep(0.2)
    assert await board.phase() == "done"
    await board.set_phase("starting")
    assert await board.wait_phase("training", 5) == "training"
    course.cancel()


async def test_a_learner_with_nothing_to_train_ends_training_whenever_the_course_begins_it(board):
    await board.put("eval", {"before": None, "history": []})

    async def go_on() -> bool:
        return False

    learner = asyncio.create_task(until_done(board, go_on, timeout_s=10))
    await board.set_phase("training")
    await asyncio.wait_for(asyncio.gather(start(board), learner), 10)
    assert await board.phase() == "done"


async def test_a_run_resumed_for_more_steps_keeps_its_earlier_end_in_the_history(board: RunBoard):
    earlier = {"step": 3, "scores": {"exact_match": 0.7}}
    await board.put("eval", {"before": earlier, "history": [], "after": earlier})
    course = start(board)
    await board.wait_phase("training", 5)
    await board.set_phase("evaluating-after")
    await asyncio.wait_for(course, 5)
    found = await evaluations(board)
    assert (found["history"], found["after"]["step"]) == ([earlier], 5)


async def test_without_questions_nothing_is_evaluated(board: RunBoard):
    course = start(board, load(None, ["eval.num_questions=0"]))
    await board.wait_phase("training", 5)
    await board.set_phase("evaluating-after")
    await asyncio.wait_for(course, 5)
    found = await evaluations(board)
    assert (found["before"], found["after"]) == (None, None)


async def test_between_the_ends_it_evaluates_every_so_many_steps_also_when_resumed(board: RunBoard):
    every_two = load(None, ["learner.num_steps=9", "eval.num_questions=2", "eval.every_steps=2"])
    await board.put("eval", {"before": {"step": 0}, "history": []})
    await board.put("learner", {"step": 3})
    course = start(board, every_two)
    await board.wait_phase("training", 5)
    await asyncio.sleep(1.2)
    assert (await evaluations(board))["history"] == []
    await board.put("learner", {"step": 4})
    async with asyncio.timeout(5):
        while not (history := (await evaluations(board))["history"]):
            await asyncio.sleep(0.05)
    assert [entry["step"] for entry in history] == [4]
    await board.put("learner", {"step": 6})
    async with asyncio.timeout(5):
        while len(history := (await evaluations(board))["history"]) == 1:
            await asyncio.sleep(0.05)
    # Transcripts of the newest one only, or the section would grow for as long as the run.
    assert [(entry["step"], "samples" in entry) for entry in history] == [(4, False), (6, True)]
    await board.set_phase("evaluating-after")
    await asyncio.wait_for(course, 5)


async def test_of_two_courses_of_one_run_one_asks_for_evaluations(board: RunBoard):
    first, second = Workers(), Workers()
    courses = [
        asyncio.create_task(Course(board, CONFIG, workers.evaluate).keep())
        for workers in (first, second)
    ]
    await board.wait_phase("training", 60)
    await asyncio.sleep(0.3)
    assert first.num_asked + second.num_asked == 1
    await board.set_phase("evaluating-after")
    await board.wait_phase("done", 60)
    assert {first.num_asked, second.num_asked} == {0, 2}
    for course in courses:
        course.cancel()
    await asyncio.gather(*courses, return_exceptions=True)
