"""Finished questions of an evaluation, one JSON line each, written the moment they are finished.

    {"benchmark": "nq", "question": {"id": ..}, "samples": [{"reward": 1.0, ..}], "group": ".."}
    {"benchmark": "nq", "question": {"id": ..}, "reason": "retriever", "error": "http://.. gave no"}

A line is appended in one write. A process that dies leaves at most a torn last line, which the next
one cuts off; a machine that dies may lose the last lines, and their questions are played again.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import msgspec

from leeway.actors.environment import Question
from leeway.replay.codec import decode, encode
from leeway.replay.errors import CodecError, ConfigurationError, DataError, LeewayError
from leeway.replay.schema import Group, StopReason


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One episode in numbers."""

    trajectory_id: str
    reward: float
    stop_reason: StopReason
    duration_s: float
    scores: dict[str, float]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One question that is done with."""

    benchmark: str
    question: Question
    samples: tuple[Sample, ...] = ()
    """Its episodes; empty for a question that failed."""
    group: str | None = None
    """The same episodes token by token: replay/codec.py's bytes of a Group, in base64."""
    reason: str | None = None
    """Why it failed, in a word: retriever, engine, timeout, question-too-long."""
    error: str | None = None
    """Why it failed, in a sentence. It is played again when the evaluation goes on."""

    def trajectories(self) -> Group | None:
        """The episodes as a group; None for a question that failed."""
        if self.group is None:
            return None
        try:
            return decode(base64.b64decode(self.group, validate=True))
        except (binascii.Error, CodecError) as error:
            raise DataError(
                f"question {self.question.id!r}: its group is damaged: {error}"
            ) from None


def entry_of(
    benchmark: str, question: Question, group: Group, scores: Sequence[dict[str, float]]
) -> Entry:
    """The entry of a question that was played; `scores` are one for each of its episodes."""
    return Entry(
        benchmark=benchmark,
        question=question,
        samples=tuple(
            Sample(
                trajectory_id=t.trajectory_id,
                reward=t.reward,
                stop_reason=t.stop_reason,
                duration_s=round(t.duration_s, 3),
                scores=of_episode,
            )
            for t, of_episode in zip(group.trajectories, scores, strict=True)
        ),
        group=base64.b64encode(encode(group)).decode(),
    )


_decoder = msgspec.json.Decoder(Entry)


def read_entries(path: Path) -> Iterator[Entry]:
    """Every whole line.

    Raises DataError, with the number of the line, for a line that is whole and no entry.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return  # torn: its question was never acknowledged
                try:
                    yield _decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise DataError(
                        f"{path}, line {number}: {error}; the file is damaged, remove that line to"
                        " have its question played again"
                    ) from None
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def read_last(path: Path) -> Iterator[Entry]:
    """The last entry of each question, in the order of the file: one that failed may have been
    played later. Reads the file twice, and holds one entry at a time.
    """
    last = {
        (entry.benchmark, entry.question.id): number
        for number, entry in enumerate(read_entries(path))
    }
    for number, entry in enumerate(read_entries(path)):
        if last.get((entry.benchmark, entry.question.id)) == number:
            yield entry


class Journal:
    """The file, open for writing by this process alone. Use it in a `with`."""

    def __init__(self, path: Path) -> None:
        """Creates the file, and cuts off a torn last line. Raises ConfigurationError where another
        process writes it."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigurationError(
                f"{path} cannot be written: {error.strerror}; name another folder with --out"
            ) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise ConfigurationError(
                f"another leeway eval is writing {path}; wait for it, or name another folder with"
                " --out"
            ) from None
        self._cut_torn_line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._fd)
        os.close(self._fd)

    def append(self, entry: Entry) -> None:
        """Write one line. It survives the death of this process from here on."""
        line = msgspec.json.encode(entry) + b"\n"
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            raise LeewayError(f"{self.path} cannot be written: {error.strerror or error}") from None
        if written < len(line):
            raise LeewayError(
                f"{self.path}: {written} of {len(line)} bytes were written; is the disk full?"
            )

    def _cut_torn_line(self) -> None:
        size = end = os.fstat(self._fd).st_size
        while end:
            start = max(0, end - (1 << 16))
            found = os.pread(self._fd, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._fd, end)
