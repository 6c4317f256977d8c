"""BM25 postings: the scores and the ranking of bm25s, whatever is left out on the way."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import bm25s
import numpy as np
import pytest
import Stemmer
from bm25s.tokenization import Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.actors.search import postings as postings_file
from leeway.actors.search.postings import Postings, PostingsBuilder, _frequency, _merge, _rarity

WORDS = ["cat", "dog", "cats", "the", "running", "ran", "oslo", "x", "42", "Ünïcode", "fjord"]
texts = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)


def build(corpus: list[str], portion: int = 1000, spool: Path | None = None) -> Postings:
    builder = PostingsBuilder(spool)
    for start in range(0, len(corpus), portion):
        builder.add(corpus[start : start + portion])
    return Postings(builder.finish(lambda name, dtype, length: np.empty(length, dtype)))


class Reference:
    """bm25s itself: every posting added up; equal scores in document order."""

    OPTIONS: ClassVar[dict[str, Any]] = {
        "show_progress": False,
        "return_as": "ids",
        "allow_empty": False,
    }

    def __init__(self, corpus: list[str]) -> None:
        self._words = Tokenizer(
            splitter=r"(?u)\b\w+\b", stopwords="english", stemmer=Stemmer.Stemmer("english")
        )
        ids = self._words.tokenize(corpus, update_vocab=True, **self.OPTIONS)
        self._index = bm25s.BM25(method="lucene")
        self._index.index((ids, self._words.stem_to_sid), show_progress=False)

    def search(self, query: str, top_k: int) -> list[tuple[int, float]]:
        [asked] = self._words.tokenize([query], update_vocab=False, **self.OPTIONS)
        if not asked:
            return []
        scores = self._index.get_scores_from_ids(asked)
        found = np.flatnonzero(scores > 0)
        ranked = found[np.lexsort((found, -scores[found]))][:top_k]
        return [(int(number), float(scores[number])) for number in ranked]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(texts, min_size=1, max_size=30).filter(lambda all: "cat" in " ".join(all)),
    texts,
    st.integers(1, 6),
    st.integers(1, 7),
)
def test_the_ranking_is_that_of_bm25s(corpus: list[str], query: str, top_k: int, portion: int):
    found = build(corpus, portion).search(query, top_k)
    expected = Reference(corpus).search(query, top_k)
    assert [number for number, _ in found] == [number for number, _ in expected]
    assert [s for _, s in found] == pytest.approx([s for _, s in expected], rel=1e-6)


def test_frequent_words_are_looked_up_and_not_read_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
):
    merged: list[int] = []

    def counting_merge(*arguments: Any) -> Any:
        merged.append(len(arguments[2]))
        return _merge(*arguments)

    monkeypatch.setattr(postings_file, "_merge", counting_merge)
    rng = random.Random(3)
    rare = [f"rare{i}" for i in range(400)]
    corpus = [
        " ".join([rare[i % 400], *rng.choices(["common", "usual", "daily", "plain"], k=6)])
        for i in range(2000)
    ]
    index, everything = build(corpus), Reference(corpus)
    for i in range(0, 400, 7):
        query = f"rare{i} common daily usual plain common"
        assert index.search(query, 3) == everything.search(query, 3)
    # a rare word is in five documents, a common one in most of the 2,000
    assert set(merged) == {5}


def test_postings_that_waited_on_disk_are_those_kept_in_memory(tmp_path: Path):
    corpus = [f"word{i % 7} and word{i % 3} in Oslo" for i in range(50)]
    on_disk, in_memory = build(corpus, 8, tmp_path), build(corpus, 50)
    assert sorted(file.name for file in tmp_path.iterdir())[:2] == ["0.npy", "1.npy"]
    for query in ("word1 oslo", "word6 word2"):
        assert on_disk.search(query, 5) == in_memory.search(query, 5)


def test_a_word_in_1_of_2_documents_weighs_the_logarithm_of_2():
    # (2 - 1 + 0.5) / (1 + 0.5) = 1, so log(1 + 1)
    assert _rarity(np.array([1]), 2)[0] == pytest.approx(0.693147, abs=1e-6)


def test_once_in_a_document_of_the_mean_length_is_two_fifths():
    # 1 / (1.5 x (0.25 + 0.75 x 10 / 10) + 1) = 0.4, and twice as long: 1 / (1.5 x 1.75 + 1)
    found = _frequency(np.array([1, 1]), np.array([10, 20]), 10.0)
    assert found == pytest.approx([0.4, 1 / 3.625])


def test_common_documents_of_two_lists_add_their_scores():
    found, sums = _merge(
        np.array([2, 5], np.int32),
        np.array([1, 2], np.float32),
        np.array([5, 7], np.int32),
        np.array([3, 4], np.float32),
    )
    assert (found.tolist(), sums.tolist()) == ([2, 5, 7], [1, 5, 4])


def test_of_a_very_long_query_the_rarest_words_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(postings_file, "MAX_STEMS", 2)
    index = build(["oslo fjord", "oslo cat", "oslo dog", "dog oslo", "dog bird"])
    # of oslo (4 documents), dog (3), fjord (1) and cat (1) the last two are left
    assert [number for number, _ in index.search("oslo dog fjord cat", 5)] == [0, 1]


def test_the_vocabulary_is_found_by_bytes_and_does_not_grow():
    index = build(["straße äpfel cat", "cat 猫"])
    assert [n for n, _ in index.search("猫", 1)] == [1]
    assert [n for n, _ in index.search("ÄPFEL", 1)] == [0]
    before = len(index.vocabulary)
    assert index.search("a0 zzz invented straßen", 1) == []
    assert len(index.vocabulary) == before
