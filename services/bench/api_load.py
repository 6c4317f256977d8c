"""Who asks the API in `leeway bench api`: a process of its own, over plain sockets.

An HTTP library would take more of the machine than the API does, and be what is measured. What the
process takes itself it tells, and takes as much again in windows in which nobody asks: whoever asks
a real run sits at another machine, so this must not count as a cost of the API. For the same reason
it steps back behind the training loop, in both kinds of window.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, NamedTuple

from leeway.services.api.priority import step_back

NUM_CONNECTIONS: Final = 16
ANSWER_TIMEOUT_S: Final = 10.0
SETTLE_S: Final = 0.3
"""Of a window, before it counts."""
SLICE_S: Final = 0.005
"""As often as it is asked at 200 requests a second."""
HEARD_S: Final = 5.0


class Ask(NamedTuple):
    """An order: ask for so many seconds."""

    seconds: float


class Burn(NamedTuple):
    """An order: ask nobody, and take as much of a core as asking does."""

    seconds: float
    share: float


class Answers(NamedTuple):
    """What came of Ask."""

    seconds: list[float]
    """Of each good answer, from the moment at which its request was due."""
    num_refused: int
    num_listeners: int
    """Streams on which something came within the window."""
    share: float
    """Of a core that this process took."""


def run_load(pipe: Any, port: int, token: str, per_second: int, num_listeners: int) -> None:
    """Opens the streams, says "open", and does what the pipe says until it says None."""
    step_back()
    asyncio.run(_serve(pipe, port, token, per_second, num_listeners))


async def _serve(pipe: Any, port: int, token: str, per_second: int, num_listeners: int) -> None:
    heard: dict[int, float] = {}
    streams = [
        asyncio.create_task(_listen(port, token, number, heard)) for number in range(num_listeners)
    ]
    try:
        async with asyncio.timeout(60):
            while len(heard) < num_listeners:
                _raise_ended(streams)
                await asyncio.sleep(0.05)
        pipe.send("open")
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            if isinstance(order, Burn):
                await asyncio.to_thread(_burn, order)
                pipe.send("burnt")
                continue
            pipe.send(await _ask(port, token, per_second, order.seconds, heard))
            _raise_ended(streams)
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def _burn(order: Burn) -> None:
    """In slices, as the requests would be spread."""
    began = time.perf_counter()
    for number in range(round(order.seconds / SLICE_S)):
        until = time.thread_time() + order.share * SLICE_S
        while time.thread_time() < until:
            pass
        time.sleep(max(0.0, began + (number + 1) * SLICE_S - time.perf_counter()))


async def _ask(
    port: int, token: str, per_second: int, seconds: float, heard: dict[int, float]
) -> Answers:
    answers: list[tuple[float, int]] = []
    began, cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(
        *(
            _ask_on(port, token, began, number, per_second, seconds, answers)
            for number in range(NUM_CONNECTIONS)
        )
    )
    share = (time.process_time() - cpu_s) / (time.perf_counter() - began)
    # A stream has a message a second; one that is late is not yet lost.
    recent = time.perf_counter() - max(seconds, HEARD_S)
    alive = sum(at > recent for at in heard.values())
    good = [lag_s for lag_s, status in answers if status == 200]
    return Answers(good, len(answers) - len(good), alive, share)


def _raise_ended(streams: list[asyncio.Task[None]]) -> None:
    for stream in streams:
        if stream.done():
            stream.result()
            raise ConnectionError("the API ended a stream of events")


async def _ask_on(
    port: int,
    token: str,
    began: float,
    number: int,
    per_second: int,
    seconds: float,
    answers: list[tuple[float, int]],
) -> None:
    """Every NUM_CONNECTIONS-th request, on one connection. A request counts from when it was due,
    so that a slow answer before it is not hidden."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = _request("/v1/status", token)
    try:
        for place in range(number, int(per_second * seconds), NUM_CONNECTIONS):
            due = began + place / per_second
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            writer.write(request)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(_length_of(head))
            if place / per_second >= SETTLE_S:
                answers.append((time.perf_counter() - due, int(head.split(b" ", 2)[1])))
    finally:
        writer.close()


async def _listen(port: int, token: str, number: int, heard: dict[int, float]) -> None:
    """Read a stream until cancelled, and note when something came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_request("/v1/events", token))
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise ConnectionError(head.split(b"\r\n")[0].decode())
        while await reader.read(2**18):
            heard[number] = time.perf_counter()
    finally:
        writer.close()


def _request(path: str, token: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()


def _length_of(head: bytes) -> int:
    lines = head.lower().split(b"\r\n")
    found = next(line for line in lines if line.startswith(b"content-length:"))
    return int(found.partition(b":")[2])
