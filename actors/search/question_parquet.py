"""Question files in parquet, with Search-R1's columns. The only file that reads them by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from leeway.actors.environment import Message, Question
from leeway.actors.search.question_lines import checked, letters, made_id
from leeway.replay.errors import DataError

_ROWS_AT_ONCE: Final = 4096
_WANTED: Final = (
    "a table with Search-R1's columns: data_source, prompt [{role, content}] and reward_model"
    " {ground_truth: {target: [..]}}; or question and golden_answers"
)


class _Row(msgspec.Struct):
    id: str | int | None = None
    question: str | None = None
    golden_answers: list[str] | None = None
    data_source: str | None = None
    prompt: list[Message] | None = None
    reward_model: dict[str, Any] | None = None
    extra_info: dict[str, Any] | None = None
    metadata: Any = None
    choices: list[str] | None = None


def read_question_rows(path: Path) -> Iterator[tuple[str, Question]]:
    """(`row 3`, question) of each row, from 1. Raises DataError for a file or row of another form.

    What a row leaves out is taken from what it has: the question from the last message, behind
    `Question:` where that stands in it; the id from extra_info's split and index, else the row.
    """
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            columns = [c for c in _Row.__struct_fields__ if c in file.schema_arrow.names]
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", _question(row, number, f"{path}, row {number}")
    except pa.ArrowException as error:
        what = str(error).partition("\n")[0]
        raise DataError(
            f"{path}, after row {number}: no parquet that can be read ({what}); write it again"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _question(fields: dict[str, Any], number: int, where: str) -> Question:
    try:
        row = msgspec.convert(fields, _Row)
    except msgspec.ValidationError as error:
        raise DataError(f"{where}: {error}; it must be from {_WANTED}") from None
    prompt = tuple(row.prompt or ())
    text = row.question if row.question is not None else _asked(prompt)
    if text is None:
        raise DataError(f"{where}: there is neither a question nor a prompt; it needs {_WANTED}")
    golden = _target(row, where) or row.golden_answers or []
    choices = tuple(row.choices or ())
    metadata = row.metadata if isinstance(row.metadata, dict) else {}
    return checked(
        Question(
            id=_id(row, number, text),
            question=text,
            golden_answers=letters(golden, choices, where) if choices else tuple(golden),
            # Arrow gives every row the fields of all.
            metadata={name: value for name, value in metadata.items() if value is not None},
            data_source=row.data_source or "",
            choices=choices,
            prompt=prompt,
        ),
        where,
    )


def _target(row: _Row, where: str) -> list[str]:
    """What Search-R1's reward compares with: a list, or one text."""
    truth = (row.reward_model or {}).get("ground_truth")
    target = truth.get("target") if isinstance(truth, dict) else truth
    if target is None:
        return []
    listed = [target] if isinstance(target, str) else target
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise DataError(
            f"{where}: reward_model.ground_truth.target is {target!r}; it must be a list of texts"
        )
    return listed


def _asked(prompt: tuple[Message, ...]) -> str | None:
    if not prompt:
        return None
    content = prompt[-1].content
    return content.rpartition("Question:")[2].strip()


def _id(row: _Row, number: int, text: str) -> str:
    if row.id is not None:
        return str(row.id)
    index = (row.extra_info or {}).get("index")
    if index is None:
        return made_id("row", number, text)
    split = (row.extra_info or {}).get("split")
    return f"{split}_{index}" if split else str(index)
