"""The bundled corpus and questions as records, the index over them, and how a careful player asks.

"What is the currency of the country or territory whose capital is Oslo?"
-> Plan(queries=("capital Oslo", "Norway currency"), bridge="Norway", answer="Norwegian kroner")
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from leeway.actors.config import bundled_dir
from leeway.actors.search.documents import Document
from leeway.actors.search.index import Bm25Index
from leeway.actors.search.rewards import normalise

KEY_OF: Final = {
    "capital": "Capital",
    "currency": "Exchange rates",
    "highest point": "Elevation",
    "internet country code": "Internet country code",
    "national anthem": "National anthem(s)",
    "national symbol": "National symbol(s)",
}
"""Relation as questions name it -> key of the Factbook that states it."""
QUERY_WORDS: Final = {"capital": "capital name", "currency": "currency exchange rates"}
"""What finds a relation better than its own name; the Factbook's words. Others go by their name."""
TOP_K: Final = 2
"""Passages of one observation, as `search.top_k` has it by default."""


class Passage(NamedTuple):
    id: str
    title: str
    text: str


class QuestionFacts(msgspec.Struct, frozen=True):
    kind: str
    hops: int
    support: tuple[str, ...]
    """Passage ids in the order they are needed."""


class BundledQuestion(msgspec.Struct, frozen=True):
    id: str
    question: str
    golden_answers: tuple[str, ...]
    data_source: str
    metadata: QuestionFacts


class Plan(NamedTuple):
    """How a careful player answers a question it can read the passages of."""

    subject: str
    """What the first query is about; stands in the question."""
    relations: tuple[str, ...]
    """Words of each query besides its subject."""
    bridge: str | None
    """The country or person that links the hops; None for one hop."""
    queries: tuple[str, ...]
    answer: str
    """Literally in the last support passage."""


_SPLIT_BRIDGE = re.compile(
    r'What is the (.+) of the country or territory whose (.+?) is "?(.+?)"?\?'
)
_SPLIT_PLACE = re.compile(r"What is the (.+) of the country where (.+) is located\?")
_SPLIT_YEAR = re.compile(r"In what year (?:was|did) (.+) (born|die)\?")
_SPLIT_WORK = re.compile(
    r"In what year (?:was|did) the ((?:author|director|composer) of|artist behind) (.+)"
    r" (born|die)\?"
)
YEAR_WORD: Final = {"born": "born", "die": "died"}


def plan_of(question: BundledQuestion, passages: Mapping[str, Passage]) -> Plan | None:
    """None where a hop cannot be read from its support passage."""
    facts = question.metadata
    last = passages[facts.support[-1]]
    first = passages[facts.support[0]]
    literal = (a for a in question.golden_answers if stands_in(a, last.text))
    answer = next(literal, None)
    if answer is None:
        return None
    text = question.question
    if match := _SPLIT_BRIDGE.fullmatch(text):
        relation, clue, subject = match.groups()
        return _two_hops(first, f"{clue} {subject}", subject, (clue, relation), last.title, answer)
    if match := _SPLIT_PLACE.fullmatch(text):
        relation, subject = match.groups()
        return _two_hops(
            first, f"{subject} country", subject, ("country", relation), last.title, answer
        )
    if match := _SPLIT_WORK.fullmatch(text):
        role, subject, verb = match.groups()
        role = role.split()[0]
        relations = (role, YEAR_WORD[verb])
        return _two_hops(first, f"{subject} {role}", subject, relations, last.title, answer)
    if match := _SPLIT_YEAR.fullmatch(text):
        subject, verb = match.groups()
        relation = YEAR_WORD[verb]
        return Plan(subject, (relation,), None, (f"{subject} {relation}",), answer)
    relation = facts.kind.removeprefix("country_").replace("_", " ")
    if not stands_in(last.title, text):
        return None
    words = QUERY_WORDS.get(relation, relation)
    return Plan(last.title, (words,), None, (f"{last.title} {words}",), answer)


def _two_hops(
    first: Passage,
    first_query: str,
    subject: str,
    relations: tuple[str, str],
    bridge: str,
    answer: str,
) -> Plan | None:
    body = f"{first.title} {first.text}"
    if not stands_in(bridge, body) or not stands_in(subject, body):
        return None
    words = QUERY_WORDS.get(relations[1], relations[1])
    return Plan(subject, (relations[0], words), bridge, (first_query, f"{bridge} {words}"), answer)


def stands_in(phrase: str, text: str) -> bool:
    """Whether `phrase` is in `text` letter by letter, as whole words."""
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text) is not None


def contains(passage: Passage, answer: str) -> bool:
    """Whether a reader would find `answer` there. A code such as ".no" counts with its dot only."""
    if re.fullmatch(r"\.?\w\w", answer):
        return answer.startswith(".") and stands_in(answer, passage.text)
    return f" {normalise(answer)} " in f" {normalise(f'{passage.title} {passage.text}')} "


class BundledIndex:
    """The bundled passages behind the index that the demo's retriever serves."""

    def __init__(self, passages: list[Passage]) -> None:
        self.by_id = {p.id: p for p in passages}
        documents = [Document(p.id, p.title, p.text) for p in passages]
        self._index = Bm25Index(documents)

    def search(self, queries: list[str]) -> list[list[Passage]]:
        """The two best passages of each query; fewer where fewer share a word with it."""
        return [
            [self.by_id[document.id] for document, _ in hits]
            for hits in self._index.search(queries, TOP_K)
        ]


def load_passages(folder: Path | None = None) -> list[Passage]:
    path = (folder or bundled_dir()) / "corpus.jsonl.xz"
    passages = []
    for line in unpacked(path).splitlines():
        record = json.loads(line)
        title, _, text = record["contents"].partition("\n")
        passages.append(Passage(record["id"], title[1:-1], text))
    return passages


def load_questions(split: str, folder: Path | None = None) -> list[BundledQuestion]:
    """`split` is "train" or "held_out"."""
    lines = ((folder or bundled_dir()) / f"{split}.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=BundledQuestion) for line in lines]


def load_titles(folder: Path | None = None) -> list[str]:
    """Article titles that hold no held-out entity."""
    return unpacked((folder or bundled_dir()) / "titles.txt.xz").split("\n")


def unpacked(path: Path) -> str:
    return lzma.decompress(path.read_bytes()).decode()


Names = dict[str, list[tuple[str, ...]]]
"""Names as word sequences, by their first word."""
_WORD = re.compile(r"\w+")


def heldout_names(questions: Iterable[BundledQuestion], passages: Iterable[Passage]) -> Names:
    """Countries, persons, works and places of the held-out questions."""
    titles = {p.id: p.title for p in passages}
    named = {titles[id_] for q in questions for id_ in q.metadata.support}
    named |= {re.sub(r" \(.*\)$|, .*$", "", title) for title in named}
    names: Names = {}
    for title in sorted(named):
        words = tuple(_WORD.findall(title))
        names.setdefault(words[0], []).append(words)
    return names


def mentions(text: str, names: Names) -> bool:
    """Whether one of the names stands in the text, word by word and with its capitals."""
    words = _WORD.findall(text)
    return any(
        tuple(words[i : i + len(name)]) == name
        for i, word in enumerate(words)
        for name in names.get(word, ())
    )
