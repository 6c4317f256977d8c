"""What decides the numbers of an evaluation. Two with the same settings are one, and go on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from leeway.actors.config import SearchConfig, corpus_file, model_dir
from leeway.replay.errors import ConfigurationError, DataError
from leeway.services.evaluation.benchmarks import Benchmark, checksum

if TYPE_CHECKING:
    from leeway.services.config import RunConfig

FORMAT: Final = 1
"""Raised with every change of what the files of an evaluation hold."""

SETTINGS_FILE: Final = "settings.json"
EPISODES_FILE: Final = "episodes.jsonl"
RESULTS_FILE: Final = "results.json"
FAILURES_FILE: Final = "failures.html"

_RETRIEVER_KEYS: Final = ("corpus", "index", "encoder", "retriever_url", "retriever_timeout_s")
"""Of the `[search]` table; they say where passages come from, not what an episode is."""
"""A copy elsewhere is the same, as long as its checksum is."""
_BLOCK_BYTES: Final = 1 << 16
_MAX_BLOCKS: Final = 64
"""Of one file."""


class BenchmarkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark, as it is played."""

    file: str
    num_questions: int
    num_in_file: int
    checksum: str
    """Of the questions that are played, with their golden answers."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Written when an evaluation begins; compared when another is to go on in its folder."""

    format: int = FORMAT
    model: str
    model_checksum: str
    benchmarks: dict[str, BenchmarkSettings]
    retriever: str
    """URL, corpus or index."""
    retriever_checksum: str
    """Of the corpus or index; empty for a URL, behind which anything may change."""
    decoding: Literal["greedy", "sample"]
    num_samples: int
    """Episodes of each question."""
    seed: int
    backend: str
    dtype: str
    max_model_len: int
    environment: dict[str, Any]
    """Every key that says what an episode is."""


def folder_name(settings: Settings) -> str:
    """A name that only these settings have: `model-1f3a9c20`."""
    flat = _flat(msgspec.to_builtins(settings))
    digest = hashlib.sha256(msgspec.json.encode(flat, order="sorted")).hexdigest()[:8]
    return f"{Path(settings.model).name or 'model'}-{digest}"


def check_or_write(folder: Path, settings: Settings) -> bool:
    """Whether an evaluation with these settings was begun in the folder; else begin one.

    Raises ConfigurationError where one with other settings was.
    """
    path = folder / SETTINGS_FILE
    if check(folder, settings):
        return True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{SETTINGS_FILE}.partial"
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(settings)) + b"\n")
        partial.replace(path)
    except OSError as error:
        raise ConfigurationError(
            f"--out {folder} cannot be written: {error.strerror}; name another folder"
        ) from None
    return False


def check(folder: Path, settings: Settings) -> bool:
    """As check_or_write, which begins none where there is none."""
    if not (folder / SETTINGS_FILE).is_file():
        return False
    difference = _first_difference(read_settings(folder), settings)
    if difference:
        raise ConfigurationError(
            f"{folder} holds an evaluation with other settings: {difference}; name another"
            " folder with --out"
        )
    return True


def read_settings(folder: Path) -> Settings:
    """Raises DataError for settings that this program did not write."""
    path = folder / SETTINGS_FILE
    try:
        settings = msgspec.json.decode(path.read_bytes(), type=Settings)
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path} is not the settings of an evaluation ({error})") from None
    if settings.format != FORMAT:
        raise DataError(
            f"{path} is written by format {settings.format}, this program reads {FORMAT}"
        )
    return settings


def _first_difference(old: Settings, new: Settings) -> str | None:
    """`num_samples was 1 and is 4`; None where there is none."""
    if (old.retriever_checksum, new.retriever_checksum) != ("", "") and (
        old.retriever_checksum != new.retriever_checksum
    ):
        return f"it searched {old.retriever} and is to search {new.retriever}"
    before, now = _flat(msgspec.to_builtins(old)), _flat(msgspec.to_builtins(new))
    for key in [*now, *before]:
        if before.get(key) != now.get(key):
            was, is_now = (_word(values.get(key)) for values in (before, now))
            return f"{key} was {was} and is {is_now}"
    return None


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """By dotted name, without the paths of what has a checksum."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= _flat(value, f"{name}.")
        elif not _is_path_of_checksum(name, values):
            found[name] = value
    return found


def _is_path_of_checksum(name: str, values: dict[str, Any]) -> bool:
    """By its whole name: a table of the user's, such as environment.options, may have the same."""
    if name == "retriever":
        return bool(values["retriever_checksum"])
    return name == "model" or (name.startswith("benchmarks.") and name.endswith(".file"))


def _word(value: object) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def checksum_of(path: Path) -> str:
    """Of a file or of all files of a folder: names, sizes, and blocks from everywhere in each.

    Not of every byte: 15 GB of weights would take a minute. Weights that were trained differ
    everywhere, and a corpus that was edited has another size or another block.
    """
    digest = hashlib.sha256()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    try:
        for file in files:
            size = file.stat().st_size
            name = file.relative_to(path).as_posix() if path.is_dir() else file.name
            digest.update(f"{name}\0{size}\0".encode())
            step = max(_BLOCK_BYTES, size // _MAX_BLOCKS)
            with file.open("rb") as stream:
                for start in range(0, size, step):
                    stream.seek(start)
                    digest.update(stream.read(_BLOCK_BYTES))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()[:16]


def settings_of(
    config: RunConfig, benchmarks: Sequence[Benchmark], num_samples: int | None
) -> Settings:
    """`num_samples` None decodes greedily. Raises ConfigurationError for a file that cannot be
    read."""
    model = model_dir(config.model)
    retriever, source = _retriever(config.search)
    return Settings(
        model=str(model.resolve()),
        model_checksum=checksum_of(model),
        benchmarks={
            benchmark.name: BenchmarkSettings(
                file=str(benchmark.file.resolve()),
                num_questions=len(benchmark.questions),
                num_in_file=benchmark.num_in_file,
                checksum=checksum(benchmark.questions),
            )
            for benchmark in benchmarks
        },
        retriever=retriever,
        retriever_checksum=checksum_of(source) if source is not None else "",
        decoding="greedy" if num_samples is None else "sample",
        num_samples=num_samples or 1,
        seed=config.seed,
        backend=config.policy.backend,
        dtype=config.engine.dtype,
        max_model_len=config.policy.max_model_len,
        environment={
            "search": config.search.model_dump(exclude=set(_RETRIEVER_KEYS)),
            "reward": config.reward.model_dump(),
            "environment": config.environment.model_dump(),
        },
    )


def _retriever(search: SearchConfig) -> tuple[str, Path | None]:
    """What is searched, and the file or folder that it is."""
    if search.retriever_url is not None:
        return search.retriever_url, None
    source = Path(search.index) if search.index is not None else corpus_file(search)
    return str(source.resolve()), source
