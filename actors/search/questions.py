"""Questions: read from the field's file formats, kept apart, mixed and dealt out.

load_questions      one file
load_sources        the training questions of a configuration, of one file or several
check_disjoint      no held-out question is trained on
QuestionStream      the order in which they are asked, which can be resumed
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from leeway.actors.config import DataConfig, SourceConfig, train_file
from leeway.actors.environment import Question
from leeway.actors.search.mixture import Mixture
from leeway.actors.search.question_lines import WANTED, read_question_lines
from leeway.replay.errors import ConfigurationError, DataError

_PARQUET_MAGIC: Final = b"PAR1"


def load_questions(path: str | Path) -> list[Question]:
    """Every question of a file: FlashRAG's or MedQA's JSON lines, plain, .xz or .zst, or parquet
    with Search-R1's columns, told apart by what is in it.

    An id that several data sources of the file use gets its data source in front: `nq:train_0`.
    Raises DataError for a bad line or row, an id used twice by one data source, an empty file.
    """
    questions: list[Question] = []
    place_of: dict[tuple[str, str], str] = {}
    for place, question in _read(Path(path)):
        key = (question.data_source, question.id)
        first = place_of.setdefault(key, place)
        if first != place:
            raise DataError(
                f"{path}, {place}: id {question.id!r} was used on {first};"
                " every question needs an id of its own"
            )
        questions.append(question)
    if not questions:
        raise DataError(f"{path} holds no question; each line must be {WANTED}")
    if len({id_ for _, id_ in place_of}) == len(questions):
        return questions
    return _with_names([(question.data_source, question) for question in questions])


def _read(path: Path) -> Iterator[tuple[str, Question]]:
    if not _is_parquet(path):
        return read_question_lines(path)
    from leeway.actors.search.question_parquet import read_question_rows

    return read_question_rows(path)


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC or path.suffix == ".parquet"
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _with_names(named: Sequence[tuple[str, Question]]) -> list[Question]:
    """The questions, those whose id another name uses too with their own name before it."""
    names_of: defaultdict[str, set[str]] = defaultdict(set)
    for name, question in named:
        names_of[question.id].add(name)
    return [
        msgspec.structs.replace(question, id=f"{name}:{question.id}")
        if len(names_of[question.id]) > 1
        else question
        for name, question in named
    ]


class QuestionSource(msgspec.Struct, frozen=True, kw_only=True):
    """One set of training questions."""

    name: str
    questions: tuple[Question, ...]
    weight: float
    """Its share of the questions drawn is this by the weights of all sources."""


def load_sources(config: DataConfig) -> list[QuestionSource]:
    """The training questions that a configuration names, every id used once over all sources.

    Raises what load_questions raises, and ConfigurationError for two sources of one name.
    """
    if not config.sources:
        path = train_file(config)
        return [QuestionSource(name=path.stem, questions=tuple(load_questions(path)), weight=1.0)]
    names = [source.name or _stem(source.path) for source in config.sources]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(
                f"two of data.sources are called {name}; give each a name of its own, by the key"
                " name of its table"
            )
    loaded = [
        [_named_source(question, name) for question in load_questions(_file_of(source))]
        for name, source in zip(names, config.sources, strict=True)
    ]
    named = [(n, question) for n, found in zip(names, loaded, strict=True) for question in found]
    unique = iter(_with_names(named))
    return [
        QuestionSource(
            name=name,
            questions=tuple(next(unique) for _ in found),
            weight=len(found) if source.weight is None else source.weight,
        )
        for name, found, source in zip(names, loaded, config.sources, strict=True)
    ]


def _named_source(question: Question, name: str) -> Question:
    """FlashRAG's files name no data source; the name of the source is one."""
    if question.data_source:
        return question
    return msgspec.structs.replace(question, data_source=name)


def _file_of(source: SourceConfig) -> Path:
    return train_file(DataConfig(train=source.path))


def _stem(path: str) -> str:
    """nq.jsonl.xz -> nq"""
    return Path(path).name.partition(".")[0]


def check_disjoint(train: Sequence[Question], held_out: Sequence[Question]) -> None:
    """Raise DataError if a held-out question is also trained on, by id or by text.

    Texts are compared without regard to case and white space. One id in two named data sources is
    two questions: every benchmark of FlashRAG counts from test_0.
    """
    sources_of: defaultdict[str, set[str]] = defaultdict(set)
    for question in train:
        sources_of[question.id].add(question.data_source)
    train_texts = {_plain(question.question): question.id for question in train}
    twins = [q for q in held_out if _plain(q.question) in train_texts]
    for question in held_out:
        ids = (question.id, f"{question.data_source}:{question.id}")
        sources = set[str]().union(*(sources_of.get(id_, ()) for id_ in ids))
        if sources and (not question.data_source or sources & {"", question.data_source}):
            raise DataError(
                f"question {question.id!r} is in data.train and in data.held_out; a held-out"
                " question must never be trained on"
            )
    if twins:
        twin = train_texts[_plain(twins[0].question)]
        others = ", ".join(repr(question.id) for question in twins[1:6])
        more = f" So have {len(twins) - 1:,} more: {others}" if others else ""
        raise DataError(
            f"held-out question {twins[0].id!r} has the text of training question {twin!r}; take"
            f" one of them out.{more}{', ...' if len(twins) > 6 else ''}"
        )


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


class StreamState(msgspec.Struct, frozen=True):
    """Where a QuestionStream stands; enough to go on from there."""

    seed: int
    num_questions: int
    """Of all sources together."""
    position: int
    """Questions this stream has handed out."""
    num_workers: int = 1
    """Streams that shared the order."""
    digest: str = ""
    """Of the ids and weights of the sources; other data have another one."""


class QuestionStream:
    """Endless questions in an order that only the sources, their weights and `seed` decide.

    Each source is shuffled anew every time it has been gone through; which source comes when is
    Mixture's. Several workers share the order without repeating each other: worker w of n takes the
    places w, w + n, w + 2n, ...

        3 questions, 2 workers: worker 0 takes places 0 and 2 of epoch 0, place 1 of epoch 1, ...
                                worker 1 takes place 1 of epoch 0, places 0 and 2 of epoch 1, ...
    """

    def __init__(
        self,
        questions: Sequence[Question] | Sequence[QuestionSource],
        seed: int,
        *,
        worker: int = 0,
        num_workers: int = 1,
    ) -> None:
        """`questions` of one set, or the sources of several."""
        sources = _as_sources(questions)
        if not sources or not all(source.questions for source in sources):
            raise DataError("a question stream needs at least one question in every source")
        if not 0 <= worker < num_workers:
            raise ConfigurationError(
                f"worker must be in 0 to {num_workers - 1} for {num_workers} workers, got {worker}"
            )
        self._sources = sources
        self._mixture = Mixture([source.weight for source in sources])
        self._seed = seed
        self._worker = worker
        self._num_workers = num_workers
        self._position = 0
        self._num_questions = sum(len(source.questions) for source in sources)
        self._digest = _digest(sources)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def next(self) -> Question:
        """The next question."""
        source, count = self._mixture.at(self._place())
        questions = self._sources[source].questions
        epoch, offset = divmod(count, len(questions))
        self._position += 1
        return questions[int(self._order(source, epoch)[offset])]

    def state(self) -> StreamState:
        """The position, for a checkpoint."""
        return StreamState(
            self._seed, self._num_questions, self._position, self._num_workers, self._digest
        )

    def restore(self, state: StreamState) -> None:
        """Go on from `state`. Raises ConfigurationError if it belongs to other data or order.

        With another number of workers the common order goes on behind all that has been asked,
        the workers taken to stand side by side: 10 questions by each of 2 workers are 20 places,
        and each of 3 workers goes on from its position 7.
        """
        if (state.seed, state.num_questions) != (self._seed, self._num_questions):
            raise ConfigurationError(
                f"the saved position belongs to data.seed {state.seed} and {state.num_questions}"
                f" questions, this run has data.seed {self._seed} and {self._num_questions}; resume"
                " with the same data, or start a new run"
            )
        if state.digest != self._digest:
            raise ConfigurationError(
                "the saved position belongs to other questions, or other weights of data.sources,"
                " than this run has; resume with the same data, or start a new run"
            )
        if state.position < 0:
            raise ConfigurationError(f"the saved position is {state.position}, below 0")
        self._position = -(-state.position * state.num_workers // self._num_workers)

    def _place(self) -> int:
        return self._worker + self._position * self._num_workers

    def _order(self, source: int, epoch: int) -> np.ndarray:
        """The places of the source's questions in one epoch; the last epoch's is kept."""
        held = self._orders.get(source)
        if held is None or held[0] != epoch:
            generator = np.random.default_rng([self._seed, epoch, source])
            held = epoch, generator.permutation(len(self._sources[source].questions))
            self._orders[source] = held
        return held[1]


def _as_sources(
    questions: Sequence[Question] | Sequence[QuestionSource],
) -> list[QuestionSource]:
    sources = [item for item in questions if isinstance(item, QuestionSource)]
    single = tuple(item for item in questions if isinstance(item, Question))
    return [*sources, QuestionSource(name="", questions=single, weight=1.0)] if single else sources


def _digest(sources: Sequence[QuestionSource]) -> str:
    """Sixteen hexadecimal digits."""
    total = sum(source.weight for source in sources)
    digest = hashlib.blake2b(digest_size=8)
    for source in sources:
        digest.update(f"{source.weight / total!r}\0".encode())
        for question in source.questions:
            digest.update(f"{question.id}\0".encode())
    return digest.hexdigest()
