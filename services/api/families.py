"""A metric of `GET /metrics`: its name, what it is, its labels, and where its value comes from.

Names follow Prometheus: base units, `_total` for what only grows, `_ratio` for shares of 1.
Counters and histograms of a run come from Redis, so they go on behind a restart of any process.
Each series carries `run`. docs/metrics.md lists them all, and a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from leeway.replay.histogram import Histogram
from leeway.replay.store import ReplayStats
from leeway.services.api.requests import RequestCounters

Section = Mapping[str, Any]
Value = float | Histogram


class Readings(NamedTuple):
    """What a scrape reads."""

    sections: Mapping[str, Section]
    """Of the run board, members gathered: snapshot.gathered."""
    stats: ReplayStats | None
    """None while the buffer has not answered yet."""
    phase: str | None
    requests: RequestCounters | None
    """Of the API that is asked; None where none counts."""

    def section(self, name: str) -> Section:
        """Empty where nobody has written it yet."""
        return self.sections.get(name, {})

    def members(self, part: str) -> Iterator[tuple[str, Section]]:
        """Workers or engines by name, whoever is alive."""
        for name, member in sorted(self.section(part).items()):
            if isinstance(member, Mapping):
                yield name, member


class Point(NamedTuple):
    """One series of a family now."""

    labels: tuple[str, ...]
    """In the order of Family.labels."""
    value: Value | None
    """None: not known yet, and left out."""


class Family(NamedTuple):
    """One metric."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    """Besides `run`."""
    text: str
    read: Callable[[Readings], Iterable[Point]]


def one(value: Callable[[Readings], Any]) -> Callable[[Readings], list[Point]]:
    """A family without labels."""
    return lambda r: [Point((), value(r))]


def of_stats(value: Callable[[ReplayStats], float]) -> Callable[[Readings], list[Point]]:
    return lambda r: [] if r.stats is None else [Point((), value(r.stats))]


def each(part: str, value: Callable[[Section], Any]) -> Callable[[Readings], Iterator[Point]]:
    """One series for each worker or engine."""

    def read(r: Readings) -> Iterator[Point]:
        for name, member in r.members(part):
            yield Point((name,), value(member))

    return read


def each_by(
    part: str, table: Callable[[Section], Mapping[str, Any]]
) -> Callable[[Readings], Iterator[Point]]:
    """One series for each worker or engine and key of a table of it."""

    def read(r: Readings) -> Iterator[Point]:
        for name, member in r.members(part):
            for key, value in sorted(table(member).items()):
                yield Point((name, key), value)

    return read


def histogram_of(saved: Mapping[str, Any] | None) -> Histogram | None:
    return None if saved is None else msgspec.convert(saved, Histogram)


def total(name: str) -> Callable[[Readings], list[Point]]:
    """A count of the learner; services/totals.py."""
    return one(lambda r: r.section("totals").get("counts", {}).get(name))


def distribution(name: str) -> Callable[[Readings], list[Point]]:
    """A histogram of the learner; services/totals.py."""
    return one(lambda r: histogram_of(r.section("totals").get("histograms", {}).get(name)))


def gauge(
    name: str, text: str, read: Callable[[Readings], Iterable[Point]], *labels: str
) -> Family:
    """What goes up and down."""
    return Family(name, "gauge", labels, text, read)


def counter(
    name: str, text: str, read: Callable[[Readings], Iterable[Point]], *labels: str
) -> Family:
    """What only grows."""
    return Family(name, "counter", labels, text, read)


def histogram(
    name: str, text: str, read: Callable[[Readings], Iterable[Point]], *labels: str
) -> Family:
    """A distribution since the start of the run."""
    return Family(name, "histogram", labels, text, read)
