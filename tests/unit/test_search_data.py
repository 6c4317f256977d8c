"""Corpora and questions: what is read, what is refused and in which words."""

import json
import lzma
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from leeway.actors.environment import Message, Question
from leeway.actors.search.documents import Document, load_documents
from leeway.actors.search.protocol import split_contents
from leeway.actors.search.questions import check_disjoint, load_questions
from leeway.replay.errors import DataError

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
            data_source="nq",
        ),
        Question(
            id="2", question="Which currency?", golden_answers=("krone", "NOK"), data_source="nq"
        ),
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


def test_held_out_questions_must_not_be_trained_on():
    train = [Question(id=f"q{i}", question=f"what {i}?", golden_answers=("x",)) for i in range(3)]
    check_disjoint(train, [Question(id="h", question="else?", golden_answers=("x",))])
    with pytest.raises(DataError, match=r"'q1' is in data\.train and in data.held_out"):
        check_disjoint(train, [train[1]])
    twin = Question(id="h", question=" WHAT  2? ", golden_answers=("x",))
    with pytest.raises(DataError, match="'h' has the text of training question 'q2'"):
        check_disjoint(train, [twin])


def test_one_id_in_two_named_sources_is_two_questions():
    train = [Question(id="test_0", question="a?", golden_answers=("x",), data_source="nq")]
    other = Question(id="test_0", question="b?", golden_answers=("x",), data_source="popqa")
    check_disjoint(train, [other])
    for held_out in (msgspec.structs.replace(other, data_source=name) for name in ("nq", "")):
        with pytest.raises(DataError, match=r"'test_0' is in data\.train"):
            check_disjoint(train, [held_out])


def test_a_training_id_with_its_source_in_front_is_still_recognised():
    train = [Question(id="nq:test_0", question="a?", golden_answers=("x",), data_source="nq")]
    held_out = Question(id="test_0", question="b?", golden_answers=("x",), data_source="nq")
    with pytest.raises(DataError, match=r"'test_0' is in data\.train"):
        check_disjoint(train, [held_out])


def test_an_id_that_two_sources_of_a_file_use_gets_its_source_in_front(tmp_path: Path):
    lines = [question_line(), question_line(data_source="popqa"), question_line(id="q2")]
    found = load_questions(write(tmp_path / "q.jsonl", "".join(lines)))
    assert [q.id for q in found] == ["nq:q1", "popqa:q1", "q2"]


# --- multiple choice ---


def medqa_line(**changes: object) -> str:
    fields: dict[str, object] = {
        "question": "Which drug?",
        "options": {"B": "heparin", "A": "ibuprofen"},
        "answer": "heparin",
        "answer_idx": "B",
        "meta_info": "step1",
    }
    return json.dumps({**fields, **changes}) + "\n"


def test_a_medqa_line_is_a_question_with_choices_and_a_letter(tmp_path: Path):
    [question] = load_questions(write(tmp_path / "q.jsonl", medqa_line()))
    assert question == Question(
        id=question.id,
        question="Which drug?",
        golden_answers=("B",),
        data_source="medqa",
        choices=("ibuprofen", "heparin"),
    )


def test_medqa_lines_get_ids_of_their_own_in_every_file(tmp_path: Path):
    one = load_questions(write(tmp_path / "a.jsonl", medqa_line() * 2))
    two = load_questions(write(tmp_path / "b.jsonl", medqa_line(question="Another?")))
    assert len({q.id for q in (*one, *two)}) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answer_idx": "C", "answer": None}, "the right answer 'C' is none of the 2 choices"),
        ({"answer": "ibuprofen"}, "answer_idx is 'B', 'heparin', but answer is 'ibuprofen'"),
        ({"options": {"A": "x", "C": "y"}}, "the options are lettered A, C; they must be A, B"),
        ({"options": {"A": "x", "B": " "}, "answer": None}, "one of the choices is empty"),
        ({"options": ["x", "y"]}, r'must be \{"question"'),
    ],
)
def test_a_medqa_line_that_cannot_be_scored_is_refused(tmp_path: Path, changes, words: str):
    with pytest.raises(DataError, match=f"line 1: .*{words}"):
        load_questions(write(tmp_path / "q.jsonl", medqa_line(**changes)))


@pytest.mark.parametrize("golden", ["B", "b ", 1, "heparin"])
def test_a_choice_is_named_by_letter_place_or_text(tmp_path: Path, golden: object):
    line = question_line(choices=["ibuprofen", "heparin"], golden_answers=[golden])
    [question] = load_questions(write(tmp_path / "q.jsonl", line))
    assert (question.golden_answers, question.choices) == (("B",), ("ibuprofen", "heparin"))


# --- parquet ---

ROW = {
    "id": "train_0",
    "question": "Which currency?",
    "golden_answers": ["krone"],
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Answer it. Question: Which currency?\n"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["krone", "NOK"]}},
    "extra_info": {"split": "train", "index": 7},
    "metadata": {"hops": 2, "kind": None},
}


def parquet(path: Path, *rows: dict[str, object]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_a_search_r1_row_is_read_with_prompt_and_target(tmp_path: Path):
    assert load_questions(parquet(tmp_path / "q.parquet", ROW)) == [
        Question(
            id="train_0",
            question="Which currency?",
            golden_answers=("krone", "NOK"),
            metadata={"hops": 2},
            data_source="nq",
            prompt=(Message("user", "Answer it. Question: Which currency?\n"),),
        )
    ]


def test_a_parquet_file_is_known_by_its_content(tmp_path: Path):
    assert load_questions(parquet(tmp_path / "questions", ROW))[0].id == "train_0"


def test_what_a_row_leaves_out_comes_from_its_prompt_and_extra_info(tmp_path: Path):
    row = {k: ROW[k] for k in ("data_source", "prompt", "reward_model", "extra_info")}
    [question] = load_questions(parquet(tmp_path / "q.parquet", row))
    assert (question.id, question.question) == ("train_7", "Which currency?")


def test_rows_without_any_id_get_different_ones(tmp_path: Path):
    row = {k: ROW[k] for k in ("question", "golden_answers")}
    found = load_questions(parquet(tmp_path / "q.parquet", row, row))
    assert len({q.id for q in found}) == 2
    assert found[0].golden_answers == ("krone",)


def test_a_target_may_be_one_text(tmp_path: Path):
    row = {**ROW, "reward_model": {"ground_truth": {"target": "NOK"}}}
    assert load_questions(parquet(tmp_path / "q.parquet", row))[0].golden_answers == ("NOK",)


def test_the_rows_of_a_merged_file_keep_apart_what_each_source_calls_train_0(tmp_path: Path):
    rows = ROW, {**ROW, "data_source": "hotpotqa"}, {**ROW, "id": "train_1"}
    found = load_questions(parquet(tmp_path / "q.parquet", *rows))
    assert [q.id for q in found] == ["nq:train_0", "hotpotqa:train_0", "train_1"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"data_source": "nq"}, "row 1: there is neither a question nor a prompt"),
        ({"question": "a?"}, "row 1: no golden answer"),
        ({"question": 3, "golden_answers": ["x"]}, "row 1: .*question.*Search-R1's columns"),
        ({"question": "a?", "reward_model": {"ground_truth": {"target": 3}}}, "target is 3"),
    ],
)
def test_a_row_of_another_form_is_named(tmp_path: Path, row: dict[str, object], words: str):
    with pytest.raises(DataError, match=rf"q\.parquet, {words}" if words[0] == "r" else words):
        load_questions(parquet(tmp_path / "q.parquet", row))


def test_a_damaged_or_empty_or_missing_parquet_file_is_refused(tmp_path: Path):
    whole = parquet(tmp_path / "q.parquet", ROW).read_bytes()
    with pytest.raises(DataError, match="no parquet that can be read"):
        load_questions(write(tmp_path / "cut.parquet", whole[:-50]))
    empty = pa.Table.from_pylist([ROW]).slice(0, 0)
    pq.write_table(empty, tmp_path / "empty.parquet")
    with pytest.raises(DataError, match="holds no question"):
        load_questions(tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"none\.parquet cannot be read: No such file"):
        load_questions(tmp_path / "none.parquet")


def test_a_title_loses_one_pair_of_quotes_and_no_more():
    contents = {'"Norway"\nText': "Norway", '""Heroes" (album)"\nText': '"Heroes" (album)'}
    assert {text: split_contents(text)[0] for text in contents} == contents
