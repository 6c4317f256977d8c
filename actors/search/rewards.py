"""Rewards of question answering: exact match, F1, sub-string, multiple choice, format.

Each takes the text of the last answer, None where there is none, and gives 0 to 1. By name, for
`reward.answer`, they are in ANSWERS.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Final

from leeway.actors.environment import Question
from leeway.actors.search import protocol

AnswerReward = Callable[[str | None, Question], float]
"""From the last answer's text and the question to 0 to 1."""

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
    kept = _without_punctuation(text, in_place_of_punctuation)
    return " ".join(_ARTICLES.sub(" ", kept).split())


def _without_punctuation(text: str, in_place_of_punctuation: str) -> str:
    lowered = unicodedata.normalize("NFC", text).lower()
    return lowered.translate(_PUNCTUATION[in_place_of_punctuation])


class _Punctuation(dict[int, int | str | None]):
    """What `str.translate` makes of a character; each is looked up in Unicode's table once."""

    def __init__(self, in_place_of_punctuation: str | None) -> None:
        super().__init__()
        self._replacement = in_place_of_punctuation

    def __missing__(self, code: int) -> int | str | None:
        kept = self._replacement if _is_punctuation(chr(code)) else code
        self[code] = kept
        return kept


_PUNCTUATION = {"": _Punctuation(None), " ": _Punctuation(" ")}
"""By what stands in its place. None, because translate is slow with empty strings."""


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
    # A passage without an answer's longest word, as most are, is not looked at closely.
    words = [max(needle.split(), key=len) for needle in needles]
    for text in texts:
        rough = _without_punctuation(text, in_place_of_punctuation)
        if any(word in rough for word in words):
            haystack = f" {_normalise(text, in_place_of_punctuation)} "
            if any(needle in haystack for needle in needles):
                return True
    return False


def substring_match(answer: str | None, golden_answers: Iterable[str]) -> float:
    """1 if a golden answer, normalised, stands in the normalised answer as whole words, else 0.

    "It is the krone of Norway" holds "krone"; "Brussels" does not hold "us".
    """
    return 0.0 if answer is None else contains_answer([answer], golden_answers)


def multiple_choice(
    answer: str | None, golden_answers: Iterable[str], choices: Sequence[str]
) -> float:
    """1 if the answer names one choice and it is a right one, else 0. `golden_answers` are letters.

    Choices "aspirin", "heparin", golden "B": "B", "b", "(B)", "B.", "B: heparin" and "Heparin" are
    right; "A", "A or B", "B: aspirin", "B because of the clots" are wrong.
    """
    chosen = chosen_letters(answer, choices) if answer is not None else frozenset[str]()
    golden = {letter.strip().upper() for letter in golden_answers}
    return float(bool(chosen) and chosen <= golden)


_LETTER = re.compile(r"\(?([a-z])(?:\)|[.:)]+)?(?:(?<=[.:)])\s*(.*))?", re.DOTALL)


def chosen_letters(answer: str, choices: Sequence[str]) -> frozenset[str]:
    """Letters of the choices an answer names: none if it is unclear, several only for choices with
    one text.
    """
    plain = _plain(answer)
    named = _LETTER.fullmatch(plain)
    texts = [_plain(choice) for choice in choices]
    same = frozenset(chr(65 + i) for i, text in enumerate(texts) if text and text == plain)
    # "E. coli" is a choice's text before it is the letter E with something behind it.
    if named is None or (named[2] and same):
        return same
    letter, rest = named[1].upper(), named[2]
    place = ord(letter) - 65
    if choices and place >= len(choices):
        return frozenset()
    if rest and (place >= len(texts) or rest != texts[place]):
        return frozenset()
    return frozenset({letter})


def _plain(text: str) -> str:
    """Compatibility forms, case and white space are no difference, nor is a full stop at the end of
    a text; other signs are, or "+" and "-" would be one choice.
    """
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return folded if len(folded) <= 2 else folded.removesuffix(".")


def format_score(generated_turns: Sequence[str], *, thought_is_open: bool = False) -> float:
    """1 if every turn is one thought and one action, and the last an answer; else 0. No turn is 0.

    `thought_is_open`: the prompt ended with `<think>`, so the first turn need not write it.
    """
    well_formed = [
        protocol.is_well_formed(turn, thought_is_open=thought_is_open and i == 0)
        for i, turn in enumerate(generated_turns)
    ]
    ends = bool(generated_turns) and protocol.parse(generated_turns[-1]).action == "answer"
    return float(ends and all(well_formed))


def _auto(answer: str | None, question: Question) -> float:
    return _choice(answer, question) if question.choices else _exact(answer, question)


def _exact(answer: str | None, question: Question) -> float:
    return exact_match(answer, question.golden_answers)


def _choice(answer: str | None, question: Question) -> float:
    return multiple_choice(answer, question.golden_answers, question.choices)


ANSWERS: Final[dict[str, AnswerReward]] = {
    "auto": _auto,
    "exact-match": _exact,
    "f1": lambda answer, question: f1(answer, question.golden_answers),
    "substring": lambda answer, question: substring_match(answer, question.golden_answers),
    "multiple-choice": _choice,
}
"""What `reward.answer` may name."""
