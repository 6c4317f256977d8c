"""Index folders: whole or not at all, checked when they are opened, read where they lie."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from leeway.actors.config import SearchConfig
from leeway.actors.search import index_source
from leeway.actors.search.document_store import DocumentStore, DocumentWriter
from leeway.actors.search.documents import Document
from leeway.actors.search.index import Bm25Index
from leeway.actors.search.index_folder import build_index, open_index, read_manifest
from leeway.actors.search.index_source import check_corpus, check_folder, index_at, index_of
from leeway.replay.errors import ConfigurationError, DataError

DOCUMENTS = [
    Document("no", "Norway", "Its capital is Oslo."),
    Document("se", "Sweden", "Its capital is Stockholm."),
    Document("x", "", "No title here, only Øslo and Oslo."),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_index(DOCUMENTS, tmp_path / "index")
    return tmp_path / "index"


def test_an_opened_index_finds_what_one_in_memory_finds(folder: Path):
    queries = ["oslo", "capital of sweden", "øslo", "zebra", ""]
    assert open_index(folder).search(queries, 3) == Bm25Index(DOCUMENTS).search(queries, 3)


def test_documents_come_back_as_they_went_in(tmp_path: Path):
    with DocumentWriter(tmp_path) as writer:
        for document in DOCUMENTS:
            writer.add(document)
    store = DocumentStore(tmp_path)
    assert (list(store), store[1:], len(store)) == (DOCUMENTS, DOCUMENTS[1:], 3)
    with pytest.raises(IndexError):
        store[3]


def test_the_manifest_counts_and_has_a_checksum_of_the_corpus(folder: Path, tmp_path: Path):
    manifest = read_manifest(folder)
    assert (manifest.kind, manifest.num_documents, manifest.encoder) == ("bm25", 3, None)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert manifest.num_bytes == sum(sizes.values()) - sizes["manifest.json"]
    again = build_index(DOCUMENTS, tmp_path / "again")
    other = build_index([*DOCUMENTS[:2], Document("x", "N", "o title")], tmp_path / "other")
    assert again.corpus_sha256 == manifest.corpus_sha256 != other.corpus_sha256


def test_a_build_that_fails_leaves_nothing(tmp_path: Path):
    def cut_short() -> Iterator[Document]:
        yield DOCUMENTS[0]
        raise DataError("line 2 is bad")

    with pytest.raises(DataError, match="line 2 is bad"):
        build_index(cut_short(), tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path):
    left = tmp_path / ".index.partial" / "counts"
    left.mkdir(parents=True)
    (left.parent / "documents.msgpack").write_bytes(b"half")
    with pytest.raises(ConfigurationError, match="holds no index"):
        open_index(left.parent)
    build_index(DOCUMENTS, tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_two_builds_of_one_folder_are_refused(tmp_path: Path):
    partial = tmp_path / ".index.partial"
    partial.mkdir()
    with (partial / "building.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigurationError, match="another process is building"):
            build_index(DOCUMENTS, tmp_path / "index")
    assert partial.is_dir()


def test_an_index_is_replaced_by_force_only(folder: Path):
    opened = open_index(folder)
    with pytest.raises(ConfigurationError, match="holds an index; give another --out, or --force"):
        build_index(DOCUMENTS[:1], folder)
    build_index(DOCUMENTS[:1], folder, force=True)
    assert len(open_index(folder)) == 1
    # who serves the old one goes on with it
    assert [d.id for d, _ in opened.search(["stockholm"], 1)[0]] == ["se"]
    assert [path.name for path in folder.parent.iterdir()] == ["index"]


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigurationError, match="exists and is not an index"):
        build_index(DOCUMENTS, tmp_path / "mine", force=True)
    with pytest.raises(ConfigurationError, match=r"the folder .*absent of --out does not exist"):
        build_index(DOCUMENTS, tmp_path / "absent" / "index")


@pytest.mark.parametrize("name", ["documents.msgpack", "bm25_scores.npy", "bm25_text.npy"])
def test_a_file_that_is_cut_short_is_found_at_the_start(folder: Path, name: str):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(DataError, match=rf"damaged \({name} has .* build it again"):
        open_index(folder)
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name} has 0 bytes instead of"):
        open_index(folder)


def test_an_index_of_another_format_is_refused(folder: Path):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format_version": 2}))
    with pytest.raises(ConfigurationError, match="format 2, this release reads 1; build it again"):
        open_index(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"format_version": 1}', "\xff"])
def test_a_manifest_that_is_none_is_damage(folder: Path, content: str):
    (folder / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match="damaged"):
        open_index(folder)


def test_nothing_to_search_for_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="at least one document"):
        build_index([], tmp_path / "index")
    with pytest.raises(DataError, match="no document of the corpus holds a word"):
        build_index([Document("a", "", "the?!")], tmp_path / "index")


# ---- which index a configuration or a command line names


def corpus(tmp_path: Path, num_documents: int = 2) -> Path:
    file = tmp_path / "corpus.jsonl"
    lines = (json.dumps({"id": i, "contents": f"word{i} Oslo"}) for i in range(num_documents))
    file.write_text("\n".join(lines))
    return file


def test_a_configuration_names_a_corpus_or_an_index(folder: Path, tmp_path: Path):
    assert len(index_of(SearchConfig(corpus=str(corpus(tmp_path))))) == 2
    assert len(index_of(SearchConfig(index=str(folder)))) == 3


def test_a_command_line_names_either_by_its_path(folder: Path, tmp_path: Path):
    assert len(index_at(corpus(tmp_path))) == 2
    assert len(index_at(folder)) == 3


def test_a_large_corpus_is_sent_to_the_index_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(index_source, "MAX_IN_MEMORY", 3)
    check_corpus(str(corpus(tmp_path, 3)))
    assert len(index_at(corpus(tmp_path, 3))) == 3
    for read in (check_corpus, lambda path: index_at(Path(path))):
        with pytest.raises(DataError, match=r"more than 3 passages.*leeway retriever index"):
            read(str(corpus(tmp_path, 4)))


def test_an_encoder_without_a_dense_index_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigurationError, match="has no encoder; leave it out"):
        index_at(folder, tmp_path)
    with pytest.raises(ConfigurationError, match="a corpus is served by BM25"):
        index_at(corpus(tmp_path), tmp_path)
    with pytest.raises(ConfigurationError, match=r"is by BM25; remove search\.encoder"):
        check_folder(SearchConfig(index=str(folder), encoder=str(tmp_path)))


def test_an_index_behind_a_link_is_replaced_where_it_lies(folder: Path, tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    for num_documents in (2, 1):
        build_index(DOCUMENTS[:num_documents], link, force=True)
        assert link.is_symlink() and read_manifest(folder).num_documents == num_documents
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert not (folder / "lock").exists() and len(open_index(folder)) == 1
