"""Reading questions: JSON lines of {"id", "question", "golden_answers", "metadata"}."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from leeway.actors.environment import Question
from leeway.actors.search.documents import read_lines
from leeway.replay.errors import ConfigurationError, DataError


class _Line(msgspec.Struct):
    id: str | int
    question: str
    golden_answers: list[str] = []
    metadata: dict[str, object] | None = None


_DECODER: Final = msgspec.json.Decoder(_Line)
_WANTED: Final = (
    '{"id": "q1", "question": "Who ..?", "golden_answers": ["Ann"], "metadata": {"hops": 2}}'
)


def load_questions(path: str | Path) -> list[Question]:
    """Every question of a file. Raises DataError for a bad line, a repeated id, an empty file."""
    questions: list[Question] = []
    line_of_id: dict[str, int] = {}
    for number, line in read_lines(path):
        question = _read_question(line, f"{path}, line {number}")
        first = line_of_id.setdefault(question.id, number)
        if first != number:
            raise DataError(
                f"{path}, line {number}: id {question.id!r} was used on line {first};"
                " every question needs an id of its own"
            )
        questions.append(question)
    if not questions:
        raise DataError(f"{path} holds no question; each line must be {_WANTED}")
    return questions


def _read_question(line: bytes, where: str) -> Question:
    try:
        record = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: {error}; it must be {_WANTED}") from error
    if not record.question.strip():
        raise DataError(f"{where}, id {record.id!r}: the question is empty")
    answers = tuple(answer for answer in record.golden_answers if answer.strip())
    if not answers:
        raise DataError(
            f"{where}, id {record.id!r}: no golden answer; golden_answers must be a list with at"
            ' least one text, such as ["Ann"]'
        )
    return Question(
        id=str(record.id),
        question=record.question,
        golden_answers=answers,
        metadata=record.metadata or {},
    )


def check_disjoint(train: Sequence[Question], held_out: Sequence[Question]) -> None:
    """Raise DataError if a held-out question is also trained on, by id or by text.

    Texts are compared without regard to case and white space.
    """
    train_ids = {question.id for question in train}
    train_texts = {_plain(question.question): question.id for question in train}
    for question in held_out:
        if question.id in train_ids:
            raise DataError(
                f"question {question.id!r} is in data.train and in data.held_out; a held-out"
                " question must never be trained on"
            )
        twin = train_texts.get(_plain(question.question))
        if twin is not None:
            raise DataError(
                f"held-out question {question.id!r} has the text of training question {twin!r};"
                " take one of them out"
            )


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


class StreamState(msgspec.Struct, frozen=True):
    """Where a QuestionStream stands; enough to go on from there."""

    seed: int
    num_questions: int
    position: int
    """Questions this stream has handed out."""


class QuestionStream:
    """Endless questions, every epoch in a new order that only `seed` and the epoch decide.

    Several workers share a data set without repeating each other: worker w of n takes the
    questions w, w + n, w + 2n, ... of the common order.

        3 questions, 2 workers: worker 0 takes places 0 and 2 of epoch 0, place 1 of epoch 1, ...
                                worker 1 takes place 1 of epoch 0, places 0 and 2 of epoch 1, ...
    """

    def __init__(
        self, questions: Sequence[Question], seed: int, *, worker: int = 0, num_workers: int = 1
    ) -> None:
        if not questions:
            raise DataError("a question stream needs at least one question")
        if not 0 <= worker < num_workers:
            raise ConfigurationError(
                f"worker must be in 0 to {num_workers - 1} for {num_workers} workers, got {worker}"
            )
        self._questions = questions
        self._seed = seed
        self._worker = worker
        self._num_workers = num_workers
        self._position = 0
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    @property
    def epoch(self) -> int:
        """Epoch of the next question, from 0."""
        return self._place() // len(self._questions)

    def next(self) -> Question:
        """The next question."""
        epoch, offset = divmod(self._place(), len(self._questions))
        if epoch != self._epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._order = generator.permutation(len(self._questions))
            self._epoch = epoch
        self._position += 1
        return self._questions[int(self._order[offset])]

    def state(self) -> StreamState:
        """The position, for a checkpoint."""
        return StreamState(self._seed, len(self._questions), self._position)

    def restore(self, state: StreamState) -> None:
        """Go on from `state`. Raises ConfigurationError if it belongs to other data or order."""
        mine = (self._seed, len(self._questions))
        if (state.seed, state.num_questions) != mine:
            raise ConfigurationError(
                f"the saved position belongs to data.seed {state.seed} and {state.num_questions}"
                f" questions, this run has data.seed {mine[0]} and {mine[1]}; resume with the"
                " same data, or start a new run"
            )
        if state.position < 0:
            raise ConfigurationError(f"the saved position is {state.position}, below 0")
        self._position = state.position

    def _place(self) -> int:
        return self._worker + self._position * self._num_workers
