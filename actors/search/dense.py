"""Dense indices: vectors of an encoder, compared by faiss. The only file that imports it.

`dense-flat` compares a query with every vector, which lie in a mapped file; exact. `dense-hnsw`
walks faiss' graph, whose vectors are mapped too; it visits a few hundred and misses now and then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from leeway.actors.search.documents import Document, contents_of
from leeway.actors.search.encoder import Encoder
from leeway.actors.search.index import Hit
from leeway.actors.search.index_folder import (
    CorpusWriter,
    EncoderFacts,
    Kind,
    Manifest,
    Progress,
)
from leeway.replay.errors import ConfigurationError, DataError

try:
    import faiss
except ModuleNotFoundError:
    faiss: Any = None

VECTORS: Final = "vectors.npy"
GRAPH: Final = "hnsw.faiss"
_PORTION: Final = 1024
"""Passages encoded between two reports of progress."""
NUM_LINKS: Final = 32
"""Edges of a passage in the graph."""
BUILD_BREADTH: Final = 200
SEARCH_BREADTH: Final = 128
"""Candidates kept while the graph is walked; more finds more and takes longer."""


class DenseIndex:
    """Passages ranked by the cosine between their vector and the query's; ties by position."""

    def __init__(
        self, kind: Kind, documents: Sequence[Document], vectors_ND: Any, encoder: Encoder
    ) -> None:
        """`vectors_ND` is an array for dense-flat, faiss' index for dense-hnsw."""
        self.kind = kind
        self.documents = documents
        self._vectors_ND = vectors_ND
        self._encoder = encoder

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def query_ms(self) -> float:
        """See Index. The encoder alone takes that long."""
        return 10.0

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Per query its `top_k` best documents, of all queries together."""
        if not queries:
            return []
        query_QD = np.ascontiguousarray(self._encoder.encode_queries(queries), np.float32)
        top_k = min(top_k, len(self))
        if self.kind == "dense-flat":
            scores_QK, found_QK = faiss.knn(
                query_QD, self._vectors_ND, top_k, metric=faiss.METRIC_INNER_PRODUCT
            )
        else:
            scores_QK, found_QK = self._vectors_ND.search(query_QD, top_k)
        return [
            self._hits(found_K, scores_K)
            for found_K, scores_K in zip(found_QK, scores_QK, strict=True)
        ]

    def _hits(self, found_K: NDArray[Any], scores_K: NDArray[Any]) -> list[Hit]:
        # A graph that reaches fewer passages than asked for fills up with -1.
        order = np.lexsort((found_K, -scores_K))
        return [
            (self.documents[int(found_K[i])], float(scores_K[i])) for i in order if found_K[i] >= 0
        ]


def open_dense(
    folder: Path, manifest: Manifest, documents: Sequence[Document], encoder: Encoder | None
) -> DenseIndex:
    """The dense index of a folder whose manifest has been checked."""
    check_installed()
    facts = manifest.encoder
    if facts is None:
        raise DataError(f"the index {folder} is damaged (no encoder in its manifest)")
    encoder = encoder or _encoder_of(folder, facts)
    if encoder.fingerprint() != facts.fingerprint:
        raise ConfigurationError(
            f"the encoder {encoder.folder} is not the one that built {folder} (another "
            "fingerprint); give the same model, or build the index again"
        )
    encoder.query_prefix, encoder.passage_prefix = facts.query_prefix, facts.passage_prefix
    if manifest.kind == "dense-flat":
        vectors_ND: Any = np.load(folder / VECTORS, mmap_mode="r").view(np.ndarray)
        num_vectors = len(vectors_ND)
    else:
        vectors_ND = faiss.read_index(str(folder / GRAPH), faiss.IO_FLAG_MMAP_IFC)
        vectors_ND.hnsw.efSearch = SEARCH_BREADTH
        num_vectors = vectors_ND.ntotal
    if num_vectors != manifest.num_documents:
        raise DataError(f"the index {folder} is damaged ({num_vectors:,} vectors); build it again")
    return DenseIndex(manifest.kind, documents, vectors_ND, encoder)


def _encoder_of(folder: Path, facts: EncoderFacts) -> Encoder:
    if not Path(facts.folder).is_dir():
        raise ConfigurationError(
            f"the index {folder} was built with the encoder {facts.folder}, which is not there; "
            "give the folder of the same model as the encoder (--encoder, or search.encoder)"
        )
    return Encoder(Path(facts.folder), facts.query_prefix, facts.passage_prefix)


def build_dense(
    documents: Iterable[Document], partial: Path, kind: Kind, encoder: Encoder, progress: Progress
) -> Manifest:
    """Fill `partial` portion by portion; only a graph is in memory as a whole."""
    check_installed()
    corpus, num_dimensions = CorpusWriter(partial, progress), encoder.num_dimensions
    vectors = _Graph(num_dimensions) if kind == "dense-hnsw" else _Rows(partial, num_dimensions)
    for portion in corpus.portions(documents, _PORTION):
        vectors_ND = encoder.encode_passages([contents_of(document) for document in portion])
        if not np.isfinite(vectors_ND).all():
            raise DataError(f"the encoder {encoder.folder} yields vectors that are not finite")
        vectors.add(vectors_ND)
    progress("writing", corpus.num_documents)
    vectors.write(partial)
    facts = EncoderFacts(
        folder=str(encoder.folder.resolve()),
        fingerprint=encoder.fingerprint(),
        num_dimensions=num_dimensions,
        query_prefix=encoder.query_prefix,
        passage_prefix=encoder.passage_prefix,
    )
    return corpus.manifest(kind, facts)


class _Rows:
    """Vectors as they come, in a file that gets its header when their number is known."""

    def __init__(self, partial: Path, num_dimensions: int) -> None:
        self._raw = partial / "vectors.raw"
        self._raw.touch()
        self._num_dimensions = num_dimensions

    def add(self, vectors_ND: NDArray[np.float32]) -> None:
        with self._raw.open("ab") as file:
            file.write(vectors_ND.tobytes())

    def write(self, partial: Path) -> None:
        raw_ND = np.memmap(self._raw, np.float32, "r").reshape(-1, self._num_dimensions)
        file = partial / VECTORS
        vectors_ND = np.lib.format.open_memmap(file, "w+", np.float32, raw_ND.shape)
        vectors_ND[:] = raw_ND
        vectors_ND.flush()
        self._raw.unlink()


class _Graph:
    """faiss' graph, in memory until it is written."""

    def __init__(self, num_dimensions: int) -> None:
        self._graph = faiss.IndexHNSWFlat(num_dimensions, NUM_LINKS, faiss.METRIC_INNER_PRODUCT)
        self._graph.hnsw.efConstruction = BUILD_BREADTH

    def add(self, vectors_ND: NDArray[np.float32]) -> None:
        self._graph.add(vectors_ND)

    def write(self, partial: Path) -> None:
        faiss.write_index(self._graph, str(partial / GRAPH))


def check_installed() -> None:
    """Raise ConfigurationError where faiss is missing."""
    if faiss is None:
        raise ConfigurationError(
            'a dense index needs faiss, which is not installed: pip install "leeway-rl[dense]"'
        )
