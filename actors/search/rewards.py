"""Rewards of question answering, as the field defines them: exact match and token F1."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lowercase, no punctuation, no articles, single spaces.

    "The  Eiffel-Tower!" -> "eiffeltower".  "«Zürich»" -> "zürich".  "The" -> "".

    Composed and decomposed accents are the same text (NFC), and punctuation is Unicode's, where
    SQuAD's script knows ASCII only: a typographic quote is no reason to fail an answer.
    """
    return _normalise(text, "")


@lru_cache(maxsize=16_384)
def _normalise(text: str, in_place_of_punctuation: str) -> str:
    lowered = unicodedata.normalize("NFC", text).lower()
    kept = "".join(in_place_of_punctuation if _is_punctuation(c) else c for c in lowered)
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
    """1 if a golden answer, normalised, stands in a normalised passage as whole words, else 0.

    Punctuation is read both as nothing and as a space: "1703" stands in "(1703–1792)", and "USA"
    in "the U.S.A.".
    """
    texts, answers = list(passages), list(golden_answers)
    return float(any(_contains(texts, answers, mark) for mark in ("", " ")))


def _contains(texts: list[str], answers: list[str], in_place_of_punctuation: str) -> bool:
    normal = [_normalise(answer, in_place_of_punctuation) for answer in answers]
    needles = [f" {answer} " for answer in normal if answer]
    haystacks = [f" {_normalise(text, in_place_of_punctuation)} " for text in texts]
    return any(needle in haystack for haystack in haystacks for needle in needles)
