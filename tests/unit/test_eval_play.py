"""How questions are played to measure a policy, and what failures do to the numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import tenacity

from leeway.actors import evaluation
from leeway.actors.config import SearchConfig
from leeway.actors.environment import Question
from leeway.actors.evaluation import Asked, Played, Table, play_each
from leeway.actors.failures import EngineError, EpisodeFailure, RetrievalError
from leeway.actors.rollout import Limits
from leeway.actors.scripted_policy import ScriptedPolicy
from leeway.actors.search.environment import SearchEnvironment
from leeway.actors.search.protocol import TAGS
from leeway.actors.search.retriever import Passage
from leeway.actors.tokens import Tokens, write_byte_tokenizer
from leeway.replay.schema import StopReason, Trajectory, Turn
from leeway.services.evaluation.journal import Entry, Sample
from leeway.services.evaluation.results import Results, summarise
from leeway.services.evaluation.scores import is_right, own_scores, score_names, search_scores
from leeway.services.evaluation.settings import BenchmarkSettings, Settings
from leeway.services.evaluation.statistics import Estimate

LIMITS = Limits(max_turns=2, max_turn_tokens=60, max_observation_tokens=200, max_model_len=600)


class Retriever:
    """Fails as often as it is told to."""

    def __init__(self, num_failures: int = 0) -> None:
        self.left = num_failures

    async def search(self, query: str, top_k: int) -> list[Passage]:
        if self.left:
            self.left -= 1
            raise RetrievalError("the retriever is down")
        return [Passage(id="1", title="Oslo", text="a town", score=1.0)]

    async def close(self) -> None: ...


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    write_byte_tokenizer(tmp_path / "tokenizer", TAGS)
    return Tokens.load(tmp_path / "tokenizer")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_RETRY_WAIT", tenacity.wait_none())


def table(tokens: Tokens, policy: ScriptedPolicy, retriever: Retriever | None = None) -> Table:
    environment = SearchEnvironment(SearchConfig(), 0.1, retriever or Retriever())
    return Table(policy, environment, tokens, LIMITS, episode_timeout_s=5.0)


def asked(*ids: str) -> list[Asked]:
    return [
        Asked(f"nq-{name}", Question(id=name, question=f"{name}?", golden_answers=("x",)))
        for name in ids
    ]


async def collect(questions: Sequence[Asked], at: Table, **options: int) -> list[Played]:
    async with aclosing(play_each(questions, at, **{"max_concurrency": 4, **options})) as each:
        return [played async for played in each]


SEARCHES = {"": "<answer>x</answer>", "?\n": "<search>x</search>"}


# --- playing ---


async def test_every_question_comes_once_with_all_of_its_samples(tokens: Tokens):
    policy = ScriptedPolicy(tokens, {"": "<answer>x</answer>"})
    found = await collect(asked("a", "b", "c"), table(tokens, policy), num_samples=3)
    assert sorted(played.place for played in found) == [0, 1, 2]
    ids = {played.question.id: [t.trajectory_id for t in played.trajectories] for played in found}
    assert ids["b"] == ["nq-b-0", "nq-b-1", "nq-b-2"]


async def test_no_more_are_in_flight_than_allowed_and_as_many_as_allowed(tokens: Tokens):
    in_flight: list[int] = []

    class Watched(ScriptedPolicy):
        running = 0

        async def complete(self, request):
            self.running += 1
            in_flight.append(self.running)
            await asyncio.sleep(0.002)
            self.running -= 1
            return await super().complete(request)

    policy = Watched(tokens, {"": "<answer>x</answer>"})
    await collect(asked(*"abcdefghij"), table(tokens, policy), max_concurrency=3, num_samples=2)
    assert max(in_flight) == 3 and len(in_flight) == 20


async def test_a_failed_episode_is_played_again(tokens: Tokens):
    policy = ScriptedPolicy(tokens, SEARCHES)
    at = table(tokens, policy, Retriever(num_failures=2))
    [played] = await collect(asked("a"), at, num_attempts=3)
    assert played.failure is None
    assert [t.trajectory_id for t in played.trajectories] == ["nq-a-0-again3"]


async def test_after_the_last_attempt_the_question_fails_as_a_whole(tokens: Tokens):
    policy = ScriptedPolicy(tokens, SEARCHES)
    at = table(tokens, policy, Retriever(num_failures=2))
    found = await collect(asked("a", "b"), at, num_attempts=2, num_samples=2, max_concurrency=1)
    by_id = {played.question.id: played for played in found}
    assert isinstance(by_id["a"].failure, RetrievalError) and by_id["a"].trajectories == ()
    assert by_id["b"].failure is None and len(by_id["b"].trajectories) == 2


async def test_a_prompt_that_is_too_long_is_not_tried_again(tokens: Tokens):
    policy = ScriptedPolicy(tokens, {"": "<answer>x</answer>"})
    long = Asked("nq-l", Question(id="l", question="x" * 900, golden_answers=("x",)))
    [played] = await collect([long], table(tokens, policy), num_attempts=1_000_000)
    assert played.failure is not None and played.failure.reason == "question-too-long"


async def test_a_fault_of_the_program_ends_everything_and_leaves_nothing_running(tokens: Tokens):
    class Faulty(ScriptedPolicy):
        async def complete(self, request):
            if request.request_id.startswith("nq-c"):
                raise ZeroDivisionError
            await asyncio.sleep(60)
            raise AssertionError

    before = asyncio.all_tasks()
    with pytest.raises(ZeroDivisionError):
        await collect(asked("a", "b", "c"), table(tokens, Faulty(tokens, {"": ""})))
    assert asyncio.all_tasks() == before


async def test_who_stops_early_leaves_nothing_running(tokens: Tokens):
    policy = ScriptedPolicy(tokens, {"": "<answer>x</answer>"})
    before = asyncio.all_tasks()
    each = play_each(asked(*"abcdefgh"), table(tokens, policy), max_concurrency=2)
    async with aclosing(each):
        async for _ in each:
            break
    assert asyncio.all_tasks() == before


async def test_an_episode_that_takes_too_long_fails_with_a_reason(tokens: Tokens):
    class Slow(ScriptedPolicy):
        async def complete(self, request):
            await asyncio.sleep(60)
            raise AssertionError

    environment = SearchEnvironment(SearchConfig(), 0.1, Retriever())
    at = Table(Slow(tokens, {"": ""}), environment, tokens, LIMITS, episode_timeout_s=0.05)
    [played] = await collect(asked("a"), at)
    assert played.failure is not None and played.failure.reason == "timeout"


# --- scores ---


def trajectory(tokens: Tokens, *turns: str, observed: str = "") -> Trajectory:
    """Turns with an observation between each two."""
    ids = tokens.encode("?")
    spans: list[Turn] = []
    num_generated = 0
    for i, text in enumerate(turns):
        generated = tokens.encode(text)
        after = tokens.encode(observed) if i + 1 < len(turns) else []
        spans.append(Turn(len(ids), len(generated), len(after), "answer"))
        ids += generated + after
        num_generated += len(generated)
    return Trajectory(
        trajectory_id="t",
        token_ids=np.asarray(ids, np.int32),
        turns=tuple(spans),
        logprobs=np.zeros(num_generated, np.float32),
        versions=np.zeros(num_generated, np.int32),
        reward=0.5,
        stop_reason="answer",
        scores={"num_searches": 2.0, "exact_match": 9.0, "think_chars": 4.0},
        duration_s=1.0,
    )


def test_an_open_question_is_scored_by_the_last_answer_of_the_models_own_tokens(tokens: Tokens):
    question = Question(id="q", question="?", golden_answers=("krone", "NOK"))
    played = trajectory(
        tokens,
        "<answer>krone</answer>",
        "<answer>the krone of Norway</answer>",
        observed="<answer>krone</answer>",
    )
    # words "krone of norway" against "krone": precision 1/3, recall 1 -> F1 0.5
    assert search_scores(question, played, tokens) == {
        "num_searches": 2.0,
        "exact_match": 0.0,
        "f1": 0.5,
        "substring": 1.0,
    }


def test_a_multiple_choice_is_scored_by_its_letter_alone(tokens: Tokens):
    question = Question(id="q", question="?", golden_answers=("B",), choices=("aspirin", "heparin"))
    right = search_scores(question, trajectory(tokens, "<answer>(B)</answer>"), tokens)
    wrong = search_scores(question, trajectory(tokens, "<answer>A or B</answer>"), tokens)
    assert right == {"num_searches": 2.0, "accuracy": 1.0}
    assert wrong["accuracy"] == 0.0


def test_without_an_answer_everything_is_wrong(tokens: Tokens):
    question = Question(id="q", question="?", golden_answers=("x",))
    scores = search_scores(question, trajectory(tokens, "x"), tokens)
    assert [scores[name] for name in ("exact_match", "f1", "substring")] == [0, 0, 0]


def test_another_environment_is_judged_by_what_it_says():
    assert is_right({"reward": 0.5}) and not is_right({"reward": 0.0})
    assert not is_right({"reward": 0.5, "exact_match": 0.0})
    assert score_names([{"reward": 1.0, "steps": 3.0}], has_choices=False) == ("reward",)
    assert score_names([], has_choices=False) == ("exact_match", "f1", "substring")
    assert score_names([], has_choices=True) == ("accuracy",)


def test_the_scores_of_another_environment_hold_its_reward(tokens: Tokens):
    assert own_scores(trajectory(tokens, "x"))["reward"] == 0.5


# --- results ---


def sample(exact_match: float, searches: float = 1.0, stop: StopReason = "answer") -> Sample:
    return Sample(
        trajectory_id="t",
        reward=exact_match,
        stop_reason=stop,
        duration_s=1.0,
        scores={
            "exact_match": exact_match,
            "f1": exact_match,
            "substring": exact_match,
            "num_searches": searches,
        },
    )


def entry(question_id: str, *samples: Sample, benchmark: str = "nq") -> Entry:
    question = Question(id=question_id, question="?", golden_answers=("x",))
    if samples:
        return Entry(benchmark=benchmark, question=question, samples=samples)
    return Entry(benchmark=benchmark, question=question, reason="retriever", error="down")


def summary_of(
    folder: Path, entries: Sequence[Entry], num_samples: int = 1, pass_k: Sequence[int] = ()
) -> Results:
    import msgspec

    lines = [msgspec.json.encode(one) + b"\n" for one in entries]
    (folder / "episodes.jsonl").write_bytes(b"".join(lines))
    names = dict.fromkeys(one.benchmark for one in entries)
    settings = Settings(
        model="m",
        model_checksum="",
        benchmarks={
            name: BenchmarkSettings(file="f", num_questions=1, num_in_file=1, checksum="")
            for name in names
        },
        retriever="r",
        retriever_checksum="",
        decoding="greedy",
        num_samples=num_samples,
        seed=0,
        backend="torch",
        dtype="auto",
        max_model_len=64,
        environment={},
    )
    return summarise(folder, settings, pass_k, seed=0)


def test_a_question_that_was_not_played_counts_as_wrong_and_is_named(tmp_path: Path):
    found = summary_of(
        tmp_path, [entry("a", sample(1.0, 3.0)), entry("b", sample(1.0, 1.0)), entry("c")]
    ).benchmarks["nq"]
    assert found.scores["exact_match"].mean == pytest.approx(2 / 3, abs=1e-6)
    assert (found.num_questions, found.num_errors, found.errors) == (3, 1, {"retriever": 1})
    assert found.means["num_searches"] == 2.0  # of those that were played
    assert found.stop_reasons == {"answer": 2}


def test_samples_are_averaged_within_their_question_first(tmp_path: Path):
    found = summary_of(
        tmp_path,
        [entry("a", *map(sample, (1.0, 0, 0, 0))), entry("b", *map(sample, (1.0, 1.0, 1.0, 1.0)))],
        num_samples=4,
        pass_k=(1, 2, 4),
    ).benchmarks["nq"]
    assert found.scores["exact_match"].mean == 0.625  # (1/4 + 1) / 2
    assert found.scores["pass@1"].mean == 0.625
    assert found.scores["pass@2"].mean == 0.75  # (1 - 3/6 + 1) / 2
    assert found.scores["pass@4"] == Estimate(1.0, 1.0, 1.0)


def test_a_failed_question_passes_at_no_k(tmp_path: Path):
    found = summary_of(tmp_path, [entry("a")], num_samples=4, pass_k=(4,)).benchmarks["nq"]
    assert found.scores["pass@4"].mean == 0.0


def test_results_do_not_depend_on_the_order_in_which_questions_ended(tmp_path: Path):
    entries = [entry(str(i), sample(float(i % 3 == 0))) for i in range(12)]
    assert summary_of(tmp_path, entries) == summary_of(tmp_path, entries[::-1])


def test_a_later_play_replaces_a_failure(tmp_path: Path):
    found = summary_of(tmp_path, [entry("a"), entry("a", sample(1.0))]).benchmarks["nq"]
    assert (found.num_questions, found.num_errors) == (1, 0)


def test_the_average_says_whether_it_is_that_of_the_field(tmp_path: Path):
    some = [
        entry("a", sample(1.0)),
        entry("b", sample(0.0), benchmark="musique"),
        entry("c", sample(0.0), benchmark="mine"),
    ]
    found = summary_of(tmp_path, some).average
    assert found is not None
    assert (found.benchmarks, found.is_complete) == (("nq", "musique"), False)
    assert found.scores["exact_match"].mean == 0.5
    seven = [
        entry("a", sample(1.0), benchmark=name)
        for name in (
            "nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle",
        )
    ]  # fmt: skip
    whole = summary_of(tmp_path, seven).average
    assert whole is not None and whole.is_complete
    assert summary_of(tmp_path, [entry("a", sample(1.0), benchmark="mine")]).average is None


def test_failures_are_objects_with_a_reason():
    assert EngineError.reason == "engine" and issubclass(EngineError, EpisodeFailure)
