"""Corpora and questions: what is read, what is refused and in which words."""

import json
import lzma
from pathlib import Path

import pytest
import zstandard

from leeway.actors.environment import Question
from leeway.actors.search.documents import Document, load_documents
from leeway.actors.search.questions import (
    QuestionStream,
    StreamState,
    check_disjoint,
    load_questions,
)
from leeway.replay.errors import ConfigurationError, DataError

CORPUS = (
    b'{"id": "0", "contents": "\\"Norway\\"\\nCapital: Oslo"}\n'
    b"\n"
    b'{"id": 1, "contents": "no title line", "extra": true}\n'
)
DOCUMENTS = [Document("0", "Norway", "Capital: Oslo"), Document("1", "", "no title line")]


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [(".jsonl", bytes), (".jsonl.xz", lzma.compress), (".jsonl.zst", zstandard.compress)],
)
def test_a_corpus_reads_the_same_from_every_compression(tmp_path: Path, suffix, compress):
    path = write(tmp_path / f"corpus{suffix}", compress(CORPUS))
    assert load_documents(path) == DOCUMENTS


def test_a_zst_file_of_several_frames_is_read_to_its_end(tmp_path: Path):
    lines = CORPUS.splitlines(keepends=True)
    frames = b"".join(zstandard.compress(line) for line in lines)
    assert load_documents(write(tmp_path / "c.zst", frames)) == DOCUMENTS


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".xz", lzma.compress), (".zst", zstandard.compress)]
)
def test_a_compressed_corpus_cut_short_is_refused(tmp_path: Path, suffix: str, compress):
    corpus = b"".join(b'{"id": %d, "contents": "text"}\n' % i for i in range(5000))
    path = write(tmp_path / f"c{suffix}", compress(corpus)[:-6])
    with pytest.raises(DataError, match="damaged or cut short"):
        load_documents(path)


@pytest.mark.parametrize(
    "line",
    [
        b"{not json",
        b'["a", "list"]',
        b'{"id": "7"}',
        b'{"contents": "text"}',
        b'{"id": "7", "contents": 3}',
        b'{"id": "7", "contents": "  "}',
        b'{"id": "7", "contents": "\xff"}',
    ],
)
def test_a_bad_corpus_line_is_named_with_what_would_be_right(tmp_path: Path, line: bytes):
    path = write(tmp_path / "corpus.jsonl", CORPUS + line + b"\n")
    with pytest.raises(DataError, match=r'corpus\.jsonl, line 4: .*must be \{"id"'):
        load_documents(path)


def test_a_repeated_document_id_is_refused_with_both_lines(tmp_path: Path):
    path = write(tmp_path / "corpus.jsonl", CORPUS + CORPUS)
    with pytest.raises(DataError, match="line 4: id '0' was used on line 1"):
        load_documents(path)


def test_an_empty_corpus_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="holds no document"):
        load_documents(write(tmp_path / "corpus.jsonl", "\n"))


def test_a_missing_corpus_is_refused_by_name(tmp_path: Path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl cannot be read: No such file"):
        load_documents(tmp_path / "nowhere.jsonl")


def question_line(**changes: object) -> str:
    fields: dict[str, object] = {
        "id": "q1",
        "question": "Which currency?",
        "golden_answers": ["krone", "NOK"],
        "metadata": {"hops": 2},
        "data_source": "nq",
    }
    return json.dumps({**fields, **changes}) + "\n"


def test_a_question_is_read_with_answers_and_metadata(tmp_path: Path):
    path = write(tmp_path / "q.jsonl", question_line() + question_line(id=2, metadata=None))
    assert load_questions(path) == [
        Question(
            id="q1",
            question="Which currency?",
            golden_answers=("krone", "NOK"),
            metadata={"hops": 2},
        ),
        Question(id="2", question="Which currency?", golden_answers=("krone", "NOK")),
    ]


@pytest.mark.parametrize("answers", [[], ["", " "]])
def test_a_question_without_an_answer_is_named(tmp_path: Path, answers: list[str]):
    text = question_line() + question_line(id="q2", golden_answers=answers)
    with pytest.raises(DataError, match=r"q\.jsonl, line 2, id 'q2': no golden answer"):
        load_questions(write(tmp_path / "q.jsonl", text))


def test_a_single_text_as_golden_answers_is_refused(tmp_path: Path):
    path = write(tmp_path / "q.jsonl", question_line(golden_answers="krone"))
    with pytest.raises(DataError, match=r"line 1: .*golden_answers"):
        load_questions(path)


def test_a_repeated_question_id_is_refused(tmp_path: Path):
    path = write(tmp_path / "q.jsonl", question_line() + question_line())
    with pytest.raises(DataError, match="line 2: id 'q1' was used on line 1"):
        load_questions(path)


def test_an_empty_question_or_file_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="the question is empty"):
        load_questions(write(tmp_path / "q.jsonl", question_line(question=" ")))
    with pytest.raises(DataError, match="holds no question"):
        load_questions(write(tmp_path / "q.jsonl", ""))


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
    assert state == StreamState(seed=3, num_questions=10, position=13)
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


def test_held_out_questions_must_not_be_trained_on():
    train = questions(3)
    check_disjoint(train, [Question(id="h", question="else?", golden_answers=("x",))])
    with pytest.raises(DataError, match=r"'q1' is in data\.train and in data.held_out"):
        check_disjoint(train, [train[1]])
    twin = Question(id="h", question=" WHAT  2? ", golden_answers=("x",))
    with pytest.raises(DataError, match="'h' has the text of training question 'q2'"):
        check_disjoint(train, [twin])
