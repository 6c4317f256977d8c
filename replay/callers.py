"""The callers of one process that wait on one side, as Redis is told of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from leeway.replay.chain import Side
from leeway.replay.waiting import Wait


class Callers:
    """Told in whole numbers each time, so that a report that arrives twice counts once."""

    def __init__(self, side: Side) -> None:
        self.side: Side = side
        self.name = f"{side} {uuid.uuid4().hex}"
        self._since_s: dict[Wait, float] = {}
        self._ended_s = 0.0

    def begin(self, wait: Wait) -> None:
        """A caller waits, if it does not already."""
        self._since_s.setdefault(wait, time.monotonic())

    def end(self, wait: Wait) -> bool:
        """It waits no longer; whether it ever did."""
        has_waited = self._since_s.pop(wait, None) is not None
        self._ended_s += wait.waited_s if has_waited else 0.0
        return has_waited

    def report(self, wait: Wait | None = None) -> dict[str, Any]:
        """All of them, as they will be when the try of `wait` has ended."""
        num = len(self._since_s) - (wait in self._since_s)
        ages = [time.monotonic() - since for since in self._since_s.values()]
        own_s = wait.waited_s if wait is not None and wait in self._since_s else 0.0
        return {
            "name": self.name,
            "side": self.side,
            "num": num,
            "asking": 1,
            "age_ms": 1000 * max(ages, default=0.0),
            "total_ms": 1000 * (self._ended_s + own_s),
            "has_waited": wait in self._since_s,
        }


def together(reports: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """The report of callers of one process that try at once; None where nobody tells anything.

    Two callers wait and one of them tries again, with two new ones: 1 waits, 3 ask.
    """
    told = [report for report in reports if report is not None]
    if not told:
        return None
    return {
        **told[0],
        "num": min(report["num"] for report in told),
        "asking": sum(report["asking"] for report in told),
        "age_ms": max(report["age_ms"] for report in told),
        "total_ms": max(report["total_ms"] for report in told),
        "has_waited": any(report["has_waited"] for report in told),
    }
