"""Small sets in the place and format of all eight benchmarks, made from the bundled questions.

They exist to try the command and to test it. Nothing in them is from the benchmarks whose names
they bear: a score on them compares with nothing.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from leeway.actors.config import DataConfig, held_out_file
from leeway.actors.environment import Question
from leeway.actors.search.questions import load_questions
from leeway.replay.errors import ConfigurationError

NUM_QUESTIONS: Final = 12
"""Of each benchmark."""
NUM_CHOICES: Final = 4

Rows = list[dict[str, Any]]


def write_samples(folder: Path) -> None:
    """Write nq/test.jsonl and so on into the folder; the same files every time."""
    questions = load_questions(held_out_file(DataConfig()))
    one_hop = [q for q in questions if q.metadata.get("hops") == 1]
    two_hop = [q for q in questions if q.metadata.get("hops") == 2]
    sets: dict[str, tuple[Callable[[Path, Rows], None], Rows]] = {
        "nq/test.jsonl": (_write_lines, _flashrag(_part(one_hop, 0))),
        "triviaqa/test.jsonl": (
            _write_lines,
            _flashrag(_part(one_hop, 1), aliases=True),
        ),
        "popqa/test.parquet": (_write_parquet, _search_r1("popqa", _part(one_hop, 2))),
        "hotpotqa/dev.jsonl": (_write_lines, _flashrag(_part(two_hop, 0))),
        "2wikimultihopqa/dev.jsonl.xz": (
            _write_xz,
            _flashrag(_part(two_hop, 1)),
        ),
        "musique/dev.jsonl": (_write_lines, _flashrag(_part(two_hop, 2))),
        "bamboogle/test.parquet": (_write_parquet, _search_r1("bamboogle", _part(two_hop, 3))),
        "medqa/test.jsonl": (_write_lines, _medqa(one_hop)),
    }
    try:
        for name, (write, rows) in sets.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write(folder / name, rows)
    except OSError as error:
        raise ConfigurationError(
            f"samples cannot be written to {folder}: {error.strerror}; go to a folder that can be"
            " written"
        ) from None


def _part(questions: Sequence[Question], number: int) -> Sequence[Question]:
    """Every part of 12 is another one."""
    return questions[number * NUM_QUESTIONS : (number + 1) * NUM_QUESTIONS]


def _flashrag(questions: Iterable[Question], *, aliases: bool = False) -> Rows:
    """`aliases` adds further golden answers, as TriviaQA has them."""
    return [
        {
            "id": f"test_{i}",
            "question": question.question,
            "golden_answers": [
                *question.golden_answers,
                *(answer.upper() for answer in question.golden_answers if aliases),
            ],
            "metadata": question.metadata,
        }
        for i, question in enumerate(questions)
    ]


def _search_r1(name: str, questions: Iterable[Question]) -> Rows:
    return [
        {
            "id": f"test_{i}",
            "question": question.question,
            "golden_answers": list(question.golden_answers),
            "data_source": name,
            "prompt": [{"role": "user", "content": f"Question: {question.question}\n"}],
            "ability": "fact-reasoning",
            "reward_model": {
                "style": "rule",
                "ground_truth": {"target": list(question.golden_answers)},
            },
            "extra_info": {"index": i, "split": "test"},
        }
        for i, question in enumerate(questions)
    ]


def _medqa(questions: Sequence[Question]) -> Rows:
    """The right answer among three of other questions of its kind."""
    rows: Rows = []
    for i, question in enumerate(questions[3 * NUM_QUESTIONS : 4 * NUM_QUESTIONS]):
        right = question.golden_answers[0]
        kind = question.metadata.get("kind")
        others = [q.golden_answers[0] for q in questions if q.metadata.get("kind") == kind]
        wrong = [answer for answer in dict.fromkeys(others) if answer != right][: NUM_CHOICES - 1]
        texts = [*wrong[: i % NUM_CHOICES], right, *wrong[i % NUM_CHOICES :]]
        options = {chr(65 + n): text for n, text in enumerate(texts)}
        letter = next(letter for letter, text in options.items() if text == right)
        rows.append(
            {
                "question": question.question,
                "answer": right,
                "options": options,
                "answer_idx": letter,
                "meta_info": "sample",
            }
        )
    return rows


def _write_lines(path: Path, rows: Rows) -> None:
    path.write_bytes(_lines(rows))


def _write_xz(path: Path, rows: Rows) -> None:
    path.write_bytes(lzma.compress(_lines(rows)))


def _lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _write_parquet(path: Path, rows: Rows) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
