"""What the learner has counted since the start of the run, kept on the run board.

The section `totals` outlives the learner: a resumed one counts on behind it, so that what
Prometheus reads never falls.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from leeway.learner.weights.publisher import Published
from leeway.replay.histogram import Histogram

SECTION: Final = "totals"

STEP_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
STALENESS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
TRANSFER_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PAUSE_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_HISTOGRAMS: Final = {
    "step_s": STEP_S,
    "wait_s": STEP_S,
    "staleness": STALENESS,
    "transfer_s": TRANSFER_S,
    "pause_s": PAUSE_S,
}


class LastPublish(msgspec.Struct, frozen=True, kw_only=True):
    """The publish that was confirmed last."""

    version: int
    at: float
    """Unix time of the confirmation."""
    num_engines: int
    checksum: str
    transfer_s: float
    pause_s: list[float]
    """Per engine."""


class Totals:
    """Steps and publishes of a run. Rank 0 of the learner owns it."""

    def __init__(self, saved: Mapping[str, Any] | None) -> None:
        """`saved`: the section of an earlier process of the same run."""
        saved = saved or {}
        self._counts: dict[str, int] = dict(saved.get("counts", {}))
        histograms = saved.get("histograms", {})
        self._histograms = {
            name: Histogram.restored(bounds, histograms.get(name))
            for name, bounds in _HISTOGRAMS.items()
        }
        self._last_step_at: float | None = saved.get("last_step_at")
        last = saved.get("last_publish")
        self._last_publish = None if last is None else msgspec.convert(last, LastPublish)

    def count_step(self, line: Mapping[str, Any]) -> None:
        """One optimizer step, as in metrics.jsonl. Staleness is counted per trajectory:
        {"staleness_histogram/2": 5} -> 5 trajectories of staleness 2."""
        self._last_step_at = time.time()
        self._count("steps", 1)
        self._count("tokens", line["num_tokens_trained"])
        self._count("trajectories", line["num_trajectories"])
        self._histograms["step_s"].observe(line["seconds"])
        self._histograms["wait_s"].observe(line["wait_s"])
        for name, num in line.items():
            what, _, staleness = name.partition("/")
            if what == "staleness_histogram":
                self._histograms["staleness"].observe(float(staleness), int(num))

    def count_publish(self, published: Published) -> None:
        """One publish whose engines have answered."""
        self._count("publishes", 1)
        self._count("evictions", len(published.evicted))
        self._count("bytes", published.num_bytes * published.num_engines)
        if published.num_engines:
            self._histograms["transfer_s"].observe(published.transfer_s)
        for pause_s in published.pause_s:
            self._histograms["pause_s"].observe(pause_s)
        self._last_publish = LastPublish(
            version=published.version,
            at=time.time(),
            num_engines=published.num_engines,
            checksum=published.checksum,
            transfer_s=published.transfer_s,
            pause_s=published.pause_s,
        )

    def section(self) -> dict[str, Any]:
        """For the run board."""
        return {
            "counts": self._counts,
            "histograms": msgspec.to_builtins(self._histograms),
            "last_step_at": self._last_step_at,
            "last_publish": msgspec.to_builtins(self._last_publish),
        }

    def _count(self, name: str, num: float) -> None:
        self._counts[name] = self._counts.get(name, 0) + int(num)
