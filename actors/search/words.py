"""Words of texts and queries: split, English stop words left out, English stems by PyStemmer."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import Stemmer
from numpy.typing import NDArray

# Where JAX is installed, importing bm25s starts it, and by default it takes three quarters of a
# GPU's memory.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
from bm25s.tokenization import STOPWORDS_EN, Tokenizer

_WORD: Final = r"(?u)\b\w+\b"
"""Words of one character count: "Vitamin C" and "Apollo 8" are about them."""
_CACHED_WORDS: Final = 65_536
_STOPWORDS: Final = frozenset(STOPWORDS_EN)


class TextWords:
    """Numbers the stems of a corpus in the order in which they first come."""

    def __init__(self) -> None:
        stemmer = Stemmer.Stemmer("english")
        self._tokenizer = Tokenizer(splitter=_WORD, stopwords="english", stemmer=stemmer)

    def number(self, texts: Sequence[str]) -> list[list[int]]:
        """Per text the numbers of its stems, repeated as they repeat; empty where it has none."""
        return self._tokenizer.tokenize(  # pyright: ignore[reportReturnType]
            list(texts),
            update_vocab=True,
            show_progress=False,
            return_as="ids",
            allow_empty=False,
        )

    def stems(self) -> list[str]:
        """Every stem so far, by its number."""
        return list(self._tokenizer.stem_to_sid)


class Vocabulary:
    """Stems in the order of their UTF-8 bytes, found by bisection in one buffer.

    Not a dictionary: that of a large corpus takes gigabytes and half a minute to build, the buffer
    is mapped into memory in no time. A query asks for a few words, the frequent ones are cached.

        text_B     (bytes,) uint8, the stems one behind the other
        ends_V     (stems,) int64, where each one ends
    """

    def __init__(self, text_B: NDArray[np.uint8], ends_V: NDArray[np.int64]) -> None:
        self._text = text_B.data
        self._ends_V = ends_V
        self._stemmer = Stemmer.Stemmer("english")
        self._lock = threading.Lock()
        self._number = lru_cache(maxsize=_CACHED_WORDS)(self._number_uncached)

    def __len__(self) -> int:
        return len(self._ends_V)

    def numbers(self, query: str) -> list[int]:
        """Numbers of the query's known stems, in its order, repeated as they repeat.

        Words that the corpus does not hold change nothing here: a policy invents words without end,
        and the vocabulary of a server must not grow by them.
        """
        found = (self._number(word) for word in re.findall(_WORD, query.lower()))
        return [number for number in found if number is not None]

    def _number_uncached(self, word: str) -> int | None:
        if word in _STOPWORDS:
            return None
        with self._lock:
            stem = self._stemmer.stemWord(word)
        wanted, low, high = stem.encode(), 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._stem(middle) < wanted:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self) and self._stem(low) == wanted else None

    def _stem(self, number: int) -> bytes:
        start = int(self._ends_V[number - 1]) if number else 0
        return bytes(self._text[start : int(self._ends_V[number])])
