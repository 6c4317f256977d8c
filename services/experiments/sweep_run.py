"""Running a sweep: the scan, then the grid, arms beside each other, each kept when it has ended.

    arms without a result ──> launcher (so many at once) ──> result.json each
                 scan done ──> rates ──> the grid's arms get theirs

Who waits for whom: the driver for arms, each at most resources.arm_timeout_s; an arm for a place,
which the arms before it give back. With a time limit, what still runs at its end is ended, and goes
on from its checkpoint next time.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Final

import msgspec

from leeway.services.experiments.arm_result import (
    ARM,
    RESULT,
    ArmResult,
    ArmSpec,
    drop_checkpoint,
    has_checkpoint,
    read_result,
    write_result,
)
from leeway.services.experiments.launchers import Job, Launcher, launcher_of
from leeway.services.experiments.sweep_arms import Arm, grid_arms, scan_arms
from leeway.services.experiments.sweep_file import Sweep
from leeway.services.experiments.sweep_folder import (
    Phase,
    SweepFolder,
    SweepState,
    replace_text,
)

BEAT_S: Final = 5.0
"""How often the state is written while arms run."""
NO_RATE: Final = "the scan gave no learning rate for its objective: every arm of it failed"


@dataclass(frozen=True)
class Limits:
    """Of one call."""

    max_s: float | None = None
    """Seconds; None: until every arm has ended."""
    retry_failed: bool = False
    """Run failed arms again."""


Say = Callable[[str], None]
"""Told a line at a time, for who watches."""


async def run_sweep(sweep: Sweep, folder: SweepFolder, limits: Limits, say: Say) -> SweepState:
    """Run what has not ended. Raises ConfigurationError before anything runs."""
    grid = grid_arms(sweep)
    scan = scan_arms(sweep, grid, folder.ended())
    folder.begin(sweep.identity())
    with folder.locked():
        if limits.retry_failed:
            _forget_failed(folder)
        driver = Driver(sweep, folder, limits, say)
        return await driver.run(scan, grid)


def _forget_failed(folder: SweepFolder) -> None:
    for result in folder.results():
        if result.status == "failed":
            shutil.rmtree(folder.arm(result.spec.name))


class Driver:
    """One call of a sweep."""

    def __init__(self, sweep: Sweep, folder: SweepFolder, limits: Limits, say: Say) -> None:
        self._sweep = sweep
        self._folder = folder
        self._say = say
        self._deadline = None if limits.max_s is None else time.monotonic() + limits.max_s
        self._running: dict[str, float] = {}
        """Since when, by name."""
        self._durations: list[float] = []
        self._num_arms = 0
        self._rates: dict[str, float] = {}
        self._names: set[str] = set()
        """Of the arms that count: a folder may hold others, at rates that a scan has replaced."""
        self._phase: Phase = "scanning"

    async def run(self, scan: Sequence[Arm], grid: Sequence[Arm]) -> SweepState:
        """Scan, then grid; returns how it stands at the end."""
        self._count(scan, grid)
        try:
            if not self._is_all_done(scan) or not self._is_all_done(self._settled(scan, grid)):
                async with launcher_of(self._sweep.file.resources) as launcher:
                    await self._run_stages(launcher, scan, grid)
        finally:
            state = self._write_state("stopped" if self._left(scan, grid) else "done")
        return state

    async def _run_stages(
        self, launcher: Launcher, scan: Sequence[Arm], grid: Sequence[Arm]
    ) -> None:
        self._say(f"{launcher.num_places} arms beside each other")
        beat = asyncio.create_task(self._beat())
        try:
            await self._run_all(launcher, scan)
            if self._is_all_done(scan):
                self._phase = "running"
                await self._run_all(launcher, self._settled(scan, grid))
        finally:
            beat.cancel()
            with suppress(asyncio.CancelledError):
                await beat

    def _settled(self, scan: Sequence[Arm], grid: Sequence[Arm]) -> list[Arm]:
        """The grid's arms with their rates, once the scan is done."""
        if not self._is_all_done(scan):
            return list(grid)
        if scan and not self._rates:
            asked = self._sweep.file.scan
            assert asked is not None, "arms of a scan come from one"
            self._rates = rates_of(self._results(scan), asked.tolerance)
            self._folder.write_rates(self._rates)
            for objective, rate in self._rates.items():
                self._say(f"{objective}: learning rate {rate:g}")
        settled: list[Arm] = []
        for arm in grid:
            if not arm.needs_rate:
                settled.append(arm)
            elif arm.objective in self._rates:
                settled.append(arm.with_rate(self._rates[arm.objective]))
            else:
                self._record_failure(arm, NO_RATE)
                settled.append(arm)
        self._folder.write_grid({arm.name: arm.rate for arm in settled})
        self._count(scan, settled)
        return settled

    def _count(self, scan: Sequence[Arm], grid: Sequence[Arm]) -> None:
        """An arm of the grid that the scan has run is one. Before the scan is done this is a guess
        from above: which arms those are is not known."""
        self._names = {arm.name for arm in (*scan, *grid)}
        self._num_arms = len(self._names)

    async def _run_all(self, launcher: Launcher, arms: Iterable[Arm]) -> None:
        """Every arm without a result, those first that were ended in the middle. A task for each
        waits for its place."""
        left = [arm for arm in arms if not self._is_done(arm)]
        left.sort(key=lambda arm: not has_checkpoint(self._folder.arm(arm.name)))
        gate = asyncio.Semaphore(launcher.num_places)

        async def one(arm: Arm) -> None:
            async with gate:
                if self._may_start():
                    await self._run_one(launcher, arm)

        async with asyncio.TaskGroup() as group:
            for arm in left:
                group.create_task(one(arm))

    def _may_start(self) -> bool:
        """Not where the limit would end it before its first checkpoint, or before its end as far as
        half of the arms so far tell."""
        if self._deadline is None:
            return True
        expected_s = median(self._durations) if self._durations else 0.0
        if self._sweep.file.loop == "in-process":  # the other's checkpoints go by steps
            expected_s = min(expected_s, 2 * self._sweep.file.resources.checkpoint_every_s)
        return time.monotonic() + expected_s < self._deadline

    async def _run_one(self, launcher: Launcher, arm: Arm) -> None:
        folder = self._folder.arm(arm.name)
        self._prepare(arm, folder)
        self._running[arm.name] = began = time.monotonic()
        try:
            async with asyncio.timeout_at(self._loop_deadline()):
                reason = await launcher.run(self._job(arm))
        except TimeoutError:
            self._say(f"{arm.name}: ended by the time limit; the next call goes on with it")
            return
        finally:
            del self._running[arm.name]
        if read_result(folder) is None:
            self._record_failure(arm, reason or "it ended without a result; see its log.txt")
        self._durations.append(time.monotonic() - began)
        self._tell(arm)

    def _prepare(self, arm: Arm, folder: Path) -> None:
        """The folder as the arm's process finds it: with what an earlier call has left of the same
        arm, of which the process takes what it can go on from."""
        spec = msgspec.json.format(msgspec.json.encode(spec_of(self._sweep, arm)))
        file = folder / ARM
        if not file.is_file() or file.read_bytes() != spec:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            replace_text(file, spec.decode())

    def _loop_deadline(self) -> float | None:
        if self._deadline is None:
            return None
        return asyncio.get_running_loop().time() + max(0.0, self._deadline - time.monotonic())

    def _job(self, arm: Arm) -> Job:
        resources = self._sweep.file.resources
        folder = self._folder.arm(arm.name).resolve()
        arguments = ["leeway.services.experiments.arm", str(folder)]
        arguments += ["--gpu-share", f"{resources.num_gpus:g}"]
        arguments += ["--keep-every-s", f"{resources.checkpoint_every_s:g}"]
        if resources.micro_batch_tokens is not None:
            arguments += ["--micro-batch-tokens", str(resources.micro_batch_tokens)]
        if self._sweep.base is not None:
            arguments += ["--base", str(self._sweep.base)]
        return Job(folder, tuple(arguments), resources.arm_timeout_s)

    def _record_failure(self, arm: Arm, reason: str) -> None:
        folder = self._folder.arm(arm.name)
        folder.mkdir(parents=True, exist_ok=True)
        spec = spec_of(self._sweep, arm)
        write_result(folder, ArmResult(spec=spec, status="failed", reason=reason))
        drop_checkpoint(folder)

    def _tell(self, arm: Arm) -> None:
        result = read_result(self._folder.arm(arm.name))
        if result is None:
            return
        score = f"{result.evaluations[-1].score:.3f}" if result.evaluations else ""
        what = result.reason if result.status == "failed" else f"{result.status} at {score}"
        ended = len(self._ended())
        self._say(f"{ended} of {self._num_arms}  {arm.name}: {what} ({result.wall_s:.0f} s)")

    # ---- what has ended

    def _is_done(self, arm: Arm) -> bool:
        return (self._folder.arm(arm.name) / RESULT).is_file()

    def _is_all_done(self, arms: Iterable[Arm]) -> bool:
        return all(self._is_done(arm) for arm in arms)

    def _left(self, scan: Sequence[Arm], grid: Sequence[Arm]) -> bool:
        return not (self._is_all_done(scan) and self._is_all_done(self._settled(scan, grid)))

    def _ended(self) -> list[ArmResult]:
        return [one for one in self._folder.results() if one.spec.name in self._names]

    def _results(self, arms: Iterable[Arm]) -> list[ArmResult]:
        found = [read_result(self._folder.arm(arm.name)) for arm in arms]
        return [result for result in found if result is not None]

    # ---- the state

    async def _beat(self) -> None:
        while True:
            self._write_state(self._phase)
            await asyncio.sleep(BEAT_S)

    def _write_state(self, phase: Phase) -> SweepState:
        statuses = [result.status for result in self._ended()]
        state = SweepState(
            name=self._sweep.file.name,
            phase=phase,
            num_arms=self._num_arms,
            num_ended=len(statuses),
            num_failed=statuses.count("failed"),
            num_collapsed=statuses.count("collapsed"),
            running=sorted(self._running),
            rates=self._rates,
            updated_at=time.time(),
        )
        self._folder.write_state(state)
        return state


def spec_of(sweep: Sweep, arm: Arm) -> ArmSpec:
    """What the arm's process is told."""
    return ArmSpec(
        name=arm.name,
        objective=arm.objective,
        staleness=arm.staleness,
        seed=arm.seed,
        variant=arm.variant,
        is_scan=arm.is_scan,
        overrides=(*sweep.overrides, *arm.overrides),
        mode=sweep.file.mode,
        loop=sweep.file.loop,
        collapse=sweep.file.collapse.model_dump(),
    )


def rates_of(results: Sequence[ArmResult], tolerance: float = 0.0) -> dict[str, float]:
    """The rate of each objective: the smallest whose mean of final scores over seeds lies within
    `tolerance` of the best. A failed arm scores 0; an objective of which every arm failed has no
    rate.

    1e-4: 0.91, 2e-4: 0.92 -> 2e-4; with a tolerance of 0.02 -> 1e-4
    """
    scores: dict[str, dict[float, list[float | None]]] = {}
    for result in results:
        of_objective = scores.setdefault(result.spec.objective, {})
        failed = result.status == "failed" or not result.evaluations
        score = None if failed else result.evaluations[-1].score
        of_objective.setdefault(rate_of(result), []).append(score)
    found = {name: _rate(rates, tolerance) for name, rates in scores.items()}
    return {name: rate for name, rate in found.items() if rate is not None}


def _rate(scores: Mapping[float, Sequence[float | None]], tolerance: float) -> float | None:
    means = {
        rate: fmean(score or 0.0 for score in of_rate)
        for rate, of_rate in scores.items()
        if any(score is not None for score in of_rate)
    }
    # Differences of decimal fractions are off in their last bits.
    least = max(means.values(), default=0.0) - tolerance - 1e-9
    return min((rate for rate, mean in means.items() if mean >= least), default=None)


def rate_of(result: ArmResult) -> float:
    """The learning rate it was given."""
    prefix = "learner.learning_rate="
    found = [o.removeprefix(prefix) for o in result.spec.overrides if o.startswith(prefix)]
    return float(found[-1]) if found else float(result.learning_rate or 0.0)
