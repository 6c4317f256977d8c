"""What a soak measures, as it is kept: one line of a CSV file for each figure.

    seconds,subject,measure,value
    10.0,learner,own_bytes,512000000

Lines are appended while the run lasts, so the file can be read, and judged, at any time.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from leeway.replay.errors import DataError

HEADER: Final = ("seconds", "subject", "measure", "value")


class Figure(NamedTuple):
    """One figure of one sample."""

    subject: str
    """Whose it is: a role of a process, or redis, ray, api, disk."""
    measure: str
    """What it is, with its unit as suffix: own_bytes, open_files."""
    value: float


class Series(NamedTuple):
    """A figure over time."""

    subject: str
    measure: str
    seconds: list[float]
    """Since the first sample of the file's soak, rising."""
    values: list[float]


class SampleFile:
    """The CSV file that a soak appends to."""

    def __init__(self, path: Path) -> None:
        """Made with its header where it is missing."""
        self._path = path
        if not path.exists():
            self._append([HEADER])

    def append(self, seconds: float, figures: Iterable[Figure]) -> None:
        """Add one sample. It is on disk, line by line, when this returns."""
        self._append((f"{seconds:.1f}", f.subject, f.measure, f"{f.value:.12g}") for f in figures)

    def _append(self, rows: Iterable[tuple[str, ...]]) -> None:
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


def read_samples(path: Path) -> list[Series]:
    """Every figure of a soak's file, by subject and measure. A last line that is still being
    written is left out. Raises DataError for what is not such a file."""
    found: dict[tuple[str, str], Series] = {}
    for number, row in enumerate(_rows(path), start=2):
        try:
            seconds, subject, measure, value = row
            series = found.setdefault((subject, measure), Series(subject, measure, [], []))
            series.seconds.append(float(seconds))
            series.values.append(float(value))
        except ValueError:
            raise DataError(
                f"{path}, line {number} is not seconds,subject,measure,value; give the "
                "samples.csv that `leeway soak` wrote"
            ) from None
    return [found[key] for key in sorted(found)]


def _rows(path: Path) -> list[list[str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as the samples of a soak: {error}") from None
    whole = text[: text.rfind("\n") + 1]
    rows = list(csv.reader(whole.splitlines()))
    if not rows or tuple(rows[0]) != HEADER:
        raise DataError(
            f"{path} does not begin with {','.join(HEADER)}; give the samples.csv that "
            "`leeway soak` wrote"
        )
    return rows[1:]
