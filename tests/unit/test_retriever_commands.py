"""`leeway retriever index`: what it builds, what it refuses; and the run keys that use an index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from leeway.replay.errors import ConfigurationError
from leeway.services import cli
from leeway.services.config import check_files, load


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"id": 1, "contents": "\\"Norway\\"\\nOslo"}\n{"id": 2, "contents": "Rome"}')
    return file


def index(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["retriever", "index", *map(str, arguments)])


def test_the_folder_is_built_and_the_next_command_named(corpus: Path, tmp_path: Path):
    done = index(corpus, "--out", tmp_path / "index")
    assert done.exit_code == 0
    assert "2 passages, bm25, " in done.stdout
    assert f"leeway retriever serve {tmp_path / 'index'}" in done.stdout


def test_json_is_the_manifest_with_size_and_time(corpus: Path, tmp_path: Path):
    done = index(corpus, "--out", tmp_path / "index", "--json")
    built = json.loads(done.stdout)
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    assert built | manifest == built
    assert built["num_bytes"] == sum(manifest["file_bytes"].values())
    assert built["build_s"] >= 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--kind", "dense-flat"], "--kind dense-flat needs --encoder MODEL_DIR"),
        (["--encoder", "."], "--kind bm25 has no encoder and no prefixes"),
        (["--query-prefix", "query: "], "--kind bm25 has no encoder and no prefixes"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    corpus: Path, tmp_path: Path, options: list[str], sentence: str
):
    done = index(corpus, "--out", tmp_path / "index", *options)
    assert isinstance(done.exception, ConfigurationError)
    assert sentence in str(done.exception)
    assert not (tmp_path / "index").exists()


def test_the_target_is_checked_before_the_corpus_is_read(corpus: Path, tmp_path: Path):
    assert index(corpus, "--out", tmp_path / "index").exit_code == 0
    corpus.write_text("not JSON")
    done = index(corpus, "--out", tmp_path / "index")
    assert "give another --out, or --force" in str(done.exception)


# ---- the keys of a run


@pytest.fixture
def folder(corpus: Path, tmp_path: Path) -> Path:
    index(corpus, "--out", tmp_path / "index")
    return tmp_path / "index"


def test_a_run_takes_an_index(folder: Path, monkeypatch: pytest.MonkeyPatch):
    config = load(None, [f"search.index={folder}"])
    check_files(config)
    monkeypatch.chdir(folder.parent)
    # a replica has another working directory
    assert load(None, ["search.index=index"]).search.index == str(folder)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["search.index=absent"], r'search\.index = "absent" is not an index; leeway retriever'),
        (
            ["search.index={folder}", "search.corpus={corpus}"],
            r"search\.corpus is not read while search\.index is set",
        ),
        (
            ["search.index={folder}", "search.retriever_url=http://r"],
            r"search\.index is not read while search\.retriever_url is set",
        ),
        (
            ["search.retriever_url=http://r", "search.corpus={corpus}"],
            r"search\.corpus is not read while search\.retriever_url is set",
        ),
        (["search.encoder=absent"], r"search\.encoder is not read without a dense search\.index"),
        (
            ["search.index={folder}", "search.encoder={corpus}"],
            r"search\.encoder = .* is not a Hugging Face model folder",
        ),
    ],
)
def test_passages_come_from_one_place(
    folder: Path, corpus: Path, overrides: list[str], sentence: str
):
    filled = [override.format(folder=folder, corpus=corpus) for override in overrides]
    with pytest.raises(ConfigurationError, match=sentence):
        load(None, filled)


def test_an_index_that_is_damaged_is_found_before_a_run_starts(folder: Path):
    (folder / "bm25_scores.npy").write_bytes(b"")
    with pytest.raises(Exception, match=r"damaged \(bm25_scores\.npy has 0 bytes"):
        check_files(load(None, [f"search.index={folder}"]))
