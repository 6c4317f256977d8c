"""The retriever: a million passages behind a server of its own, 16 requests in flight over HTTP.

The index is built in a temporary folder, served by `leeway retriever serve`, and asked for queries
that are all different, so that no answer comes from its cache. This process is the client; the
server is another one on the same cores. The plain side adds up the whole postings of every word, as
bm25s does, in this process, without HTTP; both find the same passages with the same scores.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import bm25s
import numpy as np
from numpy.typing import NDArray

from leeway.actors.search.index_folder import Manifest, build_index, open_index
from leeway.actors.search.postings import Postings
from leeway.actors.search.service import RetrievalService
from leeway.actors.search.words import Vocabulary
from leeway.services.bench.passages import passages, query_about
from leeway.services.bench.result import BenchResult
from leeway.services.bench.retriever_load import Connection, retriever_process
from leeway.services.bench.timing import interleaved

NUM_PASSAGES: Final = 1_000_000
NUM_QUERIES: Final = 8_000
NUM_QUICK_PASSAGES: Final = 50_000
NUM_QUICK_QUERIES: Final = 2_000
_NAMES: Final = Postings.NAMES
IN_FLIGHT: Final = 16
TOP_K: Final = 3
REPEATS: Final = 3
NUM_PLAIN: Final = 200
"""Queries of the plain side, which takes a dozen milliseconds for each."""
REQUEST_TIMEOUT_S: Final = 30.0


def run(*, quick: bool) -> BenchResult:
    """Build, serve, load, compare."""
    num_passages = NUM_QUICK_PASSAGES if quick else NUM_PASSAGES
    num_queries = NUM_QUICK_QUERIES if quick else NUM_QUERIES
    with tempfile.TemporaryDirectory(prefix="leeway-bench-") as scratch:
        folder = Path(scratch) / "index"
        began = time.monotonic()
        manifest = build_index(passages(num_passages), folder)
        build_s = time.monotonic() - began
        queries = _queries(folder, num_queries + NUM_PLAIN)
        served = _serve_and_load(folder, queries[:num_queries])
        inside = asyncio.run(_load_service(folder, queries[:num_queries]))
        plain_ms, ours_ms = _compare_with_plain(folder, queries[num_queries:])
    return _result(manifest, build_s, served, inside, plain_ms, ours_ms)


def _queries(folder: Path, num_queries: int) -> list[str]:
    """About passages all over the corpus; no two alike."""
    rng, index = random.Random(1), open_index(folder)
    documents = index.documents
    queries: dict[str, None] = {}
    while len(queries) < num_queries:
        queries[query_about(documents[rng.randrange(len(documents))], rng)] = None
    return list(queries)


@dataclass(frozen=True)
class _Latencies:
    """Of one way to ask all queries."""

    ms: NDArray[np.float64]
    wall_s: float

    @property
    def p50_ms(self) -> float:
        return float(np.percentile(self.ms, 50))

    @property
    def p99_ms(self) -> float:
        return float(np.percentile(self.ms, 99))

    @property
    def per_s(self) -> float:
        return len(self.ms) / self.wall_s


@dataclass(frozen=True)
class _Served:
    """The server under load."""

    latencies: _Latencies
    start_s: float
    """From the start of the process to the first answer."""
    resident_bytes: int
    """After the load; pages of the index that it read included."""
    private_bytes: int
    """The part of it that is not the mapped index or a program file."""
    num_cache_hits: int
    cpu_ms: float
    """Of the server, per query."""


# ---- over HTTP


def _serve_and_load(folder: Path, queries: Sequence[str]) -> _Served:
    began = time.monotonic()
    with retriever_process(folder) as (process, url):
        asyncio.run(_ask(url, ["the first answer"], 1))
        start_s = time.monotonic() - began
        cpu_s = _cpu_s(process.pid)
        latencies = asyncio.run(_ask(url, queries, IN_FLIGHT))
        return _Served(
            latencies,
            start_s,
            *_memory(process.pid),
            num_cache_hits=asyncio.run(_num_cache_hits(url)),
            cpu_ms=(_cpu_s(process.pid) - cpu_s) / len(queries) * 1e3,
        )


async def _ask(url: str, queries: Sequence[str], in_flight: int) -> _Latencies:
    """Every query in a request of its own, over `in_flight` connections that stay open."""
    left, ms = iter(queries), []

    async def ask_next(connection: Connection) -> None:
        for query in left:
            began = time.perf_counter()
            body = {"queries": [query], "topk": TOP_K, "return_scores": True}
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await connection.post("/retrieve", body)
            ms.append((time.perf_counter() - began) * 1e3)

    connections = [await Connection.open(url) for _ in range(in_flight)]
    began = time.perf_counter()
    await asyncio.gather(*map(ask_next, connections))
    wall_s = time.perf_counter() - began
    for connection in connections:
        connection.close()
    return _Latencies(np.array(ms), wall_s)


async def _num_cache_hits(url: str) -> int:
    connection = await Connection.open(url)
    health = json.loads(await connection.get("/healthz"))
    connection.close()
    return health["num_cache_hits"]


# ---- in this process


async def _load_service(folder: Path, queries: Sequence[str]) -> _Latencies:
    """The same without HTTP: queue, batches and index alone, of a fresh service."""
    service, left, ms = RetrievalService(open_index(folder)), iter(queries), []

    async def ask_next() -> None:
        for query in left:
            began = time.perf_counter()
            await service.search([query], TOP_K)
            ms.append((time.perf_counter() - began) * 1e3)

    began = time.perf_counter()
    await asyncio.gather(*(ask_next() for _ in range(IN_FLIGHT)))
    wall_s = time.perf_counter() - began
    await service.close()
    return _Latencies(np.array(ms), wall_s)


class _Plain:
    """bm25s over the same postings: every posting of every word added up, then the best picked."""

    def __init__(self, folder: Path, num_documents: int) -> None:
        arrays = {name: np.load(folder / f"bm25_{name}.npy", mmap_mode="r") for name in _NAMES}
        self._vocabulary = Vocabulary(arrays["text"], arrays["ends"])
        self._bm25 = bm25s.BM25(method="lucene")
        self._bm25.nonoccurrence_array = None
        self._bm25.scores = {
            "data": arrays["scores"].view(np.ndarray),
            "indices": arrays["documents"].view(np.ndarray),
            "indptr": arrays["starts"].view(np.ndarray),
            "num_docs": num_documents,
        }

    def scores(self, query: str) -> NDArray[np.float32]:
        """Of every document."""
        return self._bm25.get_scores_from_ids(self._vocabulary.numbers(query))

    def search(self, query: str) -> list[int]:
        """Numbers of the best documents, of those that hold a word of the query.

        Not by bm25s' own `topk`, whose partition of a million scores, most of them 0, takes 150 ms.
        """
        scores = self.scores(query)
        found = np.flatnonzero(scores)
        if len(found) > TOP_K:
            found = found[np.argpartition(scores[found], len(found) - TOP_K)[-TOP_K:]]
        return found[np.argsort(-scores[found], kind="stable")].tolist()


def _compare_with_plain(folder: Path, queries: Sequence[str]) -> tuple[float, float]:
    """Milliseconds per query, whole postings and ours, one after another."""
    index = open_index(folder)
    plain = _Plain(folder, len(index))
    ours_s, plain_s = interleaved(
        lambda: [index.search([query], TOP_K) for query in queries],
        lambda: [plain.search(query) for query in queries],
        REPEATS,
    )
    return plain_s / len(queries) * 1e3, ours_s / len(queries) * 1e3


# ---- the result


def _result(
    manifest: Manifest,
    build_s: float,
    served: _Served,
    inside: _Latencies,
    plain_ms: float,
    ours_ms: float,
) -> BenchResult:
    over_http = served.latencies
    return BenchResult(
        name="retriever",
        columns=("way", "in flight", "p50 ms", "p99 ms", "queries/s"),
        rows=(
            _row("over HTTP, a server of its own", IN_FLIGHT, over_http),
            _row("in this process, queue and batches", IN_FLIGHT, inside),
            ("in this process, one by one", "1", f"{ours_ms:.2f}", "", f"{1e3 / ours_ms:.0f}"),
            ("bm25s, every posting", "1", f"{plain_ms:.2f}", "", f"{1e3 / plain_ms:.0f}"),
        ),
        keys={
            "p50_ms": round(over_http.p50_ms, 2),
            "p99_ms": round(over_http.p99_ms, 2),
            "queries_per_s": round(over_http.per_s, 1),
            "cpu_ms_per_query": round(served.cpu_ms, 3),
            "index_bytes": manifest.num_bytes,
            "resident_bytes": served.resident_bytes,
            "private_bytes": served.private_bytes,
            "start_s": round(served.start_s, 2),
            "build_s": round(build_s, 1),
            "inside_p50_ms": round(inside.p50_ms, 2),
            "search_ms": round(ours_ms, 3),
            "plain_ms": round(plain_ms, 3),
            "num_passages": manifest.num_documents,
            "num_queries": len(over_http.ms),
            "num_cache_hits": served.num_cache_hits,
        },
    )


def _row(name: str, in_flight: int, times: _Latencies) -> tuple[str, ...]:
    return (
        name,
        str(in_flight),
        f"{times.p50_ms:.1f}",
        f"{times.p99_ms:.1f}",
        f"{times.per_s:.0f}",
    )


def _memory(pid: int) -> tuple[int, int]:
    """Bytes of a process in memory, and those among them that only it has."""
    sizes = _fields(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8"))
    return sizes["Rss"], sizes["Anonymous"]


def _fields(rollup: str) -> dict[str, int]:
    """Bytes by name of lines such as `Rss:    1234 kB`."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", rollup, re.MULTILINE)
    return {name: int(number) * 1024 for name, number in found}


def _cpu_s(pid: int) -> float:
    """Seconds of a core that a process has used."""
    after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
