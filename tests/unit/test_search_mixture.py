"""Question streams: their order, shared by workers, mixed from sources, and resumed."""

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.actors.config import DataConfig, SourceConfig
from leeway.actors.environment import Question
from leeway.actors.search.mixture import Mixture
from leeway.actors.search.questions import (
    QuestionSource,
    QuestionStream,
    StreamState,
    load_questions,
    load_sources,
)
from leeway.replay.errors import ConfigurationError, DataError


def questions(n: int) -> list[Question]:
    return [Question(id=f"q{i}", question=f"what {i}?", golden_answers=("x",)) for i in range(n)]


def take(stream: QuestionStream, n: int) -> list[str]:
    return [stream.next().id for _ in range(n)]


def test_every_epoch_holds_every_question_once_in_a_new_order():
    ids = take(QuestionStream(questions(10), seed=3), 20)
    assert sorted(ids[:10]) == sorted(ids[10:]) == [f"q{i}" for i in range(10)]
    assert ids[:10] != ids[10:]


def test_the_order_depends_on_the_seed_only():
    assert take(QuestionStream(questions(10), 3), 25) == take(QuestionStream(questions(10), 3), 25)
    assert take(QuestionStream(questions(10), 3), 10) != take(QuestionStream(questions(10), 4), 10)


def test_a_restored_stream_goes_on_where_the_saved_one_stood():
    stream = QuestionStream(questions(10), seed=3)
    take(stream, 13)
    state = stream.state()
    assert (state.seed, state.num_questions, state.position) == (3, 10, 13)
    resumed = QuestionStream(questions(10), seed=3)
    resumed.restore(state)
    assert take(resumed, 20) == take(stream, 20)


def test_a_position_in_other_data_is_refused():
    stream = QuestionStream(questions(10), seed=3)
    with pytest.raises(ConfigurationError, match=r"data\.seed 4 and 10 questions"):
        stream.restore(StreamState(seed=4, num_questions=10, position=1))
    with pytest.raises(ConfigurationError, match="11 questions"):
        stream.restore(StreamState(seed=3, num_questions=11, position=1))


def test_workers_share_an_epoch_without_repeating_a_question():
    streams = [QuestionStream(questions(10), 3, worker=w, num_workers=3) for w in range(3)]
    # three epochs are 30 places, ten for each worker
    ids = [streams[place % 3].next().id for place in range(30)]
    assert ids == take(QuestionStream(questions(10), 3), 30)


# --- several sources ---


def source(name: str, num: int, weight: float) -> QuestionSource:
    found = tuple(
        Question(id=f"{name}{i}", question=f"{name} {i}?", golden_answers=("x",))
        for i in range(num)
    )
    return QuestionSource(name=name, questions=found, weight=weight)


def test_weights_2_and_1_give_two_of_three_questions_to_the_first():
    # times (k + 1/2) / share: 0.75, 2.25, 3.75, 5.25 and 1.5, 4.5
    mixture = Mixture([2, 1])
    assert [mixture.at(place)[0] for place in range(6)] == [0, 1, 0, 0, 1, 0]
    assert [mixture.at(place)[1] for place in range(6)] == [0, 0, 1, 2, 1, 3]


def test_equal_weights_take_turns():
    mixture = Mixture([1, 1, 1])
    assert [mixture.at(place)[0] for place in range(6)] == [0, 1, 2, 0, 1, 2]


weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@given(weights)
def test_every_source_gives_its_questions_in_order_and_none_twice(some: list[float]):
    given_by: Counter[int] = Counter()
    mixture = Mixture(some)
    for place in range(60):
        chosen, count = mixture.at(place)
        assert count == given_by[chosen]
        given_by[chosen] += 1


@given(weights, st.integers(0, 5_000))
def test_any_beginning_holds_every_source_by_its_share(some: list[float], place: int):
    chosen, count = Mixture(some).at(place)
    # at most n / 2 away for n sources, and one more for the question at this place itself
    assert abs(count - place * some[chosen] / sum(some)) <= len(some) / 2 + 1


def test_a_mixed_stream_goes_through_each_source_before_repeating_it():
    stream = QuestionStream([source("a", 4, 2), source("b", 2, 1)], seed=1)
    ids = take(stream, 12)
    for one in (ids[:6], ids[6:]):
        assert sorted(one) == ["a0", "a1", "a2", "a3", "b0", "b1"]


def test_workers_share_a_mixture_without_repeating_a_question():
    sources = [source("a", 7, 3), source("b", 5, 1.5)]
    streams = [QuestionStream(sources, 3, worker=w, num_workers=3) for w in range(3)]
    ids = [streams[place % 3].next().id for place in range(60)]
    assert ids == take(QuestionStream(sources, 3), 60)


@given(st.integers(0, 200), st.integers(0, 3))
def test_a_mixture_resumes_at_any_position(position: int, seed: int):
    sources = [source("a", 7, 3), source("b", 5, 1.3), source("c", 1, 0.1)]
    stream = QuestionStream(sources, seed)
    take(stream, position)
    resumed = QuestionStream(sources, seed)
    resumed.restore(msgspec.convert(msgspec.to_builtins(stream.state()), StreamState))
    assert take(resumed, 30) == take(stream, 30)


def test_a_position_among_other_questions_or_weights_is_refused():
    state = QuestionStream([source("a", 4, 2), source("b", 2, 1)], seed=1).state()
    for others in (
        [source("a", 4, 2), source("c", 2, 1)],
        [source("a", 4, 3), source("b", 2, 1)],
        [source("b", 2, 1), source("a", 4, 2)],
    ):
        with pytest.raises(ConfigurationError, match="other questions, or other weights"):
            QuestionStream(others, seed=1).restore(state)


def test_with_another_number_of_workers_the_order_goes_on_behind_what_was_asked():
    # 10 questions by each of 2 workers are 20 places; 3 workers go on from position 7, place 21
    before = QuestionStream(questions(50), 3, worker=1, num_workers=2)
    take(before, 10)
    after = QuestionStream(questions(50), 3, worker=0, num_workers=3)
    after.restore(before.state())
    assert after.state().position == 7
    assert take(after, 1) == take(QuestionStream(questions(50), 3), 22)[21:]


def test_a_source_without_a_question_is_refused():
    with pytest.raises(DataError, match="at least one question in every source"):
        QuestionStream([source("a", 0, 1)], 1)


# --- reading them ---


def lines(path: Path, *ids: str) -> str:
    path.write_text(
        "".join(
            json.dumps({"id": i, "question": f"{path.stem} {i}?", "golden_answers": ["x"]}) + "\n"
            for i in ids
        )
    )
    return str(path)


def test_one_path_is_one_source(tmp_path: Path):
    config = DataConfig(train=lines(tmp_path / "q.jsonl", "1", "2"))
    [only] = load_sources(config)
    assert (only.name, only.weight, list(only.questions)) == (
        "q",
        1.0,
        load_questions(config.train),
    )


def test_an_id_of_two_sources_gets_the_name_of_its_source(tmp_path: Path):
    nq = SourceConfig(path=lines(tmp_path / "nq.jsonl", "0", "1"))
    hotpot = SourceConfig(path=lines(tmp_path / "h.jsonl", "0"), name="hotpotqa")
    first, second = load_sources(DataConfig(sources=(nq, hotpot)))
    assert [q.id for q in first.questions] == ["nq:0", "1"]
    assert [(q.id, q.data_source) for q in second.questions] == [("hotpotqa:0", "hotpotqa")]


def test_without_weights_a_source_gives_as_many_as_it_holds(tmp_path: Path):
    paths = lines(tmp_path / "a.jsonl", "1", "2", "3"), lines(tmp_path / "b.jsonl", "4")
    sources = load_sources(DataConfig(sources=tuple(SourceConfig(path=p) for p in paths)))
    assert [s.weight for s in sources] == [3, 1]


def test_two_sources_of_one_name_are_refused(tmp_path: Path):
    (tmp_path / "x").mkdir()
    paths = lines(tmp_path / "q.jsonl", "1"), lines(tmp_path / "x" / "q.jsonl", "2")
    with pytest.raises(ConfigurationError, match=r"two of data\.sources are called q"):
        load_sources(DataConfig(sources=tuple(SourceConfig(path=p) for p in paths)))


def test_the_bundled_questions_may_be_one_of_the_sources(tmp_path: Path):
    mine = SourceConfig(path=lines(tmp_path / "q.jsonl", "1"), weight=1)
    sources = load_sources(DataConfig(sources=(mine, SourceConfig(path="bundled", weight=1))))
    assert [s.name for s in sources] == ["q", "bundled"]
    assert len(sources[1].questions) > 1000
