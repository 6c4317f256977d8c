"""What the run board keeps beside its sections, in a Redis of its own, and who answers requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from leeway.replay import run_records
from leeway.replay.board import RunBoard
from leeway.replay.errors import ConfigurationError, TransferError
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.services.config import load
from leeway.services.learner_requests import Requests
from leeway.services.live_settings import LIVE_KEYS, applied, changed, text_of, value_of


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    folder: Path = tmp_path_factory.mktemp("redis")
    server = EmbeddedRedis.start(folder, "records")
    yield server
    server.stop()


@pytest.fixture
async def board(redis: EmbeddedRedis, request: pytest.FixtureRequest) -> AsyncIterator[RunBoard]:
    board = RunBoard(redis.url, f"run-{abs(hash(request.node.name))}")
    yield board
    await board.close()


async def test_steps_are_read_behind_a_step_in_order(board: RunBoard):
    for step in (1, 2, 3):
        await board.append_step({"step": step, "loss": step / 2})
    assert await board.steps(after=1, count=1) == [{"step": 2, "loss": 1.0}]
    assert [line["step"] for line in await board.steps()] == [1, 2, 3]


async def test_a_step_trained_again_takes_the_place_of_it_and_of_those_behind(board: RunBoard):
    for step in (1, 2, 3):
        await board.append_step({"step": step, "try": 1})
    await board.append_step({"step": 2, "try": 2})
    assert await board.steps() == [{"step": 1, "try": 1}, {"step": 2, "try": 2}]


async def test_only_the_newest_steps_are_kept(board: RunBoard, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_records, "MAX_STEPS", 2)
    for step in (1, 2, 3, 4):
        await board.append_step({"step": step})
    assert [line["step"] for line in await board.steps()] == [3, 4]


async def test_publishes_are_told_newest_first_with_their_time(board: RunBoard):
    await board.append_publish({"version": 1})
    await board.append_publish({"version": 2})
    [newest] = await board.publishes(count=1)
    assert newest["version"] == 2 and newest["at"] > 1.7e9


async def test_asking_twice_is_one_request(board: RunBoard):
    first = await board.ask("checkpoint", "soon", 60.0)
    assert await board.ask("checkpoint", "soon", 60.0) == first
    await board.answer(first, "done", "written")
    assert (await board.ask("checkpoint", "soon", 60.0)).request_id != first.request_id


async def test_what_nobody_took_up_in_time_is_expired_and_can_be_asked_again(board: RunBoard):
    late = await board.ask("publish", "soon", -1.0)
    found = await board.request("publish")
    assert found is not None and (found.state, found.is_open) == ("expired", False)
    assert (await board.ask("publish", "soon", 60.0)).request_id != late.request_id


async def test_settings_add_up_and_count_their_changes(board: RunBoard):
    await board.change_settings({"learner.num_steps": 5}, await board.settings())
    values = {"learner.num_steps": 6, "rollout.max_failure_share": 0.5}
    await board.change_settings(values, await board.settings())
    live = await board.settings()
    assert (live.revision, live.values["learner.num_steps"], len(live.values)) == (2, 6, 2)


async def test_of_two_changes_of_the_same_settings_one_is_made(board: RunBoard):
    before = await board.settings()
    changes = [board.change_settings({"learner.num_steps": n}, before) for n in (5, 6)]
    made = [found for found in await asyncio.gather(*changes) if found is not None]
    assert made == [await board.settings()]


async def test_two_who_ask_at_the_same_time_ask_once(board: RunBoard):
    asked = await asyncio.gather(*(board.ask("publish", "soon", 60.0) for _ in range(5)))
    assert len({request.request_id for request in asked}) == 1


async def test_a_request_is_taken_up_by_its_deadline_or_not_at_all(board: RunBoard):
    late = await board.ask("drain", "soon", -1.0)
    assert not await board.answer(late, "working", "begun")
    found = await board.request("drain")
    assert found is not None and found.state == "expired"


async def test_an_answer_to_a_request_that_was_replaced_is_not_written(board: RunBoard):
    late = await board.ask("publish", "soon", -1.0)
    new = await board.ask("publish", "soon", 60.0)
    assert not await board.answer(late, "done", "sent")
    assert await board.request("publish") == new


async def test_what_is_over_is_not_answered_again(board: RunBoard):
    request = await board.ask("publish", "soon", 60.0)
    assert await board.answer(request, "working", "sending")
    assert await board.answer(request, "done", "sent")
    assert not await board.answer(request, "failed", "no engine")
    found = await board.request("publish")
    assert found is not None and found.state == "done"


# --- the learner's side -------------------------------------------------------------------------


class FakeLearning:
    """Counts what it is asked to do."""

    def __init__(self, version: int = 3) -> None:
        self.version = PolicyVersion(version)
        self.done: list[str] = []
        self.error: Exception | None = None

    async def save_now(self) -> None:
        self.done.append("save")

    async def publish(self) -> None:
        if self.error is not None:
            raise self.error
        self.done.append("publish")

    async def confirm(self) -> None:
        self.done.append("confirm")

    async def close_admission(self) -> None:
        self.done.append("close")


async def answered(board: RunBoard, learning: FakeLearning, action: run_records.Action):
    requests = Requests(board, learning)
    await board.ask(action, "soon", 60.0)
    await requests.answer()
    found = await board.request(action)
    assert found is not None
    return requests, found


async def test_a_checkpoint_is_written_and_answered(board: RunBoard):
    learning = FakeLearning()
    _, found = await answered(board, learning, "checkpoint")
    assert (learning.done, found.state) == (["save"], "done")
    assert "version 3" in found.detail


async def test_version_0_has_nothing_to_write(board: RunBoard):
    learning = FakeLearning(version=0)
    _, found = await answered(board, learning, "checkpoint")
    assert (learning.done, found.state) == ([], "done")


async def test_a_publish_is_confirmed_before_it_is_answered(board: RunBoard):
    learning = FakeLearning()
    await answered(board, learning, "publish")
    assert learning.done == ["confirm", "publish", "confirm"]


async def test_what_fails_is_answered_and_training_goes_on(board: RunBoard):
    learning = FakeLearning()
    learning.error = TransferError("no engine lives")
    _, found = await answered(board, learning, "publish")
    assert (found.state, found.detail) == ("failed", "no engine lives")


async def test_a_drain_is_done_when_training_has_ended(board: RunBoard):
    requests, found = await answered(board, FakeLearning(), "drain")
    assert (found.state, requests.is_draining) == ("working", True)
    await requests.ended()
    found = await board.request("drain")
    assert found is not None and found.state == "done"


async def test_a_drain_closes_admission_when_it_is_taken_up_and_keeps_it_closed(board: RunBoard):
    learning = FakeLearning()
    requests, _ = await answered(board, learning, "drain")
    assert learning.done == ["close"]
    await requests.answer()
    assert learning.done == ["close", "close"]


async def test_a_drain_that_expired_closes_nothing(board: RunBoard):
    learning = FakeLearning()
    requests = Requests(board, learning)
    await board.ask("drain", "soon", -1.0)
    await requests.answer()
    assert (learning.done, requests.is_draining) == ([], False)


async def test_what_was_asked_for_when_training_had_ended_fails(board: RunBoard):
    requests = Requests(board, FakeLearning())
    await board.ask("checkpoint", "soon", 60.0)
    await requests.ended()
    found = await board.request("checkpoint")
    assert found is not None and found.state == "failed"


async def test_a_learner_that_starts_anew_forgets_what_was_begun(board: RunBoard):
    await answered(board, FakeLearning(), "drain")
    requests = Requests(board, FakeLearning())
    await requests.forget()
    found = await board.request("drain")
    assert found is not None and (found.state, requests.is_draining) == ("failed", False)


# --- live settings ------------------------------------------------------------------------------


def test_every_live_key_is_a_key_of_the_configuration_with_a_sentence():
    config = load(None)
    assert all(text_of(key) and value_of(config, key) >= 0 for key in LIVE_KEYS)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("learner.learning_rate", 0.0, "greater than 0"),
        ("learner.num_steps", 2.5, "whole number"),
        ("rollout.max_failure_share", 1.5, "at most 1"),
        ("seed", 1.0, "cannot be changed while a run goes on"),
    ],
)
def test_a_value_that_the_configuration_would_refuse_is_refused(key: str, value: float, words: str):
    with pytest.raises(ConfigurationError, match=words):
        changed(load(None), {key: value})


def test_a_number_of_steps_that_came_as_20_0_is_20():
    config = applied(load(None), {"learner.num_steps": 20.0})
    assert config.learner.num_steps == 20 and isinstance(config.learner.num_steps, int)
