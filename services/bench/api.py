"""`leeway bench api`: what the REST API answers under load, and what it costs the training loop.

Three processes beside Redis: a training loop (api_training.py), the API as `leeway api` serves it,
and who asks it (api_load.py): 200 requests a second of `/v1/status` and 500 listeners of
`/v1/events`. Windows without anybody who asks, in which the API does nothing, and windows under
load take turns. Each loaded window is held against the two beside it, and the cost is the median.
Who asks takes part of the machine too, and that is not left out: without a core to spare for it,
the cost is mostly its own.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from leeway.replay.errors import WaitTimeout
from leeway.replay.server import EmbeddedRedis
from leeway.services.api.auth import tokens_of
from leeway.services.bench.api_load import Window, run_load
from leeway.services.bench.api_training import run_training
from leeway.services.bench.result import BenchResult

PER_SECOND: Final = 200
NUM_LISTENERS: Final = 500
RUN: Final = "bench"
START_S: Final = 120.0
TAIL_S: Final = 2.0
"""The load goes on for so long after the training loop's window."""


class Plan(NamedTuple):
    """How long it measures."""

    num_pairs: int
    seconds: float
    """Of one window."""


class Worker:
    """A process that answers orders over a pipe."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=target, args=(other, *arguments), daemon=True)
        self.process.start()
        other.close()

    def order(self, what: Any) -> None:
        """Begin something."""
        self._pipe.send(what)

    def result(self, timeout_s: float) -> Any:
        """What came of it. Raises WaitTimeout."""
        if not self._pipe.poll(timeout_s):
            name = self.process.name
            raise WaitTimeout(f"{name} gave no answer within {timeout_s:g} s; the bench is void")
        try:
            return self._pipe.recv()
        except EOFError:
            raise WaitTimeout(f"{self.process.name} ended; see why above") from None

    def end(self) -> None:
        """Tell it to end, and see that it does."""
        if self.process.is_alive():
            self._pipe.send(None)
            self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)


def serve(pipe: Any, url: str, directory: str) -> None:
    """The API in a process of its own; sends its port, ends when the pipe says so."""
    from leeway.services.api.app import connect_app, serve_in_thread
    from leeway.services.config import load

    run = Path(directory)
    config = load(None, [f"api.max_requests_per_s={100 * PER_SECOND}"])
    tokens, _ = tokens_of(run)
    address, stop = serve_in_thread(connect_app(url, run, config, tokens), "127.0.0.1", 0)
    pipe.send(int(address.rpartition(":")[2]))
    while (order := pipe.recv()) is not None:
        assert order == "cpu"
        pipe.send(time.process_time())
    stop()


def run(*, quick: bool) -> BenchResult:
    """Measure."""
    plan = Plan(2, 4.0) if quick else Plan(8, 10.0)
    with tempfile.TemporaryDirectory() as folder, _processes(Path(folder)) as (training, api, load):
        training.order(2.0)  # what is loaded once is loaded now
        training.result(START_S)
        pairs = _measure(training, api, load, plan)
    return _result(pairs)


@contextmanager
def _processes(folder: Path) -> Iterator[tuple[Worker, Worker, Worker]]:
    directory = folder / RUN
    directory.mkdir()
    redis = EmbeddedRedis.start(directory / "redis", RUN)
    workers: list[Worker] = []
    try:
        tokens, _ = tokens_of(directory)
        workers.append(Worker(run_training, redis.url, RUN))
        workers.append(Worker(serve, redis.url, str(directory)))
        port = workers[1].result(START_S)
        workers.append(Worker(run_load, port, tokens.read, PER_SECOND, NUM_LISTENERS))
        yield workers[0], workers[1], workers[2]
    finally:
        for worker in reversed(workers):
            worker.end()
        redis.stop()


class Pair(NamedTuple):
    """A window under load, and the two beside it."""

    steps_alone: float
    """Steps a second without load, mean of the two."""
    steps_loaded: float
    cpu_share: float
    """Of one core that the API's process took under load."""
    window: Window

    @property
    def cost(self) -> float:
        """Share of the training loop's speed; 100 and 99 steps a second -> 0.01."""
        return 1 - self.steps_loaded / self.steps_alone


def _measure(training: Worker, api: Worker, load: Worker, plan: Plan) -> list[Pair]:
    pairs: list[Pair] = []
    before = _steps_per_s(training, plan.seconds)
    for _ in range(plan.num_pairs):
        load.order(plan.seconds + TAIL_S)
        load.result(START_S)  # its streams are open
        cpu_s, began = _cpu_s(api), time.monotonic()
        loaded = _steps_per_s(training, plan.seconds)
        cpu_share = (_cpu_s(api) - cpu_s) / (time.monotonic() - began)
        window = load.result(plan.seconds + START_S)
        after = _steps_per_s(training, plan.seconds)
        pairs.append(Pair((before + after) / 2, loaded, cpu_share, window))
        before = after
    return pairs


def _steps_per_s(training: Worker, seconds: float) -> float:
    training.order(seconds)
    return training.result(seconds + START_S)


def _cpu_s(api: Worker) -> float:
    api.order("cpu")
    return api.result(START_S)


def _result(pairs: list[Pair]) -> BenchResult:
    p99_ms = statistics.median(pair.window.p99_ms for pair in pairs)
    cost = statistics.median(pair.cost for pair in pairs)
    listeners = min(pair.window.num_listeners for pair in pairs)
    rows = [
        (
            f"{number}",
            f"{pair.steps_alone:.1f}",
            f"{pair.steps_loaded:.1f}",
            f"{pair.cost:.1%}",
            f"{pair.window.p50_ms:.1f}",
            f"{pair.window.p99_ms:.1f}",
            f"{pair.window.num_listeners}",
            f"{pair.cpu_share:.0%}",
        )
        for number, pair in enumerate(pairs, 1)
    ]
    columns = (
        "window",
        "steps/s alone",
        "steps/s with load",
        "cost",
        "p50 ms",
        "p99 ms",
        "listeners",
        "API's share of a core",
    )
    return BenchResult(
        name="api",
        columns=columns,
        rows=tuple(rows),
        keys={
            "status_p99_ms": round(p99_ms, 2),
            "sse_listeners": listeners,
            "cost_share": round(cost, 4),
            "requests_per_s": PER_SECOND,
            "num_refused": sum(pair.window.num_refused for pair in pairs),
            "api_cpu_share": round(statistics.median(pair.cpu_share for pair in pairs), 3),
        },
    )
