"""The whole loop, once in lockstep and once with rollouts and training apart, for the same work.

Two runs of `leeway train` with the same model, questions, groups and turns; only
`replay.max_staleness` differs: 0, where engine and learner take turns, and 16. In lockstep the
steps behind the first two are looked at; apart those behind the first 24, because an adaptive
lookahead begins with more groups than it needs, and the engine may rest while they are used up. The
steps from the third to the 24th have a row of their own. The time per trained token of one over
that of the other is the speed-up. Groups that lay ready before the steps that are looked at and
were used up in them do not count: a buffer that drains is no speed that lasts. The share of that
time in which the learner waited for groups is `learner_idle`, and the share in which the engine had
at least one request is `engine_busy`. Each run's directory keeps a Chrome trace (timeline.json)
that says why.

On two GPUs the learner has one and vLLM the other, with 1.3 billion random weights; on CPUs they
share the cores, with the bundled policy and the torch engine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from leeway.actors.config import model_dir
from leeway.replay.errors import ConfigurationError
from leeway.replay.lookahead import NUM_DRAWS
from leeway.services.bench.large_model import large_model
from leeway.services.bench.result import BenchResult

WARM_STEPS: Final = 2
SETTLING_STEPS: Final = 3 * NUM_DRAWS
"""Apart. A lookahead looks at NUM_DRAWS draws, lets pass the five that still draw what was admitted
before, looks at as many again, and the groups of a second cut are used up in three."""
RUN_TIMEOUT_S: Final = 900.0
LOOK_S: Final = 0.1
Half = Literal["asynchronous", "synchronous"]
STALENESS: Final[dict[Half, int]] = {"asynchronous": 16, "synchronous": 0}
"""Bounds. 16: no group is so slow that the learner waits for it; how old groups are follows from an
adaptive lookahead."""
FACTORY: Final = "leeway.services.bench.pipeline_environment:build"


@dataclass(frozen=True)
class Size:
    """How much work a step is, and how many steps are looked at."""

    num_steps: int
    """Looked at, in each run."""
    num_settling: int
    """Before those, apart."""
    groups_per_step: int
    turn_tokens: int
    observation_tokens: int
    max_num_seqs: int
    learner: dict[str, Any]


@dataclass(frozen=True)
class Course:
    """One run, its first steps left out."""

    num_tokens: int
    """Trained."""
    backlog: float
    """Share of the trained groups that lay ready when the time began and were not made up for."""
    wall_s: float
    wait_s: float
    longest_wait_s: float
    """Of one step."""
    blocked_s: float
    """Of `wait_s`, until a group was played that had to be in the step, while enough were ready."""
    train_s: float
    publish_s: float
    engine_busy: float
    reused: float
    """Share of the tokens of all prompts whose keys and values stood already. Those of another
    version are computed anew."""
    discarded: float
    """Share of the sampled tokens that were thrown away, because weights changed about a turn's
    first one."""
    staleness: float
    """Mean over the steps of the mean age of what they trained, in versions."""
    folder: Path

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens a second, those of the backlog left out."""
        return (1 - self.backlog) * self.num_tokens / self.wall_s

    @property
    def idle(self) -> float:
        """Share of the time in which the learner waited for groups."""
        return self.wait_s / self.wall_s


def run(*, quick: bool, out: Path | None = None, half: Half | None = None) -> BenchResult:
    """Both runs, one after the other, or one of them; their directories stay below `out`.

    A run that ended there in an earlier call is not played again, and one that did not end is
    played from its start: on a machine lent for minutes the two fit into two calls.

    Raises ConfigurationError for a half that nothing could be compared with later.
    """
    if half is not None and out is None:
        raise ConfigurationError(
            "--half plays one of two runs; give both the same --out FOLDER, where they are compared"
        )
    is_cuda = torch.cuda.device_count() > 1
    size = _size(quick, is_cuda)
    folder = out or Path(tempfile.mkdtemp(prefix="leeway-pipeline-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = _model(folder, is_cuda)
    names = tuple(STALENESS) if half is None else (half,)
    # Two engines at a time would not fit into one GPU.
    runs = _play_all(folder, names, model, size, is_cuda, overlaps=quick and not is_cuda)
    courses = {name: course_of(runs[name], _num_before(name, size)) for name in names}
    rows = [_row(name, course) for name, course in courses.items()]
    keys: dict[str, float | int | str] = {}
    if "asynchronous" in runs:
        settling = course_of(runs["asynchronous"], WARM_STEPS, size.num_settling)
        rows.insert(
            0, _row(f"asynchronous, steps {WARM_STEPS + 1} to {size.num_settling}", settling)
        )
        keys |= {
            "settling_learner_idle": settling.idle,
            "settling_engine_busy": settling.engine_busy,
        }
    columns = (
        "run",
        "tokens/s",
        "backlog",
        "waiting",
        "longest",
        "for one that is due",
        "training",
        "publishing",
        "engine busy",
        "prompts reused",
        "thrown away",
        "staleness",
        "timeline",
    )
    if half is not None:
        keys = {"half": half, **_keys(courses[half]), **keys}
        return BenchResult("pipeline", columns, tuple(rows), keys)
    apart, lockstep = courses["asynchronous"], courses["synchronous"]
    return BenchResult(
        "pipeline",
        columns,
        tuple(rows),
        {
            "speedup": apart.tokens_per_s / lockstep.tokens_per_s,
            **_keys(apart),
            **keys,
            "synchronous_learner_idle": lockstep.idle,
            "synchronous_engine_busy": lockstep.engine_busy,
            "synchronous_prompts_reused": lockstep.reused,
        },
    )


def _keys(course: Course) -> dict[str, float | int | str]:
    return {
        "learner_idle": course.idle,
        "longest_wait_s": course.longest_wait_s,
        "learner_blocked": course.blocked_s / course.wall_s,
        "engine_busy": course.engine_busy,
        "prompts_reused": course.reused,
        "discarded": course.discarded,
        "tokens_per_s": course.tokens_per_s,
        "backlog": course.backlog,
        "staleness": course.staleness,
    }


def _size(quick: bool, is_cuda: bool) -> Size:
    if is_cuda:
        # The rate at which models of this size are trained: at the default, for small ones, half of
        # all turns would be clipped four versions on, and only the loop apart would pay for that.
        learner = {"micro_batch_tokens": 16384, "precision": "bfloat16", "learning_rate": 1e-6}
        steps = (4, 6) if quick else (16, SETTLING_STEPS)
        return Size(*steps, 16, 200, 400, 512, learner)
    learner = {"micro_batch_tokens": 2048, "num_threads": 1}
    if quick:
        return Size(2, 3, 2, 8, 16, 16, learner)
    return Size(12, SETTLING_STEPS, 4, 24, 192, 32, learner)


def _num_before(half: Half, size: Size) -> int:
    """Steps before those that are looked at."""
    return WARM_STEPS if half == "synchronous" else size.num_settling


def _model(folder: Path, is_cuda: bool) -> Path:
    bundled, made = model_dir("bundled"), folder / "model"
    if not is_cuda:
        return bundled
    return made if made.is_dir() else large_model(bundled, folder)


def _play_all(
    folder: Path, names: Sequence[Half], model: Path, size: Size, is_cuda: bool, *, overlaps: bool
) -> dict[Half, Path]:
    """The directory of each run, one after the other.

    Overlapping, a run begins as soon as the steps of the one before are trained: the end of that
    one and the beginning of this are not looked at, and are most of what a short run takes.
    """
    playing: dict[Half, Future[Path]] = {}
    with ThreadPoolExecutor() as pool:
        for name in names:
            for before, run in playing.items():
                if overlaps:
                    _until_trained(folder / before, run, _num_before(before, size) + size.num_steps)
                else:
                    run.result()
            playing[name] = pool.submit(_play, folder / name, name, model, size, is_cuda)
    return {name: run.result() for name, run in playing.items()}


def _until_trained(folder: Path, run: Future[Path], num_steps: int) -> None:
    """Until a run below `folder` has written down so many steps. Raises what ended it before."""
    while not run.done():
        for metrics in folder.glob("runs/*/metrics.jsonl"):
            if metrics.read_bytes().count(b"\n") >= num_steps:
                return
        time.sleep(LOOK_S)
    run.result()


def _play(folder: Path, half: Half, model: Path, size: Size, is_cuda: bool) -> Path:
    """The directory of the run."""
    staleness = STALENESS[half]
    settings: dict[str, Any] = {
        "model": str(model),
        "environment.factory": FACTORY,
        "policy.backend": "vllm" if is_cuda else "torch",
        "policy.max_num_seqs": size.max_num_seqs,
        "policy.max_model_len": 2048 if is_cuda else 512,
        "policy.start_timeout_s": 600,
        "search.max_turns": 3,
        "search.max_turn_tokens": size.turn_tokens,
        "search.max_observation_tokens": size.observation_tokens,
        "rollout.group_size": 8,
        "rollout.max_groups_in_flight": min(
            size.max_num_seqs // 8, (staleness + 1) * size.groups_per_step
        ),
        "replay.groups_per_step": size.groups_per_step,
        "replay.max_staleness": staleness,
        "learner.objective": "so-grpo",
        "learner.num_steps": _num_before(half, size) + size.num_steps,
        "learner.checkpoint_every": 10_000,
        "eval.num_questions": 0,
        **{f"learner.{name}": value for name, value in size.learner.items()},
    }
    overrides = [part for k, v in settings.items() for part in ("--set", f"{k}={v}")]
    for directory in (folder / "runs").glob("*"):
        if (directory / "summary.json").is_file():
            return directory
    shutil.rmtree(folder, ignore_errors=True)  # what is left of a call that was cut
    folder.mkdir()
    command = [sys.executable, "-m", "leeway.services.cli", "train", *overrides]
    log = folder / "bench.log"
    with log.open("wb") as sink:
        ended = subprocess.run(
            command, cwd=folder, stdout=sink, stderr=sink, timeout=RUN_TIMEOUT_S, env=os.environ
        )
    if ended.returncode != 0:
        raise RuntimeError(f"leeway train ended with {ended.returncode}; its log is {log}")
    [directory] = (folder / "runs").iterdir()
    return directory


def course_of(directory: Path, first: int, last: int | None = None) -> Course:
    """From a run's metrics.jsonl, from the end of step `first` to that of step `last` or the
    last.

    An engine tells its totals once a second. Where it told none anew in that time, which a short
    step may be over in, its share is that since its start.
    """
    text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    start, rest = lines[first - 1], lines[first:last]

    def total(name: str) -> float:
        return sum(line[name] for line in rest)

    def grown(name: str) -> float:
        return rest[-1][name] - start[name]

    discarded = grown("engine_discarded_tokens")
    up_s = grown("engine_up_s")
    busy_s = grown("engine_busy_s") if up_s else rest[-1]["engine_busy_s"]
    return Course(
        num_tokens=int(total("num_tokens_trained")),
        backlog=max(0, start["num_ready"] - rest[-1]["num_ready"]) / total("num_groups"),
        wall_s=rest[-1]["time"] - start["time"],
        wait_s=total("wait_s"),
        longest_wait_s=max(line["wait_s"] for line in rest),
        blocked_s=sum(line.get("wait_s/blocked", 0.0) for line in rest),
        train_s=total("seconds"),
        publish_s=total("publish_s") + total("confirm_s"),
        engine_busy=busy_s / (up_s or rest[-1]["engine_up_s"]),
        reused=grown("engine_cached_tokens") / max(1, grown("engine_prompt_tokens")),
        discarded=discarded / max(1, discarded + grown("engine_tokens")),
        staleness=total("staleness_mean") / len(rest),
        folder=directory,
    )


def _row(name: str, course: Course) -> tuple[str, ...]:
    shares = (course.blocked_s, course.train_s, course.publish_s)
    return (
        name,
        f"{course.tokens_per_s:.0f}",
        f"{100 * course.backlog:.1f} %",
        f"{100 * course.idle:.1f} %",
        f"{course.longest_wait_s:.1f} s",
        *(f"{100 * share / course.wall_s:.1f} %" for share in shares),
        f"{100 * course.engine_busy:.1f} %",
        f"{100 * course.reused:.1f} %",
        f"{100 * course.discarded:.1f} %",
        f"{course.staleness:.2f}",
        str(course.folder / "timeline.json"),
    )
