"""What staleness does to four objectives: a sweep of the bundled policy, and its table.

The sweep is deploy/configs/sweep-lags.toml: `ppo`, `grpo`, `so-ppo` and `so-grpo` at 0, 4 and 16
versions, two seeds, each at the learning rate of a scan at lag 0, the same scan for all. It is run,
kept and gone on with as by `leeway sweep`; a folder that either has begun serves both. What is
measured is learning and not speed, so nothing is run beside it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from leeway.services.bench.result import BenchResult
from leeway.services.config import load
from leeway.services.experiments.launchers import visible_gpus
from leeway.services.experiments.sweep_file import Sweep, load_sweep, with_resources
from leeway.services.experiments.sweep_folder import SweepFolder, SweepState
from leeway.services.experiments.sweep_report import findings
from leeway.services.experiments.sweep_rows import Row, row_of
from leeway.services.experiments.sweep_run import Limits, run_sweep

COLUMNS: Final = (
    "objective",
    "lag",
    "staleness",
    "rate",
    "exact match by seed",
    "mean",
    "clipped tokens",
    "clipped turns",
    "mean ||C||",
    "largest ||C||",
    "spikes per arm",
)
QUICK_STEPS: Final = 4
QUICK_LAG: Final = 2
"""One lag, and one whose ramp a few steps leave behind: an arm takes longer to start than to
train."""
QUICK_SET: Final[dict[str, Any]] = {
    "replay.groups_per_step": 1,
    "rollout.group_size": 4,
    "rollout.max_groups_in_flight": 1,
    "policy.max_num_seqs": 8,
    "policy.max_model_len": 512,
    "learner.num_steps": QUICK_STEPS,
    "eval.num_questions": 8,
}
QUICK_NOTE: Final = f"cut down to {QUICK_STEPS} steps: says nothing about learning"

Numbers = dict[str, float | int | str]


def run(
    *, quick: bool, file: Path, out: Path | None = None, max_minutes: float | None = None
) -> BenchResult:
    """Run what has not ended of the sweep in `file`, and tabulate what has.

    `out` None: the folder of `leeway sweep`; with `quick` a new temporary one.
    """
    sweep = load_sweep(file)
    if quick:
        sweep = cut_down(sweep)
    # The file's share of a GPU where there is one, else the processor.
    sweep = with_resources(sweep, "processes", None if visible_gpus() else 0.0)
    folder = _folder(sweep, quick, out)
    limits = Limits(None if max_minutes is None else max_minutes * 60)
    # SIGTERM ends the arms as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        state = asyncio.run(run_sweep(sweep, folder, limits, _say))
    finally:
        signal.signal(signal.SIGTERM, before)
    left = state.num_arms - state.num_ended
    if left:
        _say(
            f"{left} of {state.num_arms} arms have not ended; --out {folder.root} goes on with them"
        )
    rows = [row_of(one) for one in findings(folder).results] if state.num_ended else []
    return result_of(rows, state, folder.root, QUICK_NOTE if quick else "")


def cut_down(sweep: Sweep) -> Sweep:
    """All objectives of the first grid at one lag, the first value of every other axis, a few steps
    of a few episodes, no scan."""
    file = sweep.file
    grid = {
        axis: values if axis.endswith("objective") else values[:1]
        for axis, values in file.grid[0].items()
        if not axis.endswith("staleness")
    }
    grid["staleness"] = (QUICK_LAG,)
    update = {"set": file.set | QUICK_SET, "grid": (grid,), "scan": None}
    return replace(sweep, file=file.model_copy(update=update))


def _folder(sweep: Sweep, quick: bool, out: Path | None) -> SweepFolder:
    if out is not None:
        return SweepFolder(out)
    if quick:
        return SweepFolder(Path(tempfile.mkdtemp(prefix="leeway-stability-")))
    directory = Path(load(sweep.base, sweep.overrides).directory).expanduser()
    return SweepFolder(directory / "sweeps" / sweep.file.name)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def result_of(rows: Sequence[Row], state: SweepState, folder: Path, note: str) -> BenchResult:
    """A line for each series and lag, seeds together; `rows` are the grid's arms in order."""
    cells: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.series, row.staleness_set), []).append(row)
    numbers = {cell: _numbers(arms) for cell, arms in cells.items()}
    return BenchResult(
        "stability",
        COLUMNS,
        tuple(_line(*cell, arms, numbers[cell]) for cell, arms in cells.items()),
        {
            "num_arms": state.num_arms,
            "num_ended": state.num_ended,
            "num_failed": state.num_failed,
            "num_collapsed": state.num_collapsed,
            "folder": str(folder),
        },
        note=note,
        cell_keys={
            f"{name}/{series}/{lag}": value
            for (series, lag), of_cell in numbers.items()
            for name, value in of_cell.items()
        },
    )


def _numbers(arms: Sequence[Row]) -> Numbers:
    """Means over the arms of a cell, of the largest ||C|| the largest; what no arm has is left
    out."""
    found = {
        "exact_match": _over(fmean, (arm.score for arm in arms)),
        "staleness": _over(fmean, (arm.staleness for arm in arms)),
        "learning_rate": arms[0].learning_rate,
        "clip_fraction_tokens": _over(fmean, (arm.clip_fraction_tokens for arm in arms)),
        "clip_fraction_turns": _over(fmean, (arm.clip_fraction_turns for arm in arms)),
        "ctn_norm": _over(fmean, (arm.ctn_norm for arm in arms)),
        "ctn_norm_max": _over(max, (arm.ctn_norm_max for arm in arms)),
        "spikes_per_arm": _over(fmean, (arm.num_spikes for arm in arms if arm.steps)),
    }
    return {name: value for name, value in found.items() if value is not None}


def _over(
    reduce: Callable[[Sequence[float]], float], values: Iterable[float | None]
) -> float | None:
    present = [value for value in values if value is not None]
    return reduce(present) if present else None


def _line(series: str, lag: int, arms: Sequence[Row], numbers: Numbers) -> tuple[str, ...]:
    def cell(name: str, form: str) -> str:
        return form.format(numbers[name]) if name in numbers else "-"

    def share(name: str) -> str:
        return f"{100 * float(numbers[name]):.2f} %" if name in numbers else "-"

    return (
        series,
        str(lag),
        cell("staleness", "{:.2f}"),
        cell("learning_rate", "{:g}"),
        ", ".join(map(_score, arms)),
        cell("exact_match", "{:.3f}"),
        share("clip_fraction_tokens"),
        share("clip_fraction_turns"),
        cell("ctn_norm", "{:.4f}"),
        cell("ctn_norm_max", "{:.3f}"),
        cell("spikes_per_arm", "{:g}"),
    )


def _score(arm: Row) -> str:
    """0.915, 0.120 collapsed, failed"""
    if arm.score is None:
        return arm.status
    return f"{arm.score:.3f} collapsed" if arm.status == "collapsed" else f"{arm.score:.3f}"
