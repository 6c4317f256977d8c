"""Calls of one turn of the event loop are one call of what runs them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from leeway.replay.batches import Batches
from leeway.replay.callers import together
from leeway.replay.errors import StoreError


class Runs:
    """Doubles numbers, and remembers what it was given."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        if 13 in items:
            raise StoreError("no")
        return [2 * item for item in items]


async def test_calls_of_one_turn_run_together_and_get_their_own_results():
    runs = Runs()
    batches = Batches(runs, max_weight=100, max_items=10)
    assert await asyncio.gather(*(batches.call(i, 1) for i in range(3))) == [0, 2, 4]
    assert await batches.call(5, 1) == 10
    assert runs.batches == [[0, 1, 2], [5]]


async def test_a_batch_ends_by_weight_and_by_number():
    runs = Runs()
    batches = Batches(runs, max_weight=10, max_items=3)
    await asyncio.gather(*(batches.call(i, 6) for i in range(3)))
    await asyncio.gather(*(batches.call(i, 0) for i in range(4)))
    assert runs.batches == [[0, 1], [2], [0, 1, 2], [3]]


async def test_what_was_cancelled_before_it_was_sent_is_not_sent():
    runs = Runs()
    batches = Batches(runs, max_weight=100, max_items=10)
    calls = [asyncio.ensure_future(batches.call(i, 1)) for i in range(2)]
    asyncio.get_running_loop().call_soon(calls[0].cancel)
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError) and done[1] == 2
    assert runs.batches in ([[1]], [[0, 1]])


async def test_an_error_reaches_every_caller():
    batches = Batches(Runs(), max_weight=100, max_items=10)
    results = await asyncio.gather(*(batches.call(i, 1) for i in (1, 13)), return_exceptions=True)
    assert [type(result) for result in results] == [StoreError, StoreError]


@pytest.mark.parametrize(
    ("reports", "num", "asking"),
    [
        # Two callers wait: one of them tries again, with two new ones.
        ([(1, True), (2, False), (2, False)], 1, 3),
        ([(0, False)], 0, 1),
    ],
)
def test_reports_of_callers_that_try_at_once_are_one(reports, num, asking):
    told = together(
        [
            {"num": n, "asking": 1, "age_ms": 5.0 * n, "total_ms": 7.0, "has_waited": waited}
            for n, waited in reports
        ]
    )
    assert told is not None
    assert (told["num"], told["asking"]) == (num, asking)
    assert told["has_waited"] == any(waited for _, waited in reports)
    assert together([None, None]) is None


async def test_an_error_among_the_results_reaches_its_own_caller_alone():
    async def run(items: Sequence[int]) -> list[int | Exception]:
        return [StoreError("no") if item == 13 else item for item in items]

    batches = Batches(run, max_weight=100, max_items=10)
    results = await asyncio.gather(*(batches.call(i, 1) for i in (1, 13)), return_exceptions=True)
    assert results[0] == 1 and isinstance(results[1], StoreError)
