"""The experiments of docs/findings.md on one machine, one after the other, for as long as given.

    python deploy/experiments/run.py --minutes 27 --out results

Each is a sweep of deploy/configs. What has ended is kept in --state; the next call goes on there,
inside the runs that were cut. --out receives one archive for each sweep (results, rates, report,
some ten kilobytes a run), from which a later call on another machine goes on: --brought. It is
written anew every half minute, so a machine that is taken back takes little with it. The last thing
printed is a table of what has been found so far.

Needs the packages that `leeway sweep --executor processes` needs. docs/sweep.md explains the files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
CONFIGS: Final = ROOT / "deploy" / "configs"
LIVE: Final = ("sweep-c-live",)
"""Each run with an engine and a learner on two GPUs of their own."""
SWEEPS: Final = (
    *("sweep-a", "sweep-a-rate", "sweep-a-clip", "sweep-a-mean", "sweep-a-ctn"),
    *("sweep-b", "sweep-b-reuse", "sweep-c", "sweep-c-critic", "sweep-a-64", "sweep-b-fresh"),
    *LIVE,
)
SMOLLM2: Final = ROOT / "models" / "SmolLM2-135M-Instruct" / "one-hop-train.jsonl"
NEEDS: Final = dict.fromkeys(("sweep-c", "sweep-c-critic", "sweep-c-live"), SMOLLM2)
"""What a sweep cannot run without."""

RESERVE_S: Final = 45.0
"""Kept at the end of a call, for reports and archives."""
LEAST_S: Final = 30.0
"""No sweep begins with less: an arm needs that to start."""
PACK_EVERY_S: Final = 30.0
SHARE: Final = "gpu-share.txt"
"""In a sweep's folder: the share of a GPU that its arms last ran with."""
MAX_ARCHIVE_BYTES: Final = 16 * 2**20
MPS_PIPES: Final = "CUDA_MPS_PIPE_DIRECTORY"
MPS_LOGS: Final = "CUDA_MPS_LOG_DIRECTORY"
MPS_S: Final = 20.0
MEMORY_GIB: Final = (8.0, 14.0, 20.0)
"""Of a GPU for each arm. Where arms ended for want of memory, they run again with the next."""
MORE_GIB: Final = {"sweep-c": (20.0, 30.0, 45.0), "sweep-c-critic": (17.0, 30.0, 45.0)}


def main() -> int:
    """1 if a sweep ended badly."""
    options = _options()
    ends_at = time.monotonic() + options.minutes * 60 - RESERVE_S
    for name in options.only or SWEEPS:
        _take_in(options.brought, options.state, name)
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = options.only or SWEEPS
    small = [name for name in wanted if name not in LIVE]
    codes = [0]
    with nullcontext() if options.cpu or not small else shared_gpu():
        codes += _codes(small, options, ends_at)
    codes += _codes([name for name in wanted if name in LIVE], options, ends_at)
    for name in wanted:
        _table(options.state / name)
    return max(codes)


def _codes(names: Sequence[str], options: argparse.Namespace, ends_at: float) -> Iterator[int]:
    for name in names:
        needed = NEEDS.get(name)
        if needed is not None and not needed.is_file():
            _say(f"{name} is left out: {needed.relative_to(ROOT)} is not there; see smollm2.py")
            continue
        if name in LIVE and not options.cpu and len(_memories_gib()) < 2:
            _say(f"{name} is left out: it needs two GPUs")
            continue
        yield _run(name, options, ends_at)
        _pack(options.state / name, options.out / f"{name}.tar.gz")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, required=True, help="how long the call may take")
    parser.add_argument("--out", type=Path, required=True, help="folder of the archives")
    parser.add_argument(
        "--state", type=Path, default=ROOT / "runs" / "experiments", help="folder of the sweeps"
    )
    parser.add_argument("--brought", type=Path, help="folder of archives of an earlier call")
    parser.add_argument("--only", action="append", choices=SWEEPS, help="these alone, in order")
    parser.add_argument(
        "--at-most", type=float, metavar="MINUTES", help="of one sweep in this call; else no bound"
    )
    parser.add_argument("--cpu", action="store_true", help="arms on the CPU, one for each core")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="for every arm"
    )
    return parser.parse_args()


# ---- running


def _run(name: str, options: argparse.Namespace, ends_at: float) -> int:
    """With more of a GPU for each arm as long as some end for want of memory. 1 if it failed."""
    folder = options.state.resolve() / name
    known = folder / SHARE
    if options.at_most is not None:
        ends_at = min(ends_at, time.monotonic() + options.at_most * 60)
    # What an earlier call found out: with less, arms that are cut off would fail when they go on.
    is_known = known.is_file() and not options.cpu
    least = float(known.read_text(encoding="utf-8")) if is_known else 0.0
    shares = tuple(share for share in _shares(name, options.cpu) if share >= least)
    for number, share in enumerate(shares):
        left_s = ends_at - time.monotonic()
        if left_s < LEAST_S:
            _say(f"{name}: no time is left for it in this call")
            return 0
        command = [sys.executable, "-m", "leeway.services.cli", "sweep", "run"]
        command += [str(CONFIGS / f"{name}.toml"), "--out", str(folder), "--executor", "processes"]
        command += ["--max-minutes", f"{left_s / 60:.2f}", "--num-gpus", f"{share:g}", "--json"]
        command += [word for pair in options.set for word in ("--set", pair)]
        if number:
            command.append("--retry-failed")
        _say(f"{name}: {left_s / 60:.1f} minutes, {share:g} of a GPU for each arm")
        try:
            limit_s = left_s + RESERVE_S / 2
            code = _ended(command, limit_s, folder, options.out / f"{name}.tar.gz")
            ended = f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            code, ended = 1, f"did not end within its {left_s / 60:.1f} minutes"
        if folder.is_dir():
            known.write_text(f"{share:g}\n", encoding="utf-8")
        if code != 0:
            _say(f"{name}: leeway sweep {ended}")
            return 1
        if not _wants_memory(folder):
            break
    return 0


@contextmanager
def shared_gpu() -> Generator[None]:
    """NVIDIA's MPS for what is started meanwhile, where it is installed and nobody else runs it.

    Without it a GPU is given to one process at a time, and arms as small as these wait for each
    other: sixteen do hardly more than four.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or MPS_PIPES in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="leeway-mps-") as folder:
        own = {MPS_PIPES: folder, MPS_LOGS: folder}
        started = _mps(control, "-d", env=own)
        if started:
            os.environ.update(own)
        else:
            _say("NVIDIA's MPS did not start; the runs take turns on the GPU")
        try:
            yield
        finally:
            if started and not _mps(control, env=own, words="quit\n"):
                _say("NVIDIA's MPS was told to end, and did not answer")
            for name in own if started else ():
                del os.environ[name]


def _mps(control: str, *options: str, env: dict[str, str], words: str = "") -> bool:
    """Whether it did what it was told."""
    command = [control, *options]
    try:
        ended = subprocess.run(
            command, input=words, text=True, env={**os.environ, **env}, timeout=MPS_S
        )
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == 0


def _shares(name: str, is_cpu: bool) -> tuple[float, ...]:
    """GPUs of one run: those parts of this machine's that hold so much memory, or two of them."""
    if is_cpu:
        return (0.0,)
    if name in LIVE:
        return (2.0,)
    total_gib = _memories_gib()[0]
    wanted = MORE_GIB.get(name, MEMORY_GIB)
    return tuple(min(1.0, round(gib / total_gib, 3)) for gib in wanted)


def _memories_gib() -> list[float]:
    """Of each GPU of this machine."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [float(line) / 1024 for line in listed.splitlines()]


def _wants_memory(folder: Path) -> bool:
    """Whether arms have failed for want of GPU memory."""
    reasons = [str(result.get("reason")) for result in _results(folder)]
    return any("OutOfMemoryError" in reason for reason in reasons)


def _results(folder: Path) -> Iterator[dict[str, object]]:
    for file in sorted(folder.glob("arms/*/result.json")):
        yield json.loads(file.read_text(encoding="utf-8"))


def _ended(command: Sequence[str], limit_s: float, folder: Path, archive: Path) -> int:
    """Its exit code. Paths in configurations are of the repository, wherever this is called.

    What has ended is packed meanwhile too: who lends the machine may take it back before the end.
    """
    ends_at = time.monotonic() + limit_s
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT) as sweep:
        while True:
            left_s = max(0.0, ends_at - time.monotonic())
            try:
                return sweep.wait(min(left_s, PACK_EVERY_S))
            except subprocess.TimeoutExpired:
                if left_s <= PACK_EVERY_S:
                    sweep.kill()
                    raise
            _pack(folder, archive)


# ---- archives


def _take_in(brought: Path | None, state: Path, name: str) -> None:
    """What an earlier call has packed, where this machine has nothing newer."""
    archive = None if brought is None else brought / f"{name}.tar.gz"
    if archive is None or not archive.is_file() or (state / name / "plan.json").is_file():
        return
    with tarfile.open(archive) as packed:
        packed.extractall(state, filter="data")
    _say(f"{name}: {sum(1 for _ in _results(state / name))} ended runs were brought")


def _pack(folder: Path, archive: Path) -> None:
    """What the next call needs, and the report. Checkpoints stay: they are far too large."""
    if not (folder / "plan.json").is_file():
        return
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w:gz") as packed:
        for file in _kept(folder):
            packed.add(file, arcname=f"{folder.name}/{file.relative_to(folder)}")
    size = partial.stat().st_size
    partial.replace(archive)
    if size > MAX_ARCHIVE_BYTES:
        _say(f"{archive}: {size / 2**20:.1f} MiB, MORE THAN 16 MiB")


def _kept(folder: Path) -> Sequence[Path]:
    names = ("plan.json", "rates.json", "grid.json", "sweep.json", SHARE)
    own = [folder / name for name in names if (folder / name).is_file()]
    report = [file for file in (folder / "report").rglob("*") if file.suffix in {".html", ".csv"}]
    return [*own, *sorted(folder.glob("arms/*/result.json")), *sorted(report)]


# ---- the table


def _table(folder: Path) -> None:
    """Mean held-out score, seeds and failures by series and realised staleness."""
    from leeway.replay.errors import DataError
    from leeway.services.experiments.sweep_folder import SweepFolder
    from leeway.services.experiments.sweep_report import findings

    if not (folder / "plan.json").is_file():
        return
    try:
        found = findings(SweepFolder(folder))
    except DataError as error:
        _say(f"{folder.name}: {error}")
        return
    state = SweepFolder(folder).read_state()
    ended = "" if state is None else f", {state.num_ended} of {state.num_arms} runs ended"
    print(f"\n{folder.name}{ended}")
    for row in found.rows:
        if row.is_scan:
            score = "failed" if row.score is None else f"{row.score:.3f}"
            taken = " <" if found.rates.get(row.objective) == row.learning_rate else ""
            print(f"scan {row.objective:20} {row.learning_rate:g} {score}{taken}")
    if not found.cells:
        return
    print(f"{'series':44} {'staleness':>9} {'score':>6} {'interval':>15} {'runs':>4} {'failed':>6}")
    for cell in found.cells:
        staleness = "-" if cell.staleness is None else f"{cell.staleness:.2f}"
        mean = "-" if cell.mean is None else f"{cell.mean:.3f}"
        band = "" if cell.low is None or cell.high is None else f"{cell.low:.3f} to {cell.high:.3f}"
        counts = f"{len(cell.scores):>4} {cell.num_failed:>6}"
        print(f"{cell.series:44} {staleness:>9} {mean:>6} {band:>15} {counts}")
    for verdict in found.verdicts:
        print(f"- {verdict.sentence}")
    print("steps to the kept score, by staleness")
    for delay in found.delays:
        step = f"none in {delay.last_step}" if delay.step is None else f"{delay.step:g}"
        reached = f"{delay.num_reached} of {delay.num_runs} runs"
        print(f"{delay.series:44} {delay.staleness:>9.2f} {step:>12}  {reached}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
