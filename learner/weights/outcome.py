"""How engines fare in a publish: who reached which stage, who is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from leeway.replay.board import EngineReport, Stage

MAX_FAILURES = 2
"""Transfers that may fail in one publish, and failures one engine may report in it."""


@dataclass
class Outcome:
    """How a wait for one stage ended, engine by engine."""

    reached: dict[str, EngineReport] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Said what went wrong."""
    silent: dict[str, str] = field(default_factory=dict)
    """Died, or did not say anything in time."""

    @property
    def engines(self) -> set[str]:
        return self.reached.keys() | self.failed.keys() | self.silent.keys()

    @property
    def is_complete(self) -> bool:
        return not self.failed and not self.silent

    def add(self, reports: Mapping[str, EngineReport], stage: Stage) -> None:
        for engine_id, report in reports.items():
            if report.stage == "failed":
                self.failed[engine_id] = report.error or "no reason given"
            elif report.has_reached(stage):
                self.reached[engine_id] = report


@dataclass
class Lost:
    """What one publish has gone through so far."""

    engines: set[str] = field(default_factory=set)
    """Evicted by it; not asked again even if they beat."""
    failures: Counter[str] = field(default_factory=Counter)
    num_transfers: int = 0
    """That failed since the last eviction."""
    refusal: str | None = None
    """What the last engine that was evicted for a failure said."""

    def add(self, outcome: Outcome) -> dict[str, str]:
        """The engines to evict: the silent ones, and those that failed again."""
        self.failures.update(outcome.failed.keys())
        failed = {e: r for e, r in outcome.failed.items() if self.failures[e] >= MAX_FAILURES}
        if failed:
            self.refusal = error_summary(failed)
        evicted = outcome.silent | failed
        if evicted:
            self.engines |= evicted.keys()
            self.num_transfers = 0
        return evicted


def error_summary(failed: Mapping[str, str]) -> str:
    """`engine-1: reason; engine-2: reason`."""
    return "; ".join(f"{engine}: {reason}" for engine, reason in failed.items()) or "no reply"
