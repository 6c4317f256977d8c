"""BM25 postings: built from a stream of texts in bounded memory, searched where they lie.

Scores are those of bm25s ("lucene", k1 1.5, b 0.75), computed when the postings are built: a query
only adds them up. Lists of frequent words are as long as the corpus, so a query that read all of
them would cost milliseconds per million passages. `Postings.search` leaves out what cannot matter
(MaxScore) and still returns exactly what adding up everything would.

Letters: V stems, P postings (one per stem and document that holds it), C candidates of a query.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from leeway.actors.search.words import TextWords, Vocabulary

K1: Final = 1.5
B: Final = 0.75
MAX_STEMS: Final = 64
"""Different stems of a query that count: one of 4,000 characters could hold hundreds, all of them
frequent, and keep everybody else waiting for seconds."""
SLACK: Final = 1e-5
"""Float32 sums depend on their order; candidates this close to the cut, relatively, stay in."""

Allocate = Callable[[str, Any, int], NDArray[Any]]
"""(name, dtype, length) -> an array to be filled: in memory, or mapped to a file of that name."""


class Postings:
    """Per stem the documents that hold it, in their order, with their scores.

    starts_V1     (stems + 1,) int64: where each stem's postings begin
    documents_P   int32
    scores_P      float32
    bounds_V      (stems,) float32: each stem's largest score
    """

    NAMES: Final = ("starts", "documents", "scores", "bounds", "text", "ends")
    """The arrays of an index, as `allocate` is asked for them; the last two are the vocabulary."""

    def __init__(self, arrays: dict[str, NDArray[Any]]) -> None:
        """`arrays` holds those of `NAMES`."""
        self._starts_V1, self._bounds_V = arrays["starts"], arrays["bounds"]
        self._documents_P, self._scores_P = arrays["documents"], arrays["scores"]
        self.vocabulary = Vocabulary(arrays["text"], arrays["ends"])

    def search(self, query: str, top_k: int) -> list[tuple[int, float]]:
        """(document, score) of the best `top_k`, equal scores in document order.

        Only documents that share a stem with the query are found.
        """
        numbers = self._searched(self.vocabulary.numbers(query))
        if not numbers:
            return []
        found_C = self._candidates(numbers, top_k)
        scores_C = self._exact_scores(numbers, found_C)
        order = np.argsort(-scores_C, kind="stable")[:top_k]
        return [(int(found_C[i]), float(scores_C[i])) for i in order]

    def _searched(self, numbers: Sequence[int]) -> list[int]:
        """All stems of a query, or the rarest MAX_STEMS of a very long one."""
        if len(numbers) <= MAX_STEMS:
            return list(numbers)
        rarest = sorted(set(numbers), key=lambda stem: (self._num_documents(stem), stem))
        kept = set(rarest[:MAX_STEMS])
        return [stem for stem in numbers if stem in kept]

    def _candidates(self, numbers: Sequence[int], top_k: int) -> NDArray[np.int32]:
        """Documents, in their order, that hold the best `top_k` and little else.

        Stems are taken from the rarest to the most frequent. What cannot reach the `top_k`-th best
        partial sum with all that is still to come, is dropped. Once all that is still to come does
        not reach it by itself, no new document can get in, and further stems are only looked up for
        those that are left.
        """
        repeats = Counter(numbers)
        stems = sorted(repeats, key=lambda stem: (self._num_documents(stem), stem))
        bounds = [float(self._bounds_V[stem]) * repeats[stem] for stem in stems]
        to_come = [sum(bounds[i:]) for i in range(len(bounds) + 1)]
        found_C, sums_C = np.empty(0, np.int32), np.empty(0, np.float32)
        is_closed, cut = False, 0.0
        for i, stem in enumerate(stems):
            is_closed = is_closed or to_come[i] < cut
            if is_closed:
                sums_C += self._scores(stem, found_C) * np.float32(repeats[stem])
            else:
                documents_P, scores_P = self._postings(stem)
                scores_P = scores_P * np.float32(repeats[stem])
                found_C, sums_C = _merge(found_C, sums_C, documents_P, scores_P)
            if len(found_C) >= top_k:
                best_C = np.partition(sums_C, len(sums_C) - top_k)[-top_k:]
                cut = float(best_C[0]) * (1 - SLACK)
                found_C, sums_C = _keep(found_C, sums_C, cut - to_come[i + 1])
        return found_C

    def _exact_scores(
        self, numbers: Sequence[int], found_C: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Sums in the query's order, as bm25s adds them: equal documents get equal scores."""
        sums_C = np.zeros(len(found_C), np.float32)
        for stem in numbers:
            sums_C += self._scores(stem, found_C)
        return sums_C

    def _scores(self, stem: int, found_C: NDArray[np.int32]) -> NDArray[np.float32]:
        """The stem's score for each document of `found_C`, 0 where it does not hold it."""
        documents_P, scores_P = self._postings(stem)
        at_C = np.minimum(np.searchsorted(documents_P, found_C), len(documents_P) - 1)
        return np.where(documents_P[at_C] == found_C, scores_P[at_C], np.float32(0))

    def _postings(self, stem: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        start, end = self._starts_V1[stem], self._starts_V1[stem + 1]
        return self._documents_P[start:end], self._scores_P[start:end]

    def _num_documents(self, stem: int) -> int:
        return int(self._starts_V1[stem + 1] - self._starts_V1[stem])


def _keep(
    found_C: NDArray[np.int32], sums_C: NDArray[np.float32], least: float
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Those whose sum reaches `least`."""
    is_kept_C = sums_C >= least
    return found_C[is_kept_C], sums_C[is_kept_C]


def _merge(
    found_C: NDArray[np.int32],
    sums_C: NDArray[np.float32],
    documents_P: NDArray[np.int32],
    scores_P: NDArray[np.float32],
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The union of both, in document order, scores of common ones added.

    [2, 5] with [1., 2.] and [5, 7] with [3., 4.] -> [2, 5, 7] with [1., 5., 4.]
    """
    if not len(found_C):
        return documents_P, scores_P
    both_M = np.concatenate((found_C, documents_P))
    # Two sorted runs: the stable sort merges them in one pass.
    order_M = np.argsort(both_M, kind="stable")
    both_M, values_M = both_M[order_M], np.concatenate((sums_C, scores_P))[order_M]
    is_second_M = np.zeros(len(both_M), bool)
    np.equal(both_M[1:], both_M[:-1], out=is_second_M[1:])
    second = np.flatnonzero(is_second_M)
    values_M[second - 1] += values_M[second]
    return both_M[~is_second_M], values_M[~is_second_M]


# ---- building


class _Chunk(NamedTuple):
    """Postings of some documents, in the order of stem and document."""

    stems_P: NDArray[np.int32]
    documents_P: NDArray[np.int32]
    counts_P: NDArray[np.int32]


class PostingsBuilder:
    """Takes texts in portions; what it keeps of them in memory is the vocabulary and lengths.

    With `spool`, a folder, counts wait there for the second pass, which knows how many documents
    hold each stem; without, in memory.
    """

    def __init__(self, spool: Path | None = None) -> None:
        self._spool = spool
        self._words = TextWords()
        self._chunks: list[_Chunk | Path] = []
        self._lengths: list[NDArray[np.int32]] = []
        self._num_documents = 0

    def add(self, texts: Sequence[str]) -> None:
        """Count the stems of the next documents."""
        numbers = self._words.number(texts)
        lengths = np.fromiter(map(len, numbers), np.int32, len(numbers))
        stems = np.fromiter(chain.from_iterable(numbers), np.int64, int(lengths.sum()))
        documents = np.repeat(
            np.arange(self._num_documents, self._num_documents + len(texts)), lengths
        )
        keys, counts = np.unique(stems << 32 | documents, return_counts=True)
        chunk = _Chunk(
            (keys >> 32).astype(np.int32),
            (keys & 0xFFFFFFFF).astype(np.int32),
            counts.astype(np.int32),
        )
        self._chunks.append(self._put(chunk))
        self._lengths.append(lengths)
        self._num_documents += len(texts)

    def finish(self, allocate: Allocate) -> dict[str, NDArray[Any]]:
        """The arrays of `Postings`; empty ones where no document holds a word."""
        stems = [stem.encode() for stem in self._words.stems()]
        order = sorted(range(len(stems)), key=stems.__getitem__)
        rank_V = np.empty(len(stems), np.int64)
        rank_V[order] = np.arange(len(stems))
        arrays = self._fill(rank_V, allocate)
        sorted_stems = [stems[i] for i in order]
        ends_V = np.cumsum([len(stem) for stem in sorted_stems], dtype=np.int64)
        text_B = np.frombuffer(b"".join(sorted_stems), np.uint8)
        for name, values in (("text", text_B), ("ends", ends_V)):
            arrays[name] = allocate(name, values.dtype, len(values))
            arrays[name][:] = values
        return arrays

    def _fill(self, rank_V: NDArray[np.int64], allocate: Allocate) -> dict[str, NDArray[Any]]:
        num_holding_V = np.zeros(len(rank_V), np.int64)
        for chunk in self._read():
            num_holding_V += np.bincount(rank_V[chunk.stems_P], minlength=len(rank_V))
        num_postings = int(num_holding_V.sum())
        starts_V1 = allocate("starts", np.int64, len(rank_V) + 1)
        starts_V1[0] = 0
        np.cumsum(num_holding_V, out=starts_V1[1:])
        documents_P = allocate("documents", np.int32, num_postings)
        scores_P = allocate("scores", np.float32, num_postings)
        bounds_V = allocate("bounds", np.float32, len(rank_V))
        bounds_V[:] = 0
        rarity_V = _rarity(num_holding_V, self._num_documents)
        lengths_D = np.concatenate(self._lengths)
        mean_length, next_V = float(lengths_D.mean()), np.array(starts_V1[:-1])
        for chunk in self._read():
            ranks_P = rank_V[chunk.stems_P]
            order_P = np.argsort(ranks_P, kind="stable")
            ranks_P, docs_P = ranks_P[order_P], chunk.documents_P[order_P]
            found_P = _frequency(chunk.counts_P[order_P], lengths_D[docs_P], mean_length)
            weights_P = (rarity_V[ranks_P] * found_P).astype(np.float32)
            ranks_V, first_V, num_V = np.unique(ranks_P, return_index=True, return_counts=True)
            at_P = np.repeat(next_V[ranks_V] - first_V, num_V) + np.arange(len(ranks_P))
            documents_P[at_P], scores_P[at_P] = docs_P, weights_P
            next_V[ranks_V] += num_V
            if len(ranks_V):
                best_V = np.maximum.reduceat(weights_P, first_V)
                bounds_V[ranks_V] = np.maximum(bounds_V[ranks_V], best_V)
        return {
            "starts": starts_V1,
            "documents": documents_P,
            "scores": scores_P,
            "bounds": bounds_V,
        }

    def _put(self, chunk: _Chunk) -> _Chunk | Path:
        if self._spool is None:
            return chunk
        path = self._spool / f"{len(self._chunks)}.npy"
        np.save(path, np.stack(chunk))
        return path

    def _read(self) -> Iterator[_Chunk]:
        for chunk in self._chunks:
            yield chunk if isinstance(chunk, _Chunk) else _Chunk(*np.load(chunk))


def _rarity(num_holding_V: NDArray[np.int64], num_documents: int) -> NDArray[np.float32]:
    """Inverse document frequency: 1 of 2 documents -> log(1 + 1.5 / 1.5) = 0.693."""
    odds_V = (num_documents - num_holding_V + 0.5) / (num_holding_V + 0.5)
    return np.log(1 + odds_V).astype(np.float32)


def _frequency(
    counts_P: NDArray[np.int32], lengths_P: NDArray[np.int32], mean_length: float
) -> NDArray[np.float64]:
    """Once in a document of the mean length -> 1 / (1.5 + 1) = 0.4."""
    return counts_P / (K1 * (1 - B + B * lengths_P / mean_length) + counts_P)
