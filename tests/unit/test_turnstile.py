"""The turnstile: one task in each pass of the event loop, in the order they came."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.actors.turnstile import Turnstile


async def passing(turnstile: Turnstile, name: str, log: list[str]) -> None:
    await turnstile.enter()
    log.append(name)


async def ticking(log: list[str]) -> None:
    while True:
        log.append(".")
        await asyncio.sleep(0)


async def test_somebody_else_runs_between_any_two_tasks():
    turnstile, log = Turnstile(), list[str]()
    ticker = asyncio.create_task(ticking(log))
    await asyncio.gather(*(passing(turnstile, name, log) for name in "abc"))
    ticker.cancel()
    text = "".join(log)
    assert text.replace(".", "") == "abc"
    assert not any(pair in text for pair in ("ab", "bc"))


async def test_who_comes_while_nobody_passes_goes_on_at_once():
    turnstile = Turnstile()
    step = turnstile.enter()
    try:
        step.send(None)
    except StopIteration as ended:
        assert ended.value == 1
    else:
        raise AssertionError("it waited for nobody")


async def test_a_cancelled_task_is_passed_over():
    turnstile, log = Turnstile(), list[str]()
    tasks = [asyncio.create_task(passing(turnstile, name, log)) for name in "abcd"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert log == ["a", "d"]
    await asyncio.wait_for(passing(turnstile, "e", log), 1)


async def test_a_task_that_is_cancelled_on_its_turn_holds_nobody_up():
    turnstile, log = Turnstile(), list[str]()
    tasks = [asyncio.create_task(passing(turnstile, name, log)) for name in "abc"]
    # Pass 1 lets a through, pass 2 wakes b, which would run in pass 3.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 1)
    assert log == ["a", "c"]


async def test_a_ticket_is_good_until_somebody_else_has_come_through():
    turnstile = Turnstile()
    ticket = await turnstile.enter()
    assert await turnstile.enter_again(ticket) == ticket
    other = await turnstile.enter()
    assert other != ticket
    assert await turnstile.enter_again(ticket) not in (ticket, other)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30))
def test_all_that_are_not_cancelled_pass_once_and_in_order(arrivals: list[tuple[int, bool]]):
    """Each arrives some passes of the loop after the one before; some are cancelled meanwhile."""

    async def run() -> tuple[list[str], list[asyncio.Task[None]]]:
        turnstile, log, tasks = Turnstile(), list[str](), list[asyncio.Task[None]]()
        for i, (num_passes, is_cancelled) in enumerate(arrivals):
            tasks.append(asyncio.create_task(passing(turnstile, str(i), log)))
            for _ in range(num_passes):
                await asyncio.sleep(0)
            if is_cancelled:
                tasks[i // 2].cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        return log, tasks

    log, tasks = asyncio.run(run())
    assert log == [str(i) for i, task in enumerate(tasks) if not task.cancelled()]
