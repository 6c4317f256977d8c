"""What a campaign found, as JSON that a later one goes on with, and as a table."""

from __future__ import annotations

import hashlib
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec
from rich.console import Console
from rich.table import Table

from tests.chaos.faults import PARENT
from tests.chaos.run_ledger import Account


class Outcome(msgspec.Struct, frozen=True):
    """One fault and what came of it."""

    backend: str
    """Of the engine: torch or vllm."""
    kind: str
    target: str
    lasted_s: float
    recovery_s: float
    """From its end until an optimizer step has ended and a group has come, with a living process
    in place of one that was killed; for the API also to its next answer."""
    is_recovered: bool
    engine_start_s: float
    """Of recovery_s, what an engine takes to load where one had to, or Ray and all Serve
    applications where the serve process or its parent was gone: as long as at the beginning of the
    run. Else 0."""
    died: str
    """Why `leeway train` ended over it, so that its operator had to resume; "" where it did not."""

    @property
    def is_survived(self) -> bool:
        """The run got over it by itself; `leeway train` itself is started again by its operator."""
        return self.is_recovered and (not self.died or self.target == PARENT)


class RunResult(msgspec.Struct, frozen=True):
    """One run of a campaign."""

    seed: int
    backend: str
    """Of the engine: torch or vllm."""
    num_faults: int
    num_questions: int
    """Of the evaluations before and after."""
    summary: dict[str, Any]
    """summary.json of the run."""
    account: Account
    deaths: list[str]
    """Why `leeway train` ended before its time; it was resumed then."""
    exit_code: int | None
    left: list[str]
    """Command lines of processes that outlived the run."""
    failure: str = ""
    """Why it did not come to its end; "" where it did."""
    num_killed: int = 0
    """How often a fault has killed `leeway train` itself."""

    @property
    def is_clean(self) -> bool:
        """It ended as it should, left no process, its ledgers agree with its buffer, and `leeway
        train` never ended but for being killed itself."""
        wrong = self.exit_code or self.left or self.failure or len(self.deaths) > self.num_killed
        return self.account.is_clean and not wrong

    @property
    def score(self) -> float | None:
        """Held-out exact match at the end; None for a run that was stopped before."""
        return self.summary.get("exact_match_after")


class Results(msgspec.Struct):
    """Of all runs."""

    outcomes: list[Outcome] = []
    runs: list[RunResult] = []
    revisions: list[str] = []
    """Of the code that was tried: the commit, and what had been changed since."""

    @classmethod
    def read(cls, path: Path, revision: str, *, any_revision: bool = False) -> Self:
        """Those of an earlier campaign with the same code, or with any; none where there is no such
        file. That of other code is kept beside it."""
        found = msgspec.json.decode(path.read_bytes(), type=cls) if path.is_file() else cls()
        if found.runs and revision not in found.revisions and not any_revision:
            path.rename(path.with_name(f"{path.stem}-{found.revisions[-1]}{path.suffix}"))
            found = cls()
        if revision not in found.revisions:
            found.revisions.append(revision)
        return found

    def write(self, path: Path) -> None:
        """Replace the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        partial.replace(path)

    @property
    def num_undisturbed(self) -> int:
        """Runs without a fault."""
        return sum(run.num_faults == 0 for run in self.runs)

    @property
    def is_clean(self) -> bool:
        """Nothing lost, nothing trained too often or too old, every fault survived, and no score
        below that of undisturbed runs by more than noise."""
        runs = all(run.is_clean for run in self.runs)
        is_over = all(outcome.is_survived for outcome in self.outcomes)
        return bool(self.runs) and runs and is_over and not self.low_scores()

    def low_scores(self) -> list[float]:
        """Scores of disturbed runs that are too low to be noise; empty where nothing is known."""
        least = least_score([r for r in self.runs if r.num_faults == 0 and r.score is not None])
        disturbed = [r.score for r in self.runs if r.num_faults and r.score is not None]
        return [] if least is None else [score for score in disturbed if score < least]


def revision_of(root: Path) -> str:
    """`0123456789ab`, and behind a dash what differs from that commit: 8 digits of a checksum. In
    a folder without git `unknown`."""
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD").decode().strip()
        changed = _git(root, "diff", "HEAD", "--", "*.py", "*.lua", "*.toml", "*.c")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-{hashlib.sha256(changed).hexdigest()[:8]}" if changed else head


def _git(root: Path, *words: str) -> bytes:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout


def least_score(undisturbed: Sequence[RunResult]) -> float | None:
    """Mean of the undisturbed runs less three standard deviations of a difference: between seeds,
    and of two shares of so many questions. None with fewer than two runs.

    0.60 and 0.64 of 100 questions: mean 0.62, variance 0.0008 + 2 * 0.62 * 0.38 / 100 = 0.005512,
    so 0.62 - 3 * 0.0742 = 0.397.
    """
    scores = [run.score for run in undisturbed if run.score is not None]
    if len(scores) < 2:
        return None
    mean = statistics.mean(scores)
    num_questions = undisturbed[0].num_questions
    variance = statistics.variance(scores) + 2 * mean * (1 - mean) / num_questions
    return mean - 3 * math.sqrt(variance)


NUMBERS: Final = ("times", "median s", "without engine start", "longest s", "not over", "resumed")


def _cells(found: Sequence[Outcome]) -> list[str]:
    """How often, how long, and what needed an operator."""
    seconds = [outcome.recovery_s for outcome in found]
    without = [max(0.0, outcome.recovery_s - outcome.engine_start_s) for outcome in found]
    return [
        str(len(found)),
        f"{statistics.median(seconds):.1f}",
        f"{statistics.median(without):.1f}",
        f"{max(seconds):.1f}",
        str(sum(not outcome.is_recovered for outcome in found)),
        str(sum(bool(outcome.died) for outcome in found)),
    ]


def write_report(results: Results) -> None:
    """One row for each kind of fault, then what the ledgers say, on stdout."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    table = Table(title=f"{len(results.outcomes)} faults, {len(results.runs)} runs")
    for n, name in enumerate(("fault", "engine", *NUMBERS)):
        table.add_column(name, justify="right" if n > 1 else "left")
    by_name: defaultdict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in results.outcomes:
        by_name[f"{outcome.kind} {outcome.target}", outcome.backend].append(outcome)
        by_name["all", outcome.backend].append(outcome)
    for (name, backend), found in sorted(by_name.items(), key=lambda item: item[0][::-1]):
        table.add_row(name, backend, *_cells(found))
    console.print(table)
    console.print(f"code: {', '.join(results.revisions)}")
    for run in results.runs:
        console.print(
            f"seed {run.seed}: {run.num_faults} faults, exact match {run.score}, {run.account}",
            soft_wrap=True,
        )
    least = least_score([run for run in results.runs if run.num_faults == 0])
    if least is not None:
        console.print(f"least score that noise explains: {least:.3f}")
