"""Who asks the API in `leeway bench api`: a process of its own, over plain sockets.

An HTTP library would take more of the machine than the API does, and be what is measured.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, NamedTuple

from leeway.services.bench.loop_lag import percentile_ms

NUM_CONNECTIONS: Final = 16
ANSWER_TIMEOUT_S: Final = 10.0
SETTLE_S: Final = 1.0
"""Of a window, before it counts."""


class Window(NamedTuple):
    """What a window of load saw."""

    p50_ms: float
    p99_ms: float
    num_answers: int
    num_refused: int
    num_listeners: int
    """Streams that got a message in the last seconds of the window."""


def run_load(pipe: Any, port: int, token: str, per_second: int, num_listeners: int) -> None:
    """Windows of load, each as long as the pipe says, until it says None."""
    asyncio.run(_serve(pipe, port, token, per_second, num_listeners))


async def _serve(pipe: Any, port: int, token: str, per_second: int, num_listeners: int) -> None:
    while (seconds := await asyncio.to_thread(pipe.recv)) is not None:
        pipe.send(await _window(pipe, port, token, per_second, num_listeners, seconds))


async def _window(
    pipe: Any, port: int, token: str, per_second: int, num_listeners: int, seconds: float
) -> Window:
    """Sends "open" when all listen; then the requests begin."""
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
        answers: list[tuple[float, int]] = []
        began = time.perf_counter()
        await asyncio.gather(
            *(
                _ask(port, token, began, number, per_second, seconds, answers)
                for number in range(NUM_CONNECTIONS)
            )
        )
        _raise_ended(streams)
        recent = time.perf_counter() - 5.0
        alive = sum(at > recent for at in heard.values())
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    good = [lag_s for lag_s, status in answers if status == 200]
    refused = len(answers) - len(good)
    return Window(percentile_ms(good, 0.5), percentile_ms(good, 0.99), len(good), refused, alive)


def _raise_ended(streams: list[asyncio.Task[None]]) -> None:
    for stream in streams:
        if stream.done():
            stream.result()
            raise ConnectionError("the API ended a stream of events")


async def _ask(
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
        while await reader.read(65536):
            heard[number] = time.perf_counter()
    finally:
        writer.close()


def _request(path: str, token: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()


def _length_of(head: bytes) -> int:
    lines = head.lower().split(b"\r\n")
    found = next(line for line in lines if line.startswith(b"content-length:"))
    return int(found.partition(b":")[2])
