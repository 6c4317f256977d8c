"""Corpora as tables: Parquet, Arrow files and streams, folders of them; faults by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from leeway.actors.search.documents import Document, contents_of, load_documents
from leeway.replay.errors import DataError

ROWS: dict[str, list[Any]] = {"id": ["a", "b"], "contents": ['"T"\nbody', "text only"], "n": [1, 2]}
DOCUMENTS = [Document("a", "T", "body"), Document("b", "", "text only")]


def write(path: Path, rows: dict[str, list[Any]]) -> Path:
    table = pa.table(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=1)
    elif path.stem == "stream":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
    return path


@pytest.mark.parametrize("name", ["c.parquet", "c.arrow", "c.feather", "stream.arrow"])
def test_tables_are_read_as_json_lines_are(tmp_path: Path, name: str):
    assert load_documents(write(tmp_path / name, ROWS)) == DOCUMENTS


def test_numbers_are_ids_too(tmp_path: Path):
    rows = {"id": [7], "contents": ["text"]}
    assert load_documents(write(tmp_path / "c.parquet", rows)) == [Document("7", "", "text")]


def test_a_folder_stands_for_its_tables_in_the_order_of_their_names(tmp_path: Path):
    write(tmp_path / "2.arrow", {"id": ["z"], "contents": ["last"]})
    write(tmp_path / "1.parquet", ROWS)
    (tmp_path / "state.json").write_text("{}")
    assert [document.id for document in load_documents(tmp_path)] == ["a", "b", "z"]


def test_an_id_in_two_files_names_both_places(tmp_path: Path):
    write(tmp_path / "1.parquet", ROWS)
    write(tmp_path / "2.parquet", ROWS)
    expected = r"2\.parquet, row 1: id 'a' was used on row 1 of .*1\.parquet; every"
    with pytest.raises(DataError, match=expected):
        load_documents(tmp_path)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ({"id": ["a"], "text": ["b"]}, "has no column contents; it has id, text and must have"),
        ({"id": ["a", "b"], "contents": ["x", None]}, "row 2: Expected `str`, got `null`"),
        ({"id": [1.5], "contents": ["x"]}, r"row 1: Expected `int \| str`, got `float`"),
        ({"id": ["a", "b"], "contents": ["x", " "]}, "row 2: contents are empty"),
        ({"id": ["a", "a"], "contents": ["x", "y"]}, r"row 2: id 'a' was used on .*row 1"),
    ],
)
@pytest.mark.parametrize("name", ["c.parquet", "c.arrow"])
def test_a_bad_table_is_named_with_its_row(
    tmp_path: Path, name: str, rows: dict[str, list[Any]], sentence: str
):
    with pytest.raises(DataError, match=sentence):
        load_documents(write(tmp_path / name, rows))


@pytest.mark.parametrize("name", ["c.parquet", "c.arrow"])
def test_a_file_that_is_no_table_is_named(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"not a table at all")
    with pytest.raises(DataError, match=f"{name}.*write the file again"):
        load_documents(tmp_path / name)


def test_missing_and_empty_corpora_are_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"gone\.arrow cannot be read: "):
        load_documents(tmp_path / "gone.arrow")
    with pytest.raises(DataError, match=r"holds no \.parquet or \.arrow"):
        load_documents(tmp_path)
    with pytest.raises(DataError, match="holds no document"):
        load_documents(write(tmp_path / "c.parquet", {"id": [], "contents": []}))


def test_contents_are_title_and_text_as_the_field_writes_them():
    assert [contents_of(document) for document in DOCUMENTS] == ['"T"\nbody', "text only"]
