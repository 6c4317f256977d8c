"""`leeway soak`: train for hours as anybody would, and measure whether anything grows.

The run is a `leeway train` of its own; this process only looks, every few seconds, and appends what
it sees to samples.csv. At the end of its time it stops the run with SIGTERM and judges the file.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from rich.console import Console

from leeway.replay.connection import Link
from leeway.replay.errors import ConfigurationError, LeewayError, WaitTimeout
from leeway.services.config import RunConfig
from leeway.services.layout import RunDirectory
from leeway.services.soak.processes import environment_of, option_of, process_figures
from leeway.services.soak.samples import Figure, SampleFile
from leeway.services.soak.services import (
    api_figures,
    disk_figures,
    ray_figures,
    redis_figures,
    step_figures,
)
from leeway.services.supervision import how_it_ended

START_S: Final = 600.0
"""From the start of the run to its first optimizer step: an engine compiles meanwhile."""
END_S: Final = 180.0
"""The learner finishes its step, and every process ends."""
FOREVER: Final = 10**9
"""Steps: it is the clock that ends a soak."""
SAMPLES: Final = "samples.csv"
LOG: Final = "soak.log"


class SoakedRunEnded(LeewayError):
    """The run that was to be watched ended by itself."""


async def soak(config: RunConfig, run: RunDirectory, minutes: float, every_s: float) -> Path:
    """Start a run, watch it for so long from its first step on, stop it. Returns the samples.

    Raises SoakedRunEnded when the run fails under way, or does not end well when it is stopped; the
    samples are kept."""
    command = [sys.executable, "-m", "leeway.services.cli", "train", "--resume", str(run.root)]
    log = run.root / LOG
    with log.open("ab") as sink:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,  # Ctrl-C is for this process, which then stops the run
        )
    try:
        watch = Watch(run, child, config.metrics.ray_port)
        await watch.until_first_step()
        await watch.for_minutes(minutes, every_s)
    except BaseException:
        await asyncio.to_thread(_end, child)
        raise
    code = await asyncio.to_thread(_end, child)
    if code != 0:
        raise SoakedRunEnded(
            f"the run was stopped after the soak and {code_words(code)}; its words are in "
            f"{run.root / LOG}, the samples can be judged with leeway soak --judge "
            f"{run.root / SAMPLES}"
        )
    return run.root / SAMPLES


class Watch:
    """Looks at a run that a child of this process trains."""

    def __init__(self, run: RunDirectory, child: subprocess.Popen[bytes], ray_port: int) -> None:
        self._run = run
        self._child = child
        self._ray_port = ray_port
        self._console = Console(stderr=True, highlight=False)
        self._stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)

    async def until_first_step(self) -> None:
        """Raises WaitTimeout after START_S, SoakedRunEnded where the run ends before."""
        deadline = time.monotonic() + START_S
        while not step_figures(self._run) and not self._stop.is_set():
            self._check_alive()
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"no optimizer step within {START_S:g} s; the run's words are in "
                    f"{self._run.root / 'soak.log'}"
                )
            await self._sleep(1)

    async def for_minutes(self, minutes: float, every_s: float) -> None:
        """Sample until the time is over, or SIGTERM or Ctrl-C comes."""
        file, began = SampleFile(self._run.root / SAMPLES), time.monotonic()
        link = Link(self._run.read_redis_url(), retry_s=every_s)
        scratch = environment_of(self._child.pid, "TMPDIR") | option_of(
            self._child.pid, "--temp_dir="
        )
        try:
            while (seconds := time.monotonic() - began) < 60 * minutes:
                if self._stop.is_set():
                    return
                self._check_alive()
                figures = await self._look(link, scratch)
                file.append(seconds, figures)
                self._say(seconds, minutes, figures)
                spent = time.monotonic() - began - seconds
                await self._sleep(max(0.0, every_s - spent))
        finally:
            await link.close()

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    async def _look(self, link: Link, scratch: set[str]) -> list[Figure]:
        state = self._run.read_state()
        return [
            *process_figures(self._child.pid),
            *await redis_figures(link, self._run.root.name),
            *(ray_figures(self._ray_port) if self._ray_port else ()),
            *api_figures(state.api_address if state else None),
            *disk_figures(self._run, scratch),
            *step_figures(self._run),
        ]

    def _check_alive(self) -> None:
        code = self._child.poll()
        if code is not None:
            raise SoakedRunEnded(
                f"the run ended by itself with exit code {code}; its words are in "
                f"{self._run.root / 'soak.log'}, the samples so far in {self._run.root / SAMPLES}"
            )

    def _say(self, seconds: float, minutes: float, figures: Sequence[Figure]) -> None:
        own = sum(figure.value for figure in figures if figure.measure == "own_bytes")
        step = next((figure.value for figure in figures if figure.measure == "step"), 0)
        passed = f"{seconds / 60:6.1f} of {minutes:g} min"
        self._console.print(f"{passed}  step {step:,.0f}  memory {own / 2**20:,.0f} MB")


def _end(child: subprocess.Popen[bytes]) -> int | None:
    """Stop the run; its exit code, None where it had to be killed."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        return child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()  # the kernel ends what it has started
        child.wait()
        return None


def code_words(code: int | None) -> str:
    """How a run ended that was told to."""
    if code is None:
        return f"did not end within {END_S:g} s, so it was killed"
    return f"ended with {how_it_ended(code)}"


def prepared(config: RunConfig) -> RunConfig:
    """The configuration with steps enough for any soak, and a port for Ray's metrics."""
    from leeway.services.config import with_values

    values: dict[str, object] = {"learner.num_steps": FOREVER}
    if config.metrics.ray_port == 0 and not os.environ.get("RAY_ADDRESS"):
        values["metrics.ray_port"] = _free_port()
    return with_values(config, values)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_times(minutes: float, every_s: float) -> None:
    """Raises ConfigurationError for a soak that could not be judged."""
    if minutes * 60 < 20 * every_s:
        raise ConfigurationError(
            f"{minutes:g} minutes hold fewer than 20 samples of {every_s:g} s each, too few to "
            "judge; raise --minutes or lower --every-s"
        )
