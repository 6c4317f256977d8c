"""The verdict of a soak: which figures must stay flat, within which limit, and which may grow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from leeway.replay.errors import DataError
from leeway.services.soak.samples import Series, read_samples
from leeway.services.soak.slopes import Slope, Verdict, slope_of, verdict_of

GROWTH_PER_HOUR: Final = 0.01
"""Of a figure's median."""
MEGABYTE: Final = 2**20


class Rule(NamedTuple):
    """A measure that is judged."""

    measure: str
    floor_per_hour: float
    """Growth that is let pass whatever the median: a small process may grow by a page, and pools of
    gRPC and Redis clients come and go by a few threads and sockets. What leaks with every step or
    request is far above."""
    meaning: str


RULES: Final = (
    Rule("own_bytes", 2 * MEGABYTE, "memory of its own"),
    Rule("allocated_bytes", 2 * MEGABYTE, "memory held between steps"),
    Rule("shared_bytes", 2 * MEGABYTE, "shared memory"),
    Rule("open_files", 4, "open file descriptors"),
    Rule("threads", 4, "threads"),
    Rule("processes", 0.2, "processes"),
    Rule("used_bytes", 2 * MEGABYTE, "memory that Redis uses"),
    Rule("connections", 4, "connections to Redis"),
    Rule("objects", 0.5, "objects in Ray's store"),
    Rule("object_bytes", 1 * MEGABYTE, "bytes in Ray's store"),
    Rule("actors", 0.2, "living Ray actors"),
    Rule("scratch_bytes", 64 * MEGABYTE, "temporary files of the run"),
)
BY_DESIGN: Final = {
    "file_bytes": "pages of files in memory; shared with whatever else maps the same libraries",
    "append_only_bytes": "grows until Redis writes the file anew, at 256 MB or twice the last",
    "keys": "follows the groups that are in the buffer",
    "remembered_bytes": "ids of what was added and acknowledged within the last hour or two",
    "records_bytes": "lines of steps and publishes that the API shows; trimmed at a number",
    "groups_bytes": "groups that wait, and their indices; bounded by staleness",
    "run_bytes": "lines of metrics, publishes and events, logs; one for each step",
    "checkpoint_bytes": "the newest two checkpoints and the best",
    "redis_disk_bytes": "the append-only file, as above",
    "livez_ms": "how long the API takes to answer /livez",
    "step": "optimizer steps",
}

WITHIN_STEPS: Final = "goes up and down by half within a step; what it holds between two is judged"
"""Of the learner's own memory: a slope of 1 % an hour cannot be told from that in hours."""


class Judgement(NamedTuple):
    """One series that was judged."""

    subject: str
    measure: str
    slope: Slope
    limit_per_hour: float
    verdict: Verdict


class Report(NamedTuple):
    """What a soak found."""

    hours: float
    """Between the first sample after the warm-up and the last."""
    warm_up_minutes: float
    judged: list[Judgement]
    observed: list[Judgement]
    """Figures that may grow; their verdict says whether they did."""

    @property
    def is_flat(self) -> bool:
        """Whether all that must not grow was measured and is flat."""
        return not self.missing and all(found.verdict == "flat" for found in self.judged)

    @property
    def missing(self) -> list[str]:
        """What must not grow and was not measured often enough to be judged, of nobody."""
        judged = {judgement.measure for judgement in self.judged}
        return [rule.measure for rule in RULES if rule.measure not in judged]

    def count(self, verdict: Verdict) -> int:
        return sum(judgement.verdict == verdict for judgement in self.judged)


def judge_file(path: Path, warm_up_minutes: float | None) -> Report:
    """Judge samples.csv; without a warm-up, its first quarter is one. Raises DataError for a file
    that is too short."""
    series = read_samples(path)
    end = max((s.seconds[-1] for s in series), default=0.0)
    start = end / 4 if warm_up_minutes is None else 60 * warm_up_minutes
    report = _report([_after(s, start) for s in series], start)
    if not report.judged:
        raise DataError(
            f"{path} has too few samples after {start / 60:.1f} minutes of warm-up to judge; "
            "wait, or give a shorter --warm-up-minutes"
        )
    return report


def _report(series: Sequence[Series], start_s: float) -> Report:
    rules = {rule.measure: rule for rule in RULES}
    measured = {(one.subject, one.measure) for one in series}
    judged, observed = list[Judgement](), list[Judgement]()
    for one in series:
        slope = slope_of(one.seconds, one.values)
        if slope is None:
            continue
        is_held_judged = (one.subject, "allocated_bytes") in measured
        swings = one.measure == "own_bytes" and is_held_judged
        rule = None if swings else rules.get(one.measure)
        limit = max(rule.floor_per_hour if rule else 0.0, GROWTH_PER_HOUR * abs(slope.middle))
        found = Judgement(one.subject, one.measure, slope, limit, verdict_of(slope, limit))
        (judged if rule else observed).append(found)
    end_s = max((one.seconds[-1] for one in series if one.seconds), default=start_s)
    return Report((end_s - start_s) / 3600, start_s / 60, judged, observed)


def _after(series: Series, start_s: float) -> Series:
    first = next((n for n, s in enumerate(series.seconds) if s >= start_s), len(series.seconds))
    return series._replace(seconds=series.seconds[first:], values=series.values[first:])


def as_keys(report: Report) -> dict[str, Any]:
    """The report as one JSON object."""
    return {
        "hours": round(report.hours, 3),
        "warm_up_minutes": round(report.warm_up_minutes, 1),
        "is_flat": report.is_flat,
        "num_flat": report.count("flat"),
        "num_grows": report.count("grows"),
        "num_undecided": report.count("undecided"),
        "missing": report.missing,
        "judged": [_entry(judgement) for judgement in report.judged],
        "observed": [_entry(judgement) for judgement in report.observed],
    }


def _entry(judgement: Judgement) -> dict[str, Any]:
    slope = judgement.slope
    return {
        "subject": judgement.subject,
        "measure": judgement.measure,
        "median": slope.middle,
        "per_hour": slope.per_hour,
        "upper_per_hour": slope.upper_per_hour,
        "rise_per_hour": slope.rise_per_hour,
        "limit_per_hour": judgement.limit_per_hour,
        "p": slope.p,
        "verdict": judgement.verdict,
    }


def worst_first(judged: Iterable[Judgement]) -> list[Judgement]:
    """What grows, then what is undecided, then the rest, each by its share of the limit."""
    order = {"grows": 0, "undecided": 1, "flat": 2}
    return sorted(judged, key=lambda j: (order[j.verdict], -_share_of_limit(j)))


def _share_of_limit(judgement: Judgement) -> float:
    slope, limit = judgement.slope, judgement.limit_per_hour
    most = max(slope.upper_per_hour, slope.rise_per_hour)
    return most / limit if limit else most
