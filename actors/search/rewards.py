"""Rewards of question answering, as the field defines them: exact match and token F1."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

_ARTICLES = re.compile(r"\b(a|an|the)\b")


@lru_cache(maxsize=65_536)
def normalise(text: str) -> str:
    """Lowercase, no punctuation, no articles, single spaces.

    "The  Eiffel-Tower!" -> "eiffeltower".  "«Zürich»" -> "zürich".  "The" -> "".

    Composed and decomposed accents are the same text (NFC), and punctuation is Unicode's, where
    SQuAD's script knows ASCII only: a typographic quote is no reason to fail an answer.
    """
    lowered = unicodedata.normalize("NFC", text).lower()
    kept = "".join(c for c in lowered if not _is_punctuation(c))
    return " ".join(_ARTICLES.sub(" ", kept).split())


def _is_punctuation(character: str) -> bool:
    return character in _ASCII_SYMBOLS or unicodedata.category(character).startswith("P")


_ASCII_SYMBOLS = frozenset("$+<=>^`|~")
"""ASCII characters that `string.punctuation` holds and Unicode counts as symbols."""


def exact_match(answer: str | None, golden_answers: Iterable[str]) -> float:
    """1 if the normalised answer is any golden answer normalised, else 0. No answer is 0.

    What normalises to nothing never matches: "The" is not a right answer to anything.
    """
    if answer is None:
        return 0.0
    mine = normalise(answer)
    return float(bool(mine) and any(mine == normalise(golden) for golden in golden_answers))


def f1(answer: str | None, golden_answers: Iterable[str]) -> float:
    """Best F1 over the golden answers, between bags of normalised words.

    "norwegian krone" against "krone": precision 1/2, recall 1 -> 2/3.
    """
    if answer is None:
        return 0.0
    mine = normalise(answer).split()
    return max((_f1(mine, normalise(golden).split()) for golden in golden_answers), default=0.0)


def _f1(mine: list[str], golden: list[str]) -> float:
    num_shared = sum((Counter(mine) & Counter(golden)).values())
    if num_shared == 0:
        return 0.0
    precision, recall = num_shared / len(mine), num_shared / len(golden)
    return 2 * precision * recall / (precision + recall)


def contains_answer(passages: Iterable[str], golden_answers: Iterable[str]) -> float:
    """1 if a golden answer, normalised, stands in a normalised passage as whole words, else 0."""
    needles = [f" {normalise(golden)} " for golden in golden_answers if normalise(golden)]
    return float(
        any(
            needle in haystack
            for haystack in (f" {normalise(passage)} " for passage in passages)
            for needle in needles
        )
    )
