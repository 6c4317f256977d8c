"""Any number of passages and queries, made from the bundled corpus; the same ones every time.

A passage takes four to eight sentences from different bundled passages, about invented persons and
places: the name of a sentence's own subject is replaced. Names are drawn from 200,000 invented
words by a Zipf law, so that words occur as they do in texts: a few in half of the passages, most in
a handful. A query names a passage and words that stand in it; no two are the same.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import accumulate, product
from typing import Final

from leeway.actors.bundle.facts import load_passages
from leeway.actors.search.documents import Document

NUM_NAMES: Final = 200_000
_ZIPF_OFFSET: Final = 20
_NUM_SENTENCES: Final = (4, 5, 6, 7, 8)
_CONSONANTS: Final = "b br c ch d dr f g gr h j k kl l m n p pr r s st t tr v w z"
_VOWELS: Final = "a e i o u ai ou"
_SYLLABLES: Final = list(map("".join, product(_CONSONANTS.split(), _VOWELS.split())))


def passages(num_passages: int) -> Iterator[Document]:
    """Documents about 70 words long."""
    rng = random.Random(0)
    sentences, names = _sentences(), _Names(rng)
    for number in range(num_passages):
        title = f"{names.draw()} {names.draw()}"
        chosen = " ".join(rng.choices(sentences, k=rng.choice(_NUM_SENTENCES)))
        opening = f"{title} {names.draw()} {rng.randrange(1000, 3000)}."
        yield Document(str(number), title, f"{opening} {chosen.replace('{}', title)}")


def query_about(document: Document, rng: random.Random) -> str:
    """The title and four words that stand together in the text, as a question or as they are."""
    words = document.text.split()
    start = rng.randrange(len(words) - 4)
    inside = " ".join(words[start : start + 4])
    if rng.random() < 0.5:
        return f"{document.title} {inside}"
    return f"What is the {inside} of {document.title}?"


def _sentences() -> list[str]:
    """Sentences of the bundled passages, {} in place of the title."""
    return [
        sentence.replace(passage.title, "{}")
        for passage in load_passages()
        for sentence in re.split(r"(?<=[.;]) +", passage.text.removesuffix("..."))
        if len(sentence) > 20
    ]


class _Names:
    """Invented words, the first ones often, the last ones hardly ever."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._words = [
            "".join(rng.choices(_SYLLABLES, k=rng.choice((2, 3, 3, 4)))).capitalize()
            for _ in range(NUM_NAMES)
        ]
        self._weights = list(accumulate(1 / (rank + _ZIPF_OFFSET) for rank in range(NUM_NAMES)))

    def draw(self) -> str:
        return self._rng.choices(self._words, cum_weights=self._weights)[0]
