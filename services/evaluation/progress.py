"""How far an evaluation is: a bar in a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from leeway.services.evaluation.journal import Entry
from leeway.services.evaluation.scores import is_right

LINE_EVERY_S: Final = 10.0


class Tally:
    """Counts of what is done with."""

    def __init__(self, num_questions: int, num_before: int) -> None:
        """`num_before` questions were finished by an earlier command."""
        self.num_questions = num_questions
        self.num_done = num_before
        self._num_before = num_before
        self._num_samples = self._num_right = 0
        self._started = time.monotonic()
        self.errors: Counter[str] = Counter()
        self.last_error: str | None = None

    def start(self) -> None:
        """The engine is up: speed is counted from here."""
        self._started = time.monotonic()

    def add(self, entry: Entry) -> None:
        """One more question."""
        self.num_done += 1
        self._num_samples += len(entry.samples)
        self._num_right += sum(is_right(sample.scores) for sample in entry.samples)
        if entry.error is not None:
            self.errors[entry.reason or "failure"] += 1
            self.last_error = entry.error

    @property
    def num_errors(self) -> int:
        return sum(self.errors.values())

    def words(self) -> str:
        """right so far 0.312, 2 errors"""
        share = self._num_right / self._num_samples if self._num_samples else 0.0
        return f"right so far {share:.3f}, {self.num_errors:,} errors"

    def line(self) -> str:
        """120 of 3,610 questions, right so far 0.312, 2 errors, 3.4 questions/s"""
        rate = (self.num_done - self._num_before) / max(1e-9, time.monotonic() - self._started)
        return (
            f"{self.num_done:,} of {self.num_questions:,} questions, {self.words()},"
            f" {rate:.1f} questions/s"
        )


class Display:
    """Follows a tally."""

    def __init__(self, console: Console, tally: Tally) -> None:
        self._console = console
        self._tally = tally
        self._last_line = time.monotonic()
        self._progress: Progress | None = None
        self._task = None

    def update(self, benchmark: str) -> None:
        """A question of this benchmark was finished."""
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task,
                completed=self._tally.num_done,
                benchmark=benchmark,
                words=self._tally.words(),
            )
        elif time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            line = f"{benchmark}: {self._tally.line()}"
            self._console.print(line, soft_wrap=True, markup=False)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw until the block ends, and then say how far it came."""
        self._tally.start()
        self._last_line = time.monotonic()
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.fields[benchmark]}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[words]}"),
            )
            with Progress(*columns, console=self._console, transient=True) as self._progress:
                self._task = self._progress.add_task(
                    "", total=self._tally.num_questions, completed=self._tally.num_done,
                    benchmark="", words="",
                )  # fmt: skip
                yield
        else:
            yield
        self._console.print(self._tally.line(), soft_wrap=True)
