"""Work in portions: so much in one turn of the event loop, the rest in order behind it."""

from __future__ import annotations

import asyncio

from leeway.replay.portions import Portions


async def _turns(amounts: list[int], size: int) -> list[list[int]]:
    """Which callers worked in each turn of the loop, by their place in `amounts`."""
    portions, seen = Portions(size), [[]]

    async def work(place: int, amount: int) -> None:
        await portions.turn()
        seen[-1].append(place)
        portions.spend(amount)

    tasks = [asyncio.create_task(work(i, amount)) for i, amount in enumerate(amounts)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        seen.append([])
    return [turn for turn in seen if turn]


def test_a_turn_takes_up_no_more_once_its_portion_is_done():
    # 4 + 4 is the portion of 8, 6 + 6 above it; what is larger than a portion is a turn by itself.
    assert asyncio.run(_turns([4, 4, 6, 6, 20, 1], 8)) == [[0, 1], [2, 3], [4], [5]]


def test_small_work_of_all_callers_is_one_turn():
    assert asyncio.run(_turns([1] * 8, 8)) == [[*range(8)]]


def test_a_caller_that_was_cancelled_holds_nobody_up():
    async def scenario() -> str:
        portions = Portions(1)
        portions.spend(1)
        waiting = [asyncio.create_task(portions.turn()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait_for(waiting[1], 60)
        return "went on"

    assert asyncio.run(scenario()) == "went on"
