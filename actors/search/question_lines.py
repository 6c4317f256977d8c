"""Question files in JSON lines: FlashRAG's form, and MedQA's with lettered options."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from leeway.actors.environment import Question
from leeway.actors.search.documents import read_lines
from leeway.replay.errors import DataError

WANTED: Final = (
    '{"id": "q1", "question": "Who ..?", "golden_answers": ["Ann"], "metadata": {"hops": 2}}'
)
_WANTED_MEDQA: Final = (
    '{"question": "Which drug ..?", "options": {"A": "aspirin", "B": "heparin"}, "answer_idx": "B"}'
)


class _FlashRag(msgspec.Struct):
    id: str | int
    question: str
    golden_answers: list[str | int] = []
    metadata: dict[str, object] | None = None
    data_source: str | None = None
    choices: list[str] | None = None


class _MedQa(msgspec.Struct):
    question: str
    options: dict[str, str]
    answer_idx: str
    answer: str | None = None
    id: str | int | None = None
    metadata: dict[str, object] | None = None
    data_source: str | None = None


_FLASHRAG: Final = msgspec.json.Decoder(_FlashRag)
_MEDQA: Final = msgspec.json.Decoder(_MedQa)


def read_question_lines(path: Path) -> Iterator[tuple[str, Question]]:
    """(`line 3`, question) of each line that is not blank. Raises DataError for a bad one."""
    for number, line in read_lines(path):
        where = f"{path}, line {number}"
        is_medqa = (
            b'"options"' in line and b'"answer_idx"' in line and b'"golden_answers"' not in line
        )
        try:
            if is_medqa:
                yield f"line {number}", _of_medqa(_MEDQA.decode(line), number, where)
            else:
                yield f"line {number}", _of_flashrag(_FLASHRAG.decode(line), where)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            wanted = _WANTED_MEDQA if is_medqa else WANTED
            raise DataError(f"{where}: {error}; it must be {wanted}") from error


def _of_flashrag(record: _FlashRag, where: str) -> Question:
    where = f"{where}, id {record.id!r}"
    choices = tuple(record.choices or ())
    return checked(
        Question(
            id=str(record.id),
            question=record.question,
            golden_answers=letters(record.golden_answers, choices, where)
            if choices
            else tuple(str(answer) for answer in record.golden_answers),
            metadata=record.metadata or {},
            data_source=record.data_source or "",
            choices=choices,
        ),
        where,
    )


def _of_medqa(record: _MedQa, number: int, where: str) -> Question:
    """MedQA numbers nothing: a line without an id gets one from its place."""
    right = record.options.get(record.answer_idx)
    if record.answer is not None and right is not None and record.answer.strip() != right.strip():
        raise DataError(
            f"{where}: answer_idx is {record.answer_idx!r}, {right!r}, but answer is"
            f" {record.answer!r}; correct one of them"
        )
    choices = _ordered(record.options, where)
    return checked(
        Question(
            id=str(record.id)
            if record.id is not None
            else made_id("medqa", number, record.question),
            question=record.question,
            golden_answers=letters([record.answer_idx], choices, where),
            metadata=record.metadata or {},
            data_source=record.data_source or "medqa",
            choices=choices,
        ),
        where,
    )


def made_id(kind: str, number: int, text: str) -> str:
    """An id for a question that has none: its place, and a trace of its text, so that line 1 of
    two files is two questions. `medqa-1-9f86d081`
    """
    return f"{kind}-{number}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def _ordered(options: Mapping[str, str], where: str) -> tuple[str, ...]:
    wanted = [chr(65 + i) for i in range(len(options))]
    if sorted(options) != wanted:
        raise DataError(
            f"{where}: the options are lettered {', '.join(sorted(options)) or 'by nothing'};"
            " they must be A, B, C and so on"
        )
    return tuple(options[letter] for letter in wanted)


def letters(golden: Sequence[str | int], choices: Sequence[str], where: str) -> tuple[str, ...]:
    """Golden answers of a question with choices as letters: given as a letter, as the place of the
    choice from 0, or as its text. Raises DataError for one that is no choice.
    """
    names = [chr(65 + i) for i in range(len(choices))]
    found: list[str] = []
    for answer in golden:
        if isinstance(answer, int) and 0 <= answer < len(names):
            found.append(names[answer])
        elif isinstance(answer, str) and answer.strip().upper() in names:
            found.append(answer.strip().upper())
        elif answer in choices:
            found.append(names[list(choices).index(str(answer))])
        else:
            raise DataError(
                f"{where}: the right answer {answer!r} is none of the {len(choices)} choices; give"
                " its letter, its place from 0, or its text"
            )
    return tuple(found)


def checked(question: Question, where: str) -> Question:
    """The question without its blank answers. Raises DataError if it cannot be asked or scored."""
    if not question.question.strip():
        raise DataError(f"{where}: the question is empty")
    answers = tuple(answer for answer in question.golden_answers if answer.strip())
    if not answers:
        raise DataError(
            f"{where}: no golden answer; golden_answers must be a list with at"
            ' least one text, such as ["Ann"]'
        )
    if any(not choice.strip() for choice in question.choices):
        raise DataError(f"{where}: one of the choices is empty")
    return msgspec.structs.replace(question, golden_answers=answers)
