"""The eight benchmarks of the field, and where their files lie.

FOLDER/nq/test.jsonl            one folder each, the split that the field reports
FOLDER/hotpotqa/dev.parquet     JSON lines (plain, .xz, .zst) or Search-R1 parquet
FILE.parquet                    or one file of all, told apart by `data_source`
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from leeway.actors.environment import Question
from leeway.actors.search.questions import load_questions
from leeway.replay.errors import ConfigurationError

SPLITS: Final = {
    "nq": "test",
    "triviaqa": "test",
    "popqa": "test",
    "hotpotqa": "dev",
    "2wikimultihopqa": "dev",
    "musique": "dev",
    "bamboogle": "test",
    "medqa": "test",
}
"""The split of each on which the field reports."""
AVERAGED: Final = tuple(name for name in SPLITS if name != "medqa")
"""The seven whose plain mean the field reports."""
OTHER_SPLITS: Final = ("test", "dev")
"""Looked for, in this order, for a set of another name."""
SUFFIXES: Final = (".jsonl", ".jsonl.xz", ".jsonl.zst", ".parquet")


class Benchmark(NamedTuple):
    """Questions to play."""

    name: str
    file: Path
    questions: list[Question]
    """In the order of the file; a sample of it where fewer were wanted."""
    num_in_file: int


def load_benchmarks(
    data: Path, names: Sequence[str] | None, num_questions: int | None, seed: int
) -> list[Benchmark]:
    """Those of `names`, or all that are there, in the order of the field.

    `num_questions` of each at most, chosen by `seed` and the benchmark's name alone. Raises
    ConfigurationError for a name that is not there, and what load_questions raises.
    """
    loaded = _load_file(data, names) if data.is_file() else _load_folder(data, names)
    return [_sample(benchmark, num_questions, seed) for benchmark in loaded]


def _load_folder(folder: Path, names: Sequence[str] | None) -> list[Benchmark]:
    if not folder.is_dir():
        raise ConfigurationError(
            f"--data {folder} does not exist; give a folder with one folder for each benchmark,"
            " such as nq/test.jsonl, or say --data samples to try with bundled ones"
        )
    if names is None:
        names = [name for name in SPLITS if _find(folder, name) is not None]
        if not names:
            raise ConfigurationError(
                f"{folder} holds none of the benchmarks ({_layout()}); put their files there, or"
                " name sets of your own with --benchmarks"
            )
    loaded: list[Benchmark] = []
    for name in names:
        file = _find(folder, name)
        if file is None:
            raise ConfigurationError(
                f"{folder} has no {name}/{_split_words(name)} ({', '.join(SUFFIXES)}); put the file"
                " there, or leave the name out of --benchmarks"
            )
        questions = load_questions(file)
        loaded.append(Benchmark(name, file, questions, len(questions)))
    return loaded


def _find(folder: Path, name: str) -> Path | None:
    """The file of a benchmark. Raises ConfigurationError where there are two of one split."""
    for split in (SPLITS[name],) if name in SPLITS else OTHER_SPLITS:
        found = [folder / name / f"{split}{suffix}" for suffix in SUFFIXES]
        found = [path for path in found if path.is_file()]
        if len(found) > 1:
            raise ConfigurationError(
                f"{folder / name} holds both {found[0].name} and {found[1].name}; leave one"
            )
        if found:
            return found[0]
    return None


def _load_file(file: Path, names: Sequence[str] | None) -> list[Benchmark]:
    """One file of all: every question says where it comes from."""
    by_source: dict[str, list[Question]] = {}
    for question in load_questions(file):
        name = question.data_source or file.name.partition(".")[0]
        by_source.setdefault(name, []).append(question)
    strange = next((name for name in by_source if not name.isprintable()), None)
    if strange is not None:
        raise ConfigurationError(
            f"{file} holds the data_source {strange!r}; a name must have no control characters"
        )
    known = [name for name in SPLITS if name in by_source]
    there = [*known, *sorted(by_source.keys() - set(known))]
    missing = [name for name in names or () if name not in by_source]
    if missing:
        raise ConfigurationError(
            f"{file} holds no question of {missing[0]}, but of {', '.join(there)}; correct"
            " --benchmarks"
        )
    return [Benchmark(name, file, by_source[name], len(by_source[name])) for name in names or there]


def _sample(benchmark: Benchmark, num_questions: int | None, seed: int) -> Benchmark:
    if num_questions is None or num_questions >= len(benchmark.questions):
        return benchmark
    rng = np.random.default_rng([seed, zlib.crc32(benchmark.name.encode())])
    places = sorted(rng.permutation(len(benchmark.questions))[:num_questions].tolist())
    return benchmark._replace(questions=[benchmark.questions[i] for i in places])


def checksum(questions: Sequence[Question]) -> str:
    """Of all that a question says, so that a changed file is another benchmark."""
    return f"{zlib.crc32(msgspec.json.encode(list(questions))):08x}"


def _split_words(name: str) -> str:
    return SPLITS.get(name, " or ".join(OTHER_SPLITS))


def _layout() -> str:
    return ", ".join(f"{name}/{split}.jsonl" for name, split in SPLITS.items())
