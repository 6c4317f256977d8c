"""`leeway bench api`: which windows are held against which, and what stands in for who asks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from leeway.services.bench import api
from leeway.services.bench.api import Bench, Pair, cost_of
from leeway.services.bench.api_load import Answers, Ask, Burn, _burn

ANSWERS = Answers([0.001, 0.002], 0, 500, 0.25)


class Scripted:
    """A worker that answers as the test says."""

    def __init__(self, told: list[Any], results: list[Any]) -> None:
        self.told = told
        self._results = iter(results)

    def order(self, what: Any) -> None:
        self.told.append(what)

    def result(self, timeout_s: float) -> Any:
        return next(self._results)

    def cpu_s(self) -> float:
        self.told.append("cpu")
        return next(self._results)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.told.append("stop")
        yield
        self.told.append("go on")


def test_a_window_with_the_api_is_held_against_the_two_beside_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api, "SETTLE_S", 0.0)
    told: list[Any] = []
    training: Any = Scripted([], [50.0, 100.0, 99.0, 102.0, 96.0, 98.0])
    served: Any = Scripted(told, [float(n) for n in range(6)])
    load: Any = Scripted(told, [ANSWERS, "burnt", ANSWERS, "burnt", ANSWERS, "burnt"])
    pairs = Bench(training, served, load, seconds=2.0).measure(2)
    assert [(pair.steps_without, pair.steps_with) for pair in pairs] == [(101, 99), (100, 96)]
    assert pairs[1].cost == pytest.approx(0.04)
    # Who asks takes a quarter of a core, and as much of one while the API is stopped.
    without = ["stop", Burn(2.0, 0.25), "go on"]
    with_ = [Ask(2.0 + api.MARGIN_S), "cpu", "cpu"]
    assert told == [*with_, *without, *with_, *without, *with_, *without]


def test_the_cost_is_the_median_with_its_standard_error():
    cost, error = cost_of([0.02, 0.0, 0.01])
    # 1.2533 * 0.01 / sqrt(3)
    assert (cost, round(error, 5)) == (0.01, 0.00724)


def test_the_p99_is_of_all_answers_and_the_fewest_listeners_count():
    slow = ANSWERS._replace(seconds=[0.030] * 2, num_listeners=499)
    pairs = [Pair(100, 99, 0.04, ANSWERS._replace(seconds=[0.001] * 98)), Pair(100, 99, 0.04, slow)]
    keys = api._result(pairs).keys
    assert (keys["status_p99_ms"], keys["sse_listeners"]) == (30.0, 499)
    assert keys["cost_share"] == 0.01


def test_who_stands_in_for_asking_takes_the_share_of_a_core_that_it_is_told():
    before = time.thread_time()
    _burn(Burn(seconds=0.2, share=0.5))
    assert 0.1 <= time.thread_time() - before < 0.2
