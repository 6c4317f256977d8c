"""An index on disk: a folder that is built whole or not at all, and mapped into memory to serve.

    manifest.json           written last; without it the folder is not an index
    documents.msgpack       the passages, and document_ends.npy
    bm25_*.npy              kind bm25: the arrays of Postings
    vectors.npy             kind dense-flat: a vector per passage
    hnsw.faiss              kind dense-hnsw: faiss' own file

A build fills a folder beside the target, `.NAME.partial`, and renames it when it is complete and on
disk. What a killed build left there is removed by the next one; a file in it that the builder keeps
locked tells a dead build from one that is still running.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from leeway.actors.search.document_store import DocumentStore, DocumentWriter
from leeway.actors.search.documents import Document
from leeway.actors.search.index import Bm25Index, Index, text_of
from leeway.actors.search.postings import Postings, PostingsBuilder
from leeway.replay.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from leeway.actors.search.encoder import Encoder

Kind = Literal["bm25", "dense-flat", "dense-hnsw"]

FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
_LOCK: Final = "building.lock"
_PORTION: Final = 8192
"""Passages in memory at once while an index is built."""

Progress = Callable[[str, int], None]
"""(what is done, passages done so far); called after every portion."""


class EncoderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Which model turned the passages into vectors; queries must go through the same."""

    folder: str
    fingerprint: str
    """Of its configuration, tokenizer and weights; see Encoder.fingerprint."""
    num_dimensions: int
    query_prefix: str
    passage_prefix: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an index folder says of itself, checked when it is opened."""

    format_version: int
    kind: Kind
    num_documents: int
    corpus_sha256: str
    """Over id, title and text of every passage, in their order."""
    file_bytes: dict[str, int]
    """Size of every other file of the folder, by its name."""
    encoder: EncoderFacts | None = None
    """None for BM25."""

    @property
    def num_bytes(self) -> int:
        """Size of the folder."""
        return sum(self.file_bytes.values())


# ---- opening


def open_index(folder: Path, encoder: Encoder | None = None) -> Index:
    """The index of a folder, mapped into memory.

    A dense one needs its encoder: `encoder`, or the model folder that the manifest names. Raises
    ConfigurationError where the folder is not an index, and DataError where it is damaged.
    """
    manifest = read_manifest(folder)
    documents = DocumentStore(folder)
    if len(documents) != manifest.num_documents:
        raise _damaged(folder, f"it holds {len(documents):,} passages")
    if manifest.kind == "bm25":
        names = {name: folder / f"bm25_{name}.npy" for name in Postings.NAMES}
        arrays = {name: np.load(path, mmap_mode="r") for name, path in names.items()}
        views = {name: array.view(np.ndarray) for name, array in arrays.items()}
        return Bm25Index(documents, Postings(views))
    from leeway.actors.search.dense import open_dense

    return open_dense(folder, manifest, documents, encoder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest, its version and every file's size checked."""
    try:
        content = (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(
            f"{folder} holds no index (no {MANIFEST}); build one with "
            f"leeway retriever index CORPUS --out {folder}"
        ) from None
    try:
        version = msgspec.json.decode(content, type=dict[str, Any]).get("format_version")
        if version != FORMAT_VERSION:
            raise ConfigurationError(
                f"{folder} is an index of format {version}, this release reads "
                f"{FORMAT_VERSION}; build it again with leeway retriever index"
            )
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(folder, f"{MANIFEST}: {error}") from None
    for name, size in manifest.file_bytes.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else 0
        if found != size:
            raise _damaged(folder, f"{name} has {found:,} bytes instead of {size:,}")
    return manifest


def _damaged(folder: Path, what: str) -> DataError:
    return DataError(f"the index {folder} is damaged ({what}); build it again")


# ---- building


def build_index(
    documents: Iterable[Document],
    folder: Path,
    *,
    kind: Kind = "bm25",
    encoder: Encoder | None = None,
    force: bool = False,
    progress: Progress = lambda what, num_done: None,
) -> Manifest:
    """Build the index of `documents` in `folder`; `force` replaces an index that is there.

    The passages are read once, one portion in memory at a time. Raises ConfigurationError where the
    folder is taken, DataError where there is nothing to search.
    """
    folder = folder.resolve()  # a link would be renamed, not what it leads to
    check_target(folder, force)
    with _partial_folder(folder) as partial:
        if kind == "bm25":
            manifest = _build_bm25(documents, partial, progress)
        else:
            from leeway.actors.search.dense import build_dense

            assert encoder is not None, "a dense index has an encoder"
            manifest = build_dense(documents, partial, kind, encoder, progress)
        _write_manifest(partial, manifest)
        _put_in_place(partial, folder)
    return manifest


def check_target(folder: Path, force: bool) -> None:
    """Raise ConfigurationError where an index may not be written."""
    if not folder.absolute().parent.is_dir():
        raise ConfigurationError(f"the folder {folder.absolute().parent} of --out does not exist")
    if not folder.exists():
        return
    if not (folder / MANIFEST).is_file():
        raise ConfigurationError(f"{folder} exists and is not an index; give another --out")
    if not force:
        raise ConfigurationError(f"{folder} holds an index; give another --out, or --force")


class CorpusWriter:
    """Stores passages portion by portion and computes the corpus checksum on the way."""

    def __init__(self, partial: Path, progress: Progress) -> None:
        self._partial = partial
        self._progress = progress
        self._hash = hashlib.sha256()
        self.num_documents = 0

    def portions(
        self, documents: Iterable[Document], size: int = _PORTION
    ) -> Iterator[list[Document]]:
        """Each portion, after it has been stored."""
        left = iter(documents)
        with DocumentWriter(self._partial) as writer:
            while portion := list(islice(left, size)):
                for document in portion:
                    writer.add(document)
                    for text in (document.id, document.title, document.text):
                        self._hash.update(text.encode())
                        self._hash.update(b"\0")
                yield portion
                self.num_documents += len(portion)
                self._progress("reading", self.num_documents)
        if not self.num_documents:
            raise DataError("an index needs at least one document")

    def manifest(self, kind: Kind, encoder: EncoderFacts | None = None) -> Manifest:
        """Of the folder as it is now."""
        files = {path.name: path.stat().st_size for path in sorted(self._partial.iterdir())}
        return Manifest(
            format_version=FORMAT_VERSION,
            kind=kind,
            num_documents=self.num_documents,
            corpus_sha256=self._hash.hexdigest(),
            file_bytes={name: size for name, size in files.items() if name != _LOCK},
            encoder=encoder,
        )


def _build_bm25(documents: Iterable[Document], partial: Path, progress: Progress) -> Manifest:
    spool = partial / "counts"
    spool.mkdir()
    builder, corpus = PostingsBuilder(spool), CorpusWriter(partial, progress)
    for portion in corpus.portions(documents):
        builder.add([text_of(document) for document in portion])
    progress("scoring", corpus.num_documents)
    maps: list[np.memmap[Any, Any]] = []

    def allocate(name: str, dtype: Any, length: int) -> NDArray[Any]:
        if length == 0:
            raise DataError("no document of the corpus holds a word that can be searched for")
        path = partial / f"bm25_{name}.npy"
        maps.append(np.lib.format.open_memmap(path, "w+", dtype, (length,)))
        return maps[-1]

    builder.finish(allocate)
    for array in maps:
        array.flush()
    shutil.rmtree(spool)
    return corpus.manifest("bm25")


@contextmanager
def _partial_folder(folder: Path) -> Iterator[Path]:
    """A fresh folder beside the target, gone afterwards unless it was put in place."""
    partial = folder.absolute().parent / f".{folder.name}.partial"
    try:
        partial.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{folder} cannot be written: {error.strerror or error}; give another --out"
        ) from None
    with (partial / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigurationError(
                f"another process is building {folder}; wait for it, or give another --out"
            ) from None
        for path in partial.iterdir():
            if path.name != _LOCK:
                _remove(path)
        try:
            yield partial
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise ConfigurationError(
                f"{folder} cannot be written: {error.strerror or error}"
            ) from error
        except BaseException:
            # Only then: after success the name may belong to the next build.
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write_manifest(partial: Path, manifest: Manifest) -> None:
    """Last, when every other file is on disk: a crash of the machine leaves no half index."""
    for name in manifest.file_bytes:
        _synchronise(partial / name)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (partial / MANIFEST).write_bytes(text)
    _synchronise(partial / MANIFEST)


def _synchronise(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename; servers that hold an index mapped which is replaced go on with what they have."""
    old = folder.absolute().parent / f".{folder.name}.replaced"
    if old.exists():
        shutil.rmtree(old)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    (folder / _LOCK).unlink()
    _synchronise(folder.absolute().parent)
    if old.exists():
        shutil.rmtree(old)
