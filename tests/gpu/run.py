"""Everything that needs a CUDA device, or more cores than two, in one call, with a table last.

    python tests/gpu/run.py --out results --minutes 9             # what fits, in this order
    python tests/gpu/run.py --out results doctor publish-1.5B     # these alone

A machine with GPUs is often lent for minutes at a time, without a package index. So each stage has
a limit of its own, what it prints lies in the folder at once, a stage is begun only if the time
left is at least what it takes, and stages that ended well before (in the same folder) are left out.
Beside a run of the pipeline watch.py looks on; what the run says of itself is in records.tar.gz.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
LEEWAY = (sys.executable, "-m", "leeway.services.cli")
PIPELINE = str(Path(tempfile.gettempdir(), "leeway-pipeline"))
PYTEST = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--import-mode=importlib")
RECORDS = ("**/runs/*/*.json*", "**/runs/*/logs/*", "**/bench.log")
"""Of a run directory: steps, publishes, timeline, logs. Checkpoints and the buffer are large."""
ON_THE_SECOND = "test_on_a_gpu_that_is_not_the_current_one_it_gives_the_same_log_probs"
OUTCOME = ("FAILED ", "ERROR ", "E   ")
"""How lines of pytest begin that say what went wrong. Libraries write pages behind them."""


@dataclass(frozen=True)
class Stage:
    """One command."""

    name: str
    command: tuple[str, ...]
    limit_s: int
    num_gpus: int = 1
    runs: str | None = None
    """Run directories lie below it."""


STAGES = (
    Stage("doctor", (*LEEWAY, "doctor", "--deep", "--json"), 240),
    Stage("publish-1.5B", (*LEEWAY, "bench", "publish", "--shape", "1.5B", "--json"), 420, 2),
    Stage("publish-7B", (*LEEWAY, "bench", "publish", "--shape", "7B", "--json"), 540, 2),
    # What a learner uses whose engines are on other machines.
    Stage(
        "publish-nccl",
        (*LEEWAY, "bench", "publish", "--shape", "1.5B", "--transport", "collective", "--json"),
        420,
        2,
    ),
    # Where there is no room for a second copy of the weights: the engine rests while they come.
    Stage(
        "publish-in-place",
        (*LEEWAY, "bench", "publish", "--shape", "1.5B", "--staging", "never", "--json"),
        420,
        2,
    ),
    Stage("two-ranks", (*PYTEST, str(TESTS / "test_ranks_gpu.py")), 400, 2),
    Stage(
        "two-gpu-tests",
        (
            *PYTEST,
            *(str(TESTS / f"test_{name}_gpu.py") for name in ("exposed_memory", "publish")),
            f"{TESTS}/test_torch_policy_gpu.py::{ON_THE_SECOND}",
        ),
        200,
        2,
    ),
    # A run that ended there is not played again: the two fit into two calls.
    Stage(
        "pipeline-apart",
        (*LEEWAY, "bench", "pipeline", "--out", PIPELINE, "--half", "asynchronous", "--json"),
        480,
        2,
        PIPELINE,
    ),
    Stage(
        "pipeline", (*LEEWAY, "bench", "pipeline", "--out", PIPELINE, "--json"), 480, 2, PIPELINE
    ),
    Stage("engine", (*LEEWAY, "bench", "engine", "--json"), 420),
    Stage("decode", (*LEEWAY, "bench", "decode", "--json"), 120),
    Stage("ctn", (*LEEWAY, "bench", "ctn", "--json"), 240),
    Stage("learner", (*LEEWAY, "bench", "learner", "--json"), 240),
    Stage(
        "one-gpu-tests",
        (
            *PYTEST,
            *(str(TESTS / f"test_{name}_gpu.py") for name in ("head", "learner", "torch_policy")),
        ),
        240,
    ),
    # For its cores: with fewer than three, clients and server take them from each other.
    Stage("replay", (*LEEWAY, "bench", "replay", "--json"), 420, 0),
)


def main() -> int:
    """1 if a stage that ran ended badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--out", type=Path, required=True, help="folder for what each stage prints")
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole call")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(_names()))
    given = parser.parse_args()
    unknown = sorted(set(given.stages) - set(_names()))
    if unknown:
        parser.error(f"there is no stage {unknown[0]}; take one of {', '.join(_names())}")
    deadline = time.monotonic() + 60 * given.minutes
    chosen = [stage for stage in STAGES if not given.stages or stage.name in given.stages]
    given.out.mkdir(parents=True, exist_ok=True)
    rows = [(stage.name, *_tried(stage, given.out, deadline)) for stage in chosen]
    print(f"\n{'stage':<18}{'outcome':<22}{'seconds':>8}  last line")
    for name, outcome, seconds, last in rows:
        print(f"{name:<18}{outcome:<22}{seconds:>8.0f}  {last}")
    return max((1 for row in rows if row[1].startswith(("exit", "stopped"))), default=0)


class _Raw(argparse.RawDescriptionHelpFormatter):
    pass


def _names() -> list[str]:
    return [stage.name for stage in STAGES]


def _tried(stage: Stage, folder: Path, deadline: float) -> tuple[str, float, str]:
    """How it went: outcome, seconds, the last line it printed."""
    log, record = folder / f"{stage.name}.log", folder / f"{stage.name}.json"
    if record.is_file():
        return "done before", 0.0, json.loads(record.read_text())["last"]
    if (found := _num_gpus()) < stage.num_gpus:
        return f"needs {stage.num_gpus} GPUs, not {found}", 0.0, ""
    if deadline - time.monotonic() < stage.limit_s:
        return "no time left", 0.0, ""
    print(f"{time.strftime('%X')} {stage.name}: {' '.join(stage.command)}", flush=True)
    began = time.monotonic()
    with _looked_on(stage, folder):
        code = _run(stage, log)
    seconds = time.monotonic() - began
    lines = log.read_text(errors="replace").strip().splitlines() or [""]
    if code is None:
        return f"stopped at {stage.limit_s} s", seconds, lines[-1]
    if code:
        told = [line for line in lines if line.startswith(OUTCOME)]
        print("\n".join((told or lines)[-25:]), flush=True)
        return f"exit {code}", seconds, (told or lines)[-1]
    if PYTEST[2] in stage.command:
        # CUDA says a word about shared memory behind the last line of pytest.
        lines = [line for line in lines if " passed" in line]
        if not lines:
            return "exit 0, no test ran", seconds, ""
    beside = record.with_suffix(".partial")
    beside.write_text(json.dumps({"seconds": seconds, "last": lines[-1]}))
    beside.replace(record)
    return "passed", seconds, lines[-1]


@contextmanager
def _looked_on(stage: Stage, folder: Path) -> Generator[None]:
    """watch.py beside it, and at the end what its runs wrote down, if it has any."""
    if stage.runs is None:
        yield
        return
    command = [sys.executable, str(TESTS / "watch.py"), stage.runs]
    watch = subprocess.Popen([*command, "--out", str(folder / f"{stage.name}-watch")])
    try:
        yield
    finally:
        watch.terminate()
        watch.wait()
        with tarfile.open(folder / "records.tar.gz", "w:gz") as packed:
            for file in (f for pattern in RECORDS for f in Path(stage.runs).glob(pattern)):
                if file.name != "api-tokens.json":
                    packed.add(file, arcname=str(file.relative_to(stage.runs)))


def _run(stage: Stage, log: Path) -> int | None:
    """Its exit code; None when it was stopped at its limit, with all that it had started."""
    with log.open("wb") as sink:
        process = subprocess.Popen(
            stage.command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(stage.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def _num_gpus() -> int:
    """As many as torch can use. It is asked in a process of its own, which alone opens them."""
    program = "import torch; print(torch.cuda.device_count())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return int(told.stdout.split()[-1]) if told.returncode == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
