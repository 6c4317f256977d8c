"""Groups, failures and their budget, and greedy evaluation."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from leeway.actors.config import SearchConfig
from leeway.actors.environment import Question
from leeway.actors.evaluation import evaluate
from leeway.actors.failures import (
    EngineError,
    EpisodeTimeout,
    FailureBudget,
    FailureBudgetExceeded,
    RetrievalError,
    first_cause,
)
from leeway.actors.group import play_group
from leeway.actors.rollout import Limits
from leeway.actors.scripted_policy import ScriptedPolicy
from leeway.actors.search.environment import SearchEnvironment
from leeway.actors.search.protocol import TAGS
from leeway.actors.search.retriever import Passage
from leeway.actors.tokens import EOS, Tokens, write_byte_tokenizer
from leeway.replay.schema import Group, GroupId, Trajectory, Turn

QUESTION = Question(id="q", question="Which?", golden_answers=("krone",))


def trajectory(trajectory_id: str) -> Trajectory:
    return Trajectory(
        trajectory_id=trajectory_id,
        token_ids=np.asarray([1, 2], np.int32),
        turns=(Turn(1, 1, 0, "answer"),),
        logprobs=np.asarray([-1.0], np.float32),
        versions=np.asarray([0], np.int32),
        reward=1.0,
        stop_reason="answer",
        scores={},
        duration_s=0.0,
    )


async def group_of(play_episode, timeout_s: float = 5.0) -> Group:
    return await play_group(GroupId("g"), QUESTION, "w", play_episode, size=4, timeout_s=timeout_s)


async def test_siblings_play_at_once_and_keep_their_order():
    async def play(question: Question, trajectory_id: str) -> Trajectory:
        # the first takes longest
        await asyncio.sleep(0.08 - 0.02 * int(trajectory_id[-1]))
        return trajectory(trajectory_id)

    started = time.monotonic()
    group = await group_of(play)
    assert time.monotonic() - started < 0.19  # one after another: 0.20 s
    assert [t.trajectory_id for t in group.trajectories] == ["g-0", "g-1", "g-2", "g-3"]
    assert (group.group_id, group.question_id, group.worker_id) == ("g", "q", "w")


async def test_one_failed_sibling_cancels_the_others_and_is_what_is_raised():
    cancelled: list[str] = []

    async def play(question: Question, trajectory_id: str) -> Trajectory:
        if trajectory_id == "g-2":
            raise RetrievalError("down")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(trajectory_id)
            raise
        raise AssertionError

    with pytest.raises(RetrievalError, match="down"):
        await group_of(play)
    assert sorted(cancelled) == ["g-0", "g-1", "g-3"]


async def test_a_group_past_its_deadline_says_how_far_it_came():
    async def play(question: Question, trajectory_id: str) -> Trajectory:
        if trajectory_id != "g-0":
            await asyncio.sleep(60)
        return trajectory(trajectory_id)

    with pytest.raises(EpisodeTimeout, match="group g, question 'q': 1 of 4 siblings had ended"):
        await group_of(play, timeout_s=0.05)


async def test_a_fault_of_the_program_is_not_hidden_behind_a_failure():
    async def play(question: Question, trajectory_id: str) -> Trajectory:
        raise RetrievalError("down") if trajectory_id == "g-0" else ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await group_of(play)


def test_the_first_cause_is_found_in_nested_groups():
    fault, failure = ZeroDivisionError(), EngineError("x")
    assert first_cause(BaseExceptionGroup("", [failure])) is failure
    nested = BaseExceptionGroup("", [failure, BaseExceptionGroup("", [fault])])
    assert first_cause(nested) is fault


def test_the_eleventh_failure_of_fifty_groups_is_one_too_many():
    budget = FailureBudget(0.2)
    for _ in range(10):
        budget.record_failure(RetrievalError("down"))
    with pytest.raises(FailureBudgetExceeded) as exceeded:
        budget.record_failure(EngineError("replica 2 died"))
    assert str(exceeded.value) == (
        "11 of the last 11 groups were dropped for failures (retriever 10, engine 1);"
        " rollout.max_failure_share = 0.2 allows 10 of 50. The latest: replica 2 died"
    )


def test_failures_leave_the_window_after_fifty_groups():
    budget = FailureBudget(0.2)
    for _ in range(5):
        for _ in range(10):
            budget.record_failure(EngineError("x"))
        for _ in range(50):
            budget.record_success()
    assert budget.totals == {"engine": 50}
    assert budget.sentence() == "none of the last 50 groups failed"


def test_a_share_of_1_tolerates_a_window_full_of_failures():
    budget = FailureBudget(1.0)
    for _ in range(200):
        budget.record_failure(EngineError("x"))


class NoPassages:
    async def search(self, query: str, top_k: int) -> list[Passage]:
        return []

    async def close(self) -> None: ...


LIMITS = Limits(max_turns=2, max_turn_tokens=60, max_observation_tokens=200, max_model_len=600)


async def test_an_evaluation_gives_means_counts_versions_and_transcripts(tmp_path: Path):
    write_byte_tokenizer(tmp_path, TAGS)
    tokens = Tokens.load(tmp_path)
    questions = [
        Question(id="a", question="1+1?", golden_answers=("2",), metadata={"hops": 1}),
        Question(id="b", question="1+2?", golden_answers=("3",), metadata={"hops": 2}),
        Question(id="c", question="1+3?", golden_answers=("4",), metadata={"hops": 2}),
        Question(id="d", question="1+4?", golden_answers=("5",)),
    ]
    script = {"": "<answer>3</answer>", "1+1?\n": "<answer>2</answer>", "1+4?\n": "no idea"}
    policy = ScriptedPolicy(tokens, script, version=6)
    environment = SearchEnvironment(SearchConfig(), 0.1, NoPassages())
    result = await evaluate(
        questions,
        policy,
        environment,
        tokens,
        LIMITS,
        max_concurrency=2,
        episode_timeout_s=5.0,
        num_samples=1,
    )
    assert result.num_questions == 4
    # a and b are right, c is wrong, d is corrected once and then answers 3
    assert result.scores["exact_match"] == 0.5
    assert result.scores["reward"] == pytest.approx((1 + 1 + 0 - 0.1) / 4)
    assert result.exact_match_by_hops == {1: 1.0, 2: 0.5}
    assert result.num_by_hops == {1: 1, 2: 2}
    assert result.stop_reasons == {"answer": 4}
    assert result.versions == (6,)
    [sample] = result.samples
    assert sample.text == "Question: 1+1?\n<answer>2</answer>"
    assert EOS not in sample.text


async def test_an_evaluation_keeps_to_its_concurrency_and_is_greedy(tmp_path: Path):
    write_byte_tokenizer(tmp_path, TAGS)
    tokens = Tokens.load(tmp_path)
    in_flight: list[int] = []

    class Watched(ScriptedPolicy):
        running = 0

        async def complete(self, request):
            assert request.temperature == 0.0
            self.running += 1
            in_flight.append(self.running)
            await asyncio.sleep(0.001)
            self.running -= 1
            return await super().complete(request)

    await evaluate(
        [QUESTION] * 12,
        Watched(tokens, {"": "<answer>x</answer>"}),
        SearchEnvironment(SearchConfig(), 0.1, NoPassages()),
        tokens,
        LIMITS,
        max_concurrency=3,
        episode_timeout_s=5.0,
    )
    assert max(in_flight) == 3


async def test_an_evaluation_with_a_failed_episode_fails(tmp_path: Path):
    write_byte_tokenizer(tmp_path, TAGS)
    tokens = Tokens.load(tmp_path)

    class Down(NoPassages):
        async def search(self, query: str, top_k: int) -> list[Passage]:
            raise RetrievalError("down")

    with pytest.raises(RetrievalError):
        await evaluate(
            [QUESTION],
            ScriptedPolicy(tokens, {"": "<search>x</search>"}),
            SearchEnvironment(SearchConfig(), 0.1, Down()),
            tokens,
            LIMITS,
            max_concurrency=3,
            episode_timeout_s=5.0,
        )
