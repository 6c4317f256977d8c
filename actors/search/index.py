"""BM25 in memory: bm25s scores, English stems by PyStemmer, exact and repeatable ranking."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import bm25s
import numpy as np
import Stemmer
from bm25s.tokenization import Tokenizer
from numpy.typing import NDArray

from leeway.actors.search.documents import Document
from leeway.replay.errors import DataError

Hit = tuple[Document, float]
"""A document and its BM25 score; higher is better, never 0."""

_CACHED_QUERIES: Final = 8192
_WORD: Final = r"(?u)\b\w+\b"
"""Words of one character count: "Vitamin C" and "Apollo 8" are about them."""


class Bm25Index:
    """Documents ranked by BM25 over title and text together; ties go to the earlier document."""

    def __init__(self, documents: Sequence[Document]) -> None:
        if not documents:
            raise DataError("an index needs at least one document")
        self._documents = documents
        self._stemmer = Stemmer.Stemmer("english")
        self._stemmer_lock = threading.Lock()
        self._tokenizer = Tokenizer(splitter=_WORD, stopwords="english", stemmer=self._stemmer)
        ids = self._tokenizer.tokenize(
            [f"{document.title} {document.text}" for document in documents],
            update_vocab=True,
            show_progress=False,
            return_as="ids",
            allow_empty=False,
        )
        if not self._tokenizer.stem_to_sid:
            raise DataError("no document of the corpus holds a word that can be searched for")
        self._bm25 = bm25s.BM25(method="lucene")
        self._bm25.index((ids, self._tokenizer.stem_to_sid), show_progress=False)
        self._search = lru_cache(maxsize=_CACHED_QUERIES)(self._search_uncached)

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Per query its `top_k` best documents; fewer when fewer share a word with it."""
        return [list(self._search(query, top_k)) for query in queries]

    def _search_uncached(self, query: str, top_k: int) -> tuple[Hit, ...]:
        word_ids = self._word_ids(query)
        if not word_ids:
            return ()
        scores = self._bm25.get_scores_from_ids(word_ids)
        return tuple((self._documents[d], float(scores[d])) for d in _best(scores, top_k))

    def _word_ids(self, query: str) -> list[int]:
        """Ids of the query's known stems.

        Not through `Tokenizer.tokenize`, which remembers every word it meets: a policy invents
        words without end, and the vocabulary of a server must not grow by them.
        """
        ids: list[int] = []
        for word in self._tokenizer.splitter(query.lower()):
            word_id = self._tokenizer.word_to_id.get(word)
            if word_id is None and word not in _STOPWORDS:
                with self._stemmer_lock:
                    stem = self._stemmer.stemWord(word)
                word_id = self._tokenizer.stem_to_sid.get(stem)
            if word_id is not None:
                ids.append(word_id)
        return ids


_STOPWORDS: Final = frozenset(bm25s.tokenization.STOPWORDS_EN)


def _best(scores: NDArray[np.float32], top_k: int) -> list[int]:
    """Indices of the `top_k` highest positive scores, equal ones in index order.

    [1, 3, 3, 0, 3], top_k 2 -> [1, 2]
    """
    candidates = np.flatnonzero(scores > 0)
    if len(candidates) > top_k:
        held = scores[candidates]
        threshold = np.partition(held, len(held) - top_k)[len(held) - top_k]
        candidates = candidates[held >= threshold]
    order = np.argsort(-scores[candidates], kind="stable")[:top_k]
    return [int(d) for d in candidates[order]]
