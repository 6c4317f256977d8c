"""The index that a configuration or a command line names: a folder, or a corpus read now."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from leeway.actors.config import corpus_file
from leeway.actors.search.documents import stream_documents
from leeway.actors.search.index import Bm25Index, Index
from leeway.actors.search.index_folder import MANIFEST, open_index, read_manifest
from leeway.replay.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from leeway.actors.config import SearchConfig
    from leeway.actors.search.encoder import Encoder

MAX_IN_MEMORY: Final = 200_000
"""Passages that are indexed at every start: 20 s and 0.6 GB. More belong into an index folder."""


def index_of(search: SearchConfig) -> Index:
    """What `search.index` names, or `search.corpus`. Not asked where an outside server is named."""
    if search.index is not None:
        return open_folder(Path(search.index), _path(search.encoder))
    return index_corpus(corpus_file(search))


def index_at(source: Path, encoder: Path | None = None) -> Index:
    """The index folder or corpus `source`."""
    if (source / MANIFEST).is_file():
        return open_folder(source, encoder)
    if encoder is not None:
        raise ConfigurationError(
            f"{source} is not an index, and a corpus is served by BM25, which has no encoder; "
            "build a dense index with leeway retriever index --kind dense-flat"
        )
    return index_corpus(source)


def open_folder(folder: Path, encoder: Path | None = None) -> Index:
    """The index of a folder; a dense one with the model in `encoder`, or the one it names."""
    manifest = read_manifest(folder)
    if manifest.encoder is None:
        if encoder is not None:
            raise ConfigurationError(
                f"{folder} is a BM25 index, which has no encoder; leave it out"
            )
        return open_index(folder)
    return open_index(folder, None if encoder is None else load_encoder(encoder))


def load_encoder(
    folder: Path, query_prefix: str | None = None, passage_prefix: str | None = None
) -> Encoder:
    """Imported here, for torch and transformers take seconds that BM25 does not need."""
    from leeway.actors.search.encoder import Encoder

    return Encoder(folder, query_prefix, passage_prefix)


def check_corpus(corpus: str) -> None:
    """Read a corpus through; DataError names the first bad line, or says that it is too large."""
    for number, _ in enumerate(stream_documents(corpus), start=1):
        if number > MAX_IN_MEMORY:
            raise DataError(too_large(corpus))


def check_folder(search: SearchConfig) -> None:
    """Raise for an index folder that cannot be served, without loading an encoder."""
    assert search.index is not None
    facts = read_manifest(Path(search.index)).encoder
    if facts is None and search.encoder is not None:
        raise ConfigurationError(f"search.index = {search.index} is by BM25; remove search.encoder")
    if facts is not None:
        from leeway.actors.search.dense import check_installed

        check_installed()
        folder = Path(search.encoder or facts.folder)
        if not (folder / "config.json").is_file():
            raise ConfigurationError(
                f"search.index = {search.index} needs its encoder, and {folder} is no model folder;"
                " name one with search.encoder"
            )


def index_corpus(corpus: Path) -> Bm25Index:
    """BM25 over a corpus, in memory."""
    documents = (document for _, document in stream_documents(corpus))
    found = list(islice(documents, MAX_IN_MEMORY + 1))
    if len(found) > MAX_IN_MEMORY:
        raise DataError(too_large(corpus))
    return Bm25Index(found)


def too_large(corpus: Path | str) -> str:
    """The sentence that refuses a corpus."""
    return (
        f"{corpus} holds more than {MAX_IN_MEMORY:,} passages, too many to index at every start; "
        f"build an index once with leeway retriever index {corpus} --out DIR, and name DIR instead"
    )


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
