"""Metrics on their way to the sinks: training never waits for one, nor ends with one.

    learner ── queue of QUEUE_STEPS ──▶ one thread for each sink: build, step, step, ..., finish

A sink that raises, or falls a whole queue behind, is left alone from then on; `failures` tells that
once. A sink that hangs holds its own thread, and the end of the run for FINISH_S.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from queue import Empty, Full, Queue
from statistics import fmean
from threading import Event, Thread
from typing import Final

from leeway.services.sinks.protocol import Sink, Value

log = logging.getLogger(__name__)

QUEUE_STEPS: Final = 1000
FINISH_S: Final = 30.0
"""Seconds in which all sinks together may write out what is left."""

Job = Callable[[Sink], None]


class Sinks:
    """Every sink of a run."""

    def __init__(self, builders: Mapping[str, Callable[[], Sink]]) -> None:
        """`builders`: by the name of the sink; each is called on the sink's thread."""
        self._lines = [_Line(name, build) for name, build in builders.items()]

    def __len__(self) -> int:
        return len(self._lines)

    def step(self, step: int, record: Mapping[str, object]) -> None:
        """One optimizer step: the numbers of a line of metrics.jsonl; of a list its mean."""
        metrics = numbers(record)
        for line in self._lines:
            line.put(lambda sink: sink.step(step, metrics))

    def finish(self, summary: Mapping[str, Value]) -> None:
        """The run has ended. Waits for all sinks, FINISH_S at most."""
        for line in self._lines:
            line.put(lambda sink: sink.finish(summary))
            line.end()
        deadline = time.monotonic() + FINISH_S
        for line in self._lines:
            line.join(deadline)

    def failures(self) -> list[str]:
        """A sentence for each sink that has failed since the last call."""
        return [sentence for line in self._lines if (sentence := line.news()) is not None]


class _Line:
    """The queue and the thread of one sink."""

    def __init__(self, name: str, build: Callable[[], Sink]) -> None:
        self._name = name
        self._build = build
        self._jobs: Queue[Job | None] = Queue(QUEUE_STEPS)
        self._failed = Event()
        self._news: Queue[str] = Queue()
        self._thread = Thread(target=self._run, name=f"leeway-sink-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        if self._failed.is_set():
            return
        try:
            self._jobs.put_nowait(job)
        except Full:
            self._fail(f"it is {QUEUE_STEPS} steps behind")

    def end(self) -> None:
        try:
            self._jobs.put_nowait(None)
        except Full:
            self._fail(f"it is {QUEUE_STEPS} steps behind")

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and not self._failed.is_set():
            self._fail(f"it did not finish within {FINISH_S:g} s")

    def news(self) -> str | None:
        try:
            return self._news.get_nowait()
        except Empty:
            return None

    def _run(self) -> None:
        try:
            sink = self._build()
            while (job := self._jobs.get()) is not None:
                if self._failed.is_set():
                    return
                job(sink)
        except BaseException as error:  # a library may raise SystemExit, which is no end of ours
            log.warning("sink %s failed", self._name, exc_info=True)
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        if not self._failed.is_set():
            self._failed.set()
            self._news.put(f"sink {self._name} gets no more metrics: {why}; training goes on")


def numbers(record: Mapping[str, object]) -> dict[str, float]:
    """What a sink can plot: {"step": 3, "time": 1.7e9, "pause_ms": [1, 3], "loss": 0.5} ->
    {"pause_ms": 2.0, "loss": 0.5}. What is not finite is left out."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list) and value:
            value = fmean(value)
        if name in ("step", "time", "version") or not isinstance(value, int | float):
            continue
        if math.isfinite(value):
            found[name] = float(value)
    return found
