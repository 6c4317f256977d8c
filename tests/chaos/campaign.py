"""`make chaos`: a run on this machine's CPU while everything that can happen to it happens.

    python -m tests.chaos.campaign tests/chaos/chaos.toml --faults 200 --minutes 90

Runs follow one another until so many faults were made or the time is over. Within a run, faults
come one at a time at random instants, each of another kind and at another process; a run that has
had its share trains to its end undisturbed. Then the ledgers are held against its buffer. A file
of the same code that exists already is gone on with: its faults count.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from leeway.replay.errors import LeewayError
from leeway.services.layout import RunDirectory
from tests.chaos import faults as kinds
from tests.chaos import stage as staging
from tests.chaos.faults import PARENT, Fault, Means, processes_left
from tests.chaos.results import Results, RunResult, revision_of, write_report
from tests.chaos.run_ledger import Account, AddedGroups, settle, unknown
from tests.chaos.shim import Shim
from tests.chaos.stage import NoStage, Stage
from tests.chaos.trained_run import TrainedRun
from tests.chaos.trial import Trial, say

STOP_S: Final = 180.0
"""A step, a checkpoint, and the end of every process."""
LEFT_S: Final = 30.0
"""Within this, nothing is left of a run that was killed; of one that ended by itself nothing is at
once."""
ROOT: Final = Path(__file__).parents[2]
EXIT_NO_STAGE: Final = 77
WRONG: Final = (RuntimeError, OSError, subprocess.SubprocessError, psutil.Error, LeewayError)
"""What a run may fail with: the campaign goes on with the next."""


class Campaign:
    """Runs and faults until the plan is fulfilled."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self._folder = folder
        self._stage = Stage(folder)
        self._rng = random.Random(arguments.seed)
        self._deadline = time.monotonic() + 60 * arguments.minutes
        self._results = Results.read(
            arguments.json, revision_of(ROOT), any_revision=arguments.any_revision
        )
        self._shim = Shim(folder)
        self._queue: list[Fault] = []

    def run(self) -> Results:
        """Everything; the results are written after each run."""
        while self._results.num_undisturbed < self._arguments.undisturbed and self._has_time:
            self._one_run(0)
        while self._num_faults_left > 0 and self._has_time:
            self._one_run(min(self._arguments.per_run, self._num_faults_left))
        return self._results

    @property
    def _has_time(self) -> bool:
        return time.monotonic() < self._deadline

    @property
    def _num_faults_left(self) -> int:
        return self._arguments.faults - len(self._results.outcomes)

    @property
    def left(self) -> str:
        """What of the plan the time did not suffice for; "" where nothing is left."""
        runs = self._arguments.undisturbed - self._results.num_undisturbed
        parts = [f"{runs} undisturbed runs"] if runs > 0 else []
        parts += [f"{self._num_faults_left} faults"] if self._num_faults_left > 0 else []
        return " and ".join(parts)

    def _one_run(self, num_faults: int) -> None:
        number = len(self._results.runs)
        own = self._folder / f"run-{number}"
        ledgers = own / "ledgers"
        ledgers.mkdir(parents=True)
        disk = self._stage.disk / f"run-{number}"
        environment = {**self._shim.environment, "LEEWAY_CHAOS_LEDGERS": str(ledgers)}
        # Ray looks at the memory of the whole machine, which is others', too, and kills for it.
        environment["RAY_memory_monitor_refresh_ms"] = "0"
        self._shim.set_clock(0.0)
        trained = TrainedRun(disk, own / "train.log", environment)
        added = AddedGroups(ledgers)
        seed = self._rng.randrange(2**31)
        trained.start(self._command(disk, seed))
        means = Means(self._stage, self._shim, self._rng, lambda: trained.redis_port)
        trial = Trial(trained, means, added)
        failure = self._course(trial, trained, num_faults)
        left = _left_after(0.0 if trained.exit_code == 0 else LEFT_S)
        assert trained.run is not None
        config = trained.run.read_config()
        account = _settled(trained.run, ledgers)
        self._results.outcomes += trial.outcomes
        self._results.runs.append(
            RunResult(
                seed=seed,
                backend=config.policy.backend,
                num_faults=len(trial.outcomes),
                num_questions=config.eval.num_questions,
                summary=trained.summary(),
                account=account,
                deaths=trial.deaths,
                exit_code=trained.exit_code,
                left=left,
                failure=failure,
                num_killed=sum(
                    outcome.target == PARENT and outcome.kind == "kill"
                    for outcome in trial.outcomes
                ),
            )
        )
        self._results.write(self._arguments.json)
        say(f"run {number}: {failure} exit code {trained.exit_code}, left {left}, {account}")
        if not self._arguments.keep:
            shutil.rmtree(disk, ignore_errors=True)

    def _course(self, trial: Trial, trained: TrainedRun, num_faults: int) -> str:
        """From the first step to the end. Returns why it did not get there; "" if it did."""
        try:
            trial.await_first_step()
            while len(trial.outcomes) < num_faults and self._has_time:
                if not trial.disturb(self._next_fault()):
                    break
            if self._arguments.endless:
                trained.stop(STOP_S)
            else:
                trial.await_end()
        except WRONG as error:
            if trained.is_alive:
                trained.kill()
            return f"{type(error).__name__}: {error}"
        return ""

    def _command(self, disk: Path, seed: int) -> list[str]:
        settings = [*self._arguments.set, f"directory={disk}", f"seed={seed}"]
        settings += ["learner.num_steps=1000000"] if self._arguments.endless else []
        words = [word for setting in settings for word in ("--set", setting)]
        return [str(self._arguments.file), "--json", *words]

    def _next_fault(self) -> Fault:
        """Each kind once before any comes again."""
        if not self._queue:
            wanted, targets = self._arguments.kinds, self._arguments.targets
            self._queue = [
                f for f in kinds.all_faults() if f.kind in wanted and f.target in targets
            ]
            self._rng.shuffle(self._queue)
        return self._queue.pop()


def _left_after(seconds: float) -> list[str]:
    """What is still there so long after the end of a run; killed processes take leave of others."""
    deadline = time.monotonic() + seconds
    while (left := processes_left()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def _settled(run: RunDirectory, ledgers: Path) -> Account:
    try:
        return settle(run, run.read_config().replay, ledgers)
    except (*WRONG, ValueError, KeyError) as error:
        return unknown(f"{type(error).__name__}: {error}")


def main(words: Sequence[str]) -> int:
    """Exit code 0 when the plan is fulfilled and nothing was lost, 1 else, 77 where no stage can be
    had."""
    arguments = _parsed(words)
    if not staging.is_inside():
        try:
            staging.enter("tests.chaos.campaign", words)
        except NoStage as error:
            return _no_stage(error)
    folder = Path(tempfile.mkdtemp(prefix="lw-chaos-"))
    try:
        campaign = Campaign(arguments, folder)
    except (NoStage, FileNotFoundError) as error:
        return _no_stage(error)
    try:
        results = campaign.run()
    finally:
        subprocess.run(["umount", "-l", str(folder / "disk")], capture_output=True)
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    write_report(results)
    if campaign.left:
        print(f"left to do: {campaign.left}; call it again to go on", file=sys.stderr)
    return 0 if results.is_clean and not campaign.left else 1


def _no_stage(error: Exception) -> int:
    print(f"no faults can be made here: {error}", file=sys.stderr)
    return EXIT_NO_STAGE


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.campaign", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, help="configuration of the run")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--per-run", type=int, default=25, help="faults within one run, at most")
    parser.add_argument(
        "--undisturbed",
        type=int,
        default=0,
        metavar="RUNS",
        help="run so many without faults first",
    )
    parser.add_argument("--minutes", type=float, default=90.0, help="begin no fault after")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--kinds", nargs="+", default=kinds.KINDS, choices=kinds.KINDS)
    parser.add_argument("--targets", nargs="+", default=kinds.TARGETS, choices=kinds.TARGETS)
    parser.add_argument(
        "--endless", action="store_true", help="SIGTERM ends a run after its faults, not a step"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--any-revision", action="store_true", help="go on with a file of other code, too"
    )
    parser.add_argument("--json", type=Path, default=Path("build/chaos.json"))
    parser.add_argument("--keep", action="store_true", help="keep logs and ledgers")
    found = parser.parse_args(words)
    found.file, found.json = found.file.resolve(), found.json.resolve()
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
