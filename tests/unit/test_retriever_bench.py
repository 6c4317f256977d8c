"""`leeway bench retriever`: what it makes and measures, on a small corpus."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from leeway.actors.search.index_folder import build_index, open_index
from leeway.services.bench import retriever
from leeway.services.bench.passages import passages, query_about
from leeway.services.bench.report import plain_table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "index"
    build_index(passages(500), folder)
    return folder


def test_passages_are_the_same_every_time_and_none_is_another():
    first, again = list(passages(300)), list(islice(passages(1000), 300))
    assert first == again
    assert len({document.text for document in first}) == 300


def test_words_occur_as_in_texts():
    found = Counter(word for d in passages(2000) for word in set(d.text.lower().split()))
    counts = sorted(found.values(), reverse=True)
    assert counts[0] > 1000  # the most frequent in more than half of the passages
    assert sum(count <= 5 for count in counts) > len(counts) / 2


def test_a_query_finds_the_passage_it_is_about(folder: Path):
    index, rng = open_index(folder), random.Random(0)
    for number in range(0, 500, 25):
        [hits] = index.search([query_about(index.documents[number], rng)], 3)
        assert str(number) in [document.id for document, _ in hits]


def test_no_two_queries_are_alike(folder: Path):
    assert len(set(retriever._queries(folder, 400))) == 400


def test_plain_bm25s_finds_the_same(folder: Path):
    index, plain = open_index(folder), retriever._Plain(folder, 500)
    for query in retriever._queries(folder, 40):
        [hits] = index.search([query], retriever.TOP_K)
        scores = plain.scores(query)
        assert [score for _, score in hits] == sorted(scores, reverse=True)[: retriever.TOP_K]
        assert [scores[int(document.id)] for document, _ in hits] == [score for _, score in hits]


def test_memory_is_read_from_the_kernel():
    rollup = (
        "5587-7ffd ---p 00000000 00:00 0  [rollup]\nRss:  1234 kB\nPss:  9 kB\nAnonymous: 7 kB\n"
    )
    assert retriever._fields(rollup) == {"Rss": 1263616, "Pss": 9216, "Anonymous": 7168}


def test_the_bench_measures_a_server_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retriever, "NUM_QUICK_PASSAGES", 300)
    monkeypatch.setattr(retriever, "NUM_QUICK_QUERIES", 100)
    monkeypatch.setattr(retriever, "NUM_PLAIN", 10)
    result = retriever.run(quick=True)
    keys = result.keys
    assert {"p50_ms", "p99_ms", "index_bytes", "start_s", "build_s", "resident_bytes"} <= set(keys)
    assert (keys["num_passages"], keys["num_queries"], keys["num_cache_hits"]) == (300, 100, 0)
    assert 0 < float(keys["p50_ms"]) <= float(keys["p99_ms"])
    assert float(keys["private_bytes"]) <= float(keys["resident_bytes"])
    assert "over HTTP" in plain_table(result, "here")
