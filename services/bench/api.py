"""`leeway bench api`: what the REST API answers under load, and what it costs the training loop.

Three processes beside Redis: a training loop (api_training.py), the API as `leeway api` serves it,
and who asks it (api_load.py): 200 requests a second of `/v1/status` and 500 listeners of
`/v1/events`. Windows without an API and windows with one under that load take turns, and each of
the latter is held against the two beside it:

    steps a second   |  without  |  with  |  without  |  with  |  without  |

Without an API means that its process is stopped (SIGSTOP): it takes no processor time, and asks
nothing of Redis. Who asks takes processor time of its own, which is no cost of the API: on a run
worth watching they sit at other machines. So in the windows without an API the same process takes
as much of a core as it took before, in slices as short. All else counts as cost: what the API
computes and what Redis computes for it, cold caches, and steps that wait for a core.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from leeway.replay.server import EmbeddedRedis
from leeway.services.api.auth import tokens_of
from leeway.services.bench.api_load import SETTLE_S, Answers, Ask, Burn, run_load
from leeway.services.bench.api_processes import START_S, ServedApi, Stoppable, Worker
from leeway.services.bench.api_training import run_training
from leeway.services.bench.loop_lag import percentile_ms
from leeway.services.bench.result import BenchResult
from leeway.services.layout import RunDirectory

PER_SECOND: Final = 200
NUM_LISTENERS: Final = 500
RUN: Final = "bench"
MARGIN_S: Final = 0.2
"""Asking begins SETTLE_S before the window of the training loop, and ends so long after it."""


class Plan(NamedTuple):
    """How long it measures."""

    num_pairs: int
    seconds: float
    """Of one window."""


class Pair(NamedTuple):
    """A window with the API under load, and the two beside it."""

    steps_without: float
    """Steps a second, mean of the two."""
    steps_with: float
    cpu_share: float
    """Of one core that the API's process took under load."""
    answers: Answers

    @property
    def cost(self) -> float:
        """Share of the training loop's speed; 100 and 99 steps a second -> 0.01."""
        return 1 - self.steps_with / self.steps_without


class Bench:
    """The three processes."""

    def __init__(self, training: Worker, api: Stoppable, load: Worker, seconds: float) -> None:
        self._training = training
        self._api = api
        self._load = load
        self._seconds = seconds
        self._share = 0.0
        """Of a core that who asks took in the last window."""

    def measure(self, num_pairs: int) -> list[Pair]:
        """Windows in turn; the first under load tells how much of a core asking takes."""
        self._with()
        pairs: list[Pair] = []
        before = self._without()
        for _ in range(num_pairs):
            steps, cpu_share, answers = self._with()
            after = self._without()
            pairs.append(Pair((before + after) / 2, steps, cpu_share, answers))
            before = after
        return pairs

    def _with(self) -> tuple[float, float, Answers]:
        self._load.order(Ask(SETTLE_S + self._seconds + MARGIN_S))
        time.sleep(SETTLE_S)
        cpu_s, began = self._api.cpu_s(), time.monotonic()
        steps = self._steps_per_s()
        cpu_share = (self._api.cpu_s() - cpu_s) / (time.monotonic() - began)
        answers: Answers = self._load.result(self._seconds + START_S)
        self._share = answers.share
        return steps, cpu_share, answers

    def _without(self) -> float:
        with self._api.stopped():
            self._load.order(Burn(self._seconds, self._share))
            steps = self._steps_per_s()
            self._load.result(self._seconds + START_S)
        return steps

    def _steps_per_s(self) -> float:
        self._training.order(self._seconds)
        return self._training.result(self._seconds + START_S)


def run(*, quick: bool) -> BenchResult:
    """Measure."""
    plan = Plan(8, 1.5) if quick else Plan(40, 3.0)
    with tempfile.TemporaryDirectory() as folder, _processes(Path(folder)) as (training, api, load):
        training.order(1.0)  # what is loaded once is loaded now
        training.result(START_S)
        return _result(Bench(training, api, load, plan.seconds).measure(plan.num_pairs))


@contextmanager
def _processes(folder: Path) -> Iterator[tuple[Worker, ServedApi, Worker]]:
    directory = folder / RUN
    directory.mkdir()
    file = folder / "run.toml"
    # The bound would count all who ask as one client: they share an address here.
    file.write_text(f"[api]\nmax_requests_per_s = {100 * PER_SECOND}\n", encoding="utf-8")
    redis = EmbeddedRedis.start(directory / "redis", RUN)
    started: list[Worker | ServedApi] = []
    try:
        tokens, _ = tokens_of(directory)
        started.append(training := Worker(run_training, redis.url, RUN))
        started.append(api := ServedApi(redis.url, RunDirectory(directory), file))
        load = Worker(run_load, api.port, tokens.read, PER_SECOND, NUM_LISTENERS)
        started.append(load)
        assert load.result(START_S) == "open"
        yield training, api, load
    finally:
        for one in reversed(started):
            one.end()
        redis.stop()


def cost_of(costs: Sequence[float]) -> tuple[float, float]:
    """The median, and its standard error: 1.2533 * standard deviation / square root of the number.

    [0.0, 0.01, 0.02] -> 0.01 and 1.2533 * 0.01 / 1.7321 = 0.0072. Windows are short and a machine
    has hiccups, so a mean would be the hiccup's.
    """
    error = 1.2533 * statistics.stdev(costs) / len(costs) ** 0.5
    return statistics.median(costs), error


def _result(pairs: list[Pair]) -> BenchResult:
    seconds = [one for pair in pairs for one in pair.answers.seconds]
    cost, error = cost_of([pair.cost for pair in pairs])
    rows = [
        (
            f"{number}",
            f"{pair.steps_without:.1f}",
            f"{pair.steps_with:.1f}",
            f"{pair.cost:.1%}",
            f"{percentile_ms(pair.answers.seconds, 0.5):.1f}",
            f"{percentile_ms(pair.answers.seconds, 0.99):.1f}",
            f"{pair.answers.num_listeners}",
            f"{pair.cpu_share:.1%}",
            f"{pair.answers.share:.1%}",
        )
        for number, pair in enumerate(pairs, 1)
    ]
    columns = (
        "window",
        "steps/s without API",
        "with API and load",
        "cost",
        "p50 ms",
        "p99 ms",
        "listeners",
        "API's share of a core",
        "asker's",
    )
    return BenchResult(
        name="api",
        columns=columns,
        rows=tuple(rows),
        keys={
            "status_p99_ms": round(percentile_ms(seconds, 0.99), 2),
            "sse_listeners": min(pair.answers.num_listeners for pair in pairs),
            "cost_share": round(cost, 4),
            "cost_share_error": round(error, 4),
            "requests_per_s": PER_SECOND,
            "num_refused": sum(pair.answers.num_refused for pair in pairs),
            "api_cpu_share": round(statistics.median(pair.cpu_share for pair in pairs), 4),
            "asker_cpu_share": round(statistics.median(pair.answers.share for pair in pairs), 4),
        },
    )
