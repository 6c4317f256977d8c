"""The BM25 index: what is found, and in which order."""

import pytest

from leeway.actors.search.documents import Document
from leeway.actors.search.index import Bm25Index
from leeway.replay.errors import DataError

DOCUMENTS = [
    Document("no", "Norway", "Its capital is Oslo and it pays in krone."),
    Document("se", "Sweden", "Its capital is Stockholm and it pays in krona."),
    Document("c", "Vitamin C", "Found in fruits."),
    Document("d", "Vitamin D", "Found in fish."),
    Document("empty", "", "the of and"),
]


def ids(index: Bm25Index, query: str, top_k: int = 3) -> list[str]:
    [hits] = index.search([query], top_k)
    return [document.id for document, _ in hits]


def test_the_title_counts_together_with_the_text():
    assert ids(Bm25Index(DOCUMENTS), "Sweden", 1) == ["se"]
    assert ids(Bm25Index(DOCUMENTS), "krone", 1) == ["no"]


def test_words_match_by_their_english_stem():
    assert ids(Bm25Index(DOCUMENTS), "capitals of paying") == ["no", "se"]
    assert ids(Bm25Index(DOCUMENTS), "fruit") == ["c"]


def test_a_word_of_one_letter_counts():
    assert ids(Bm25Index(DOCUMENTS), "vitamin d", 1) == ["d"]


def test_equal_scores_rank_by_position_in_the_corpus():
    same = [Document(str(i), "", "one and the same text") for i in range(50)]
    assert ids(Bm25Index(same), "same text", 3) == ["0", "1", "2"]


def test_a_tie_at_the_cut_goes_to_the_earlier_document():
    # lengths are equal, so documents 1, 3 and 4 tie below document 2
    texts = [
        "other words here",
        "cat words here",
        "cat cat here",
        "cat words here",
        "cat and words here",
    ]
    index = Bm25Index([Document(str(i), "", text) for i, text in enumerate(texts)])
    assert ids(index, "cat", 2) == ["2", "1"]
    assert ids(index, "cat", 3) == ["2", "1", "3"]


def test_only_documents_that_share_a_word_are_found():
    assert ids(Bm25Index(DOCUMENTS), "krone", 5) == ["no"]
    for query in ("zebra", "the of", "", "?!"):
        assert ids(Bm25Index(DOCUMENTS), query) == []


def test_scores_fall_and_are_positive():
    [hits] = Bm25Index(DOCUMENTS).search(["capital krone vitamin"], 5)
    scores = [score for _, score in hits]
    assert scores == sorted(scores, reverse=True)
    assert min(scores) > 0


def test_several_queries_get_a_list_each_in_their_order():
    hits = Bm25Index(DOCUMENTS).search(["krona", "zebra", "oslo"], 1)
    assert [[document.id for document, _ in found] for found in hits] == [["se"], [], ["no"]]


def test_an_index_of_nothing_is_refused():
    with pytest.raises(DataError, match="at least one document"):
        Bm25Index([])
    with pytest.raises(DataError, match="no document of the corpus holds a word"):
        Bm25Index([Document("a", "", "?!"), Document("b", "", "the")])
