"""`GET /metrics`: a run in Prometheus' text format. The only file that imports its client.

What is not known yet is left out of the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from leeway.replay.histogram import Histogram
from leeway.replay.store import ReplayStats
from leeway.services.api.families import Family, Readings
from leeway.services.api.learning_families import LEARNER, REPLAY
from leeway.services.api.requests import RequestCounters
from leeway.services.api.rollout_families import ROLLOUTS
from leeway.services.api.run_families import API, ENGINES, RUN, WATCH
from leeway.services.snapshot import gathered

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

FAMILIES: Final[tuple[Family, ...]] = (*RUN, *WATCH, *LEARNER, *ROLLOUTS, *ENGINES, *REPLAY, *API)


def exposition(
    sections: Mapping[str, Mapping[str, Any]],
    stats: ReplayStats | None,
    phase: str | None,
    *,
    now: float,
    requests: RequestCounters | None = None,
) -> bytes:
    """The run as Prometheus text: `sections` and `phase` of its run board, `stats` of its buffer.

    `now` is Unix time: who is silent for longer than snapshot.SILENT_S is left out. `requests` are
    those of the API itself.
    """
    readings = Readings(gathered(sections, now), stats, phase, requests)
    registry = CollectorRegistry()
    registry.register(_Readings(readings))
    return generate_latest(registry)


class _Readings(Collector):
    """Hands one look at the run to the client library, which knows the format."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._run = str(readings.section("run").get("name", "run"))

    def collect(self) -> Iterator[Metric]:
        for family in FAMILIES:
            metric = _metric(family)
            for labels, value in family.read(self._readings):
                if value is not None:
                    _add(metric, (self._run, *labels), value)
            if metric.samples:
                yield metric


def _metric(family: Family) -> Metric:
    labels = ("run", *family.labels)
    if family.kind == "counter":
        return CounterMetricFamily(family.name.removesuffix("_total"), family.text, labels=labels)
    if family.kind == "histogram":
        return HistogramMetricFamily(family.name, family.text, labels=labels)
    return GaugeMetricFamily(family.name, family.text, labels=labels)


def _add(metric: Metric, labels: tuple[str, ...], value: float | Histogram) -> None:
    if isinstance(value, Histogram):
        assert isinstance(metric, HistogramMetricFamily), f"{metric.name} is no histogram"
        metric.add_metric(labels, value.cumulative(), value.sum)
    else:
        assert isinstance(metric, GaugeMetricFamily | CounterMetricFamily), metric.name
        metric.add_metric(labels, float(value))
