"""The stability bed: what each objective makes of data that is exactly k versions old.

    scan      every objective at lag 0 over the same learning rates; each keeps its best
    lags      objective x lag x seed at those rates
    choices   forms of so-grpo that the sources leave open, at lag 16

An arm is one configuration, run by `in_process` in a process of its own, several beside each other.
It leaves `result.json` and `metrics.jsonl` in a folder of its name. An arm that has left a result
is not run again, so an interrupted bench goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from leeway.learner.objective.presets import PRESETS
from leeway.replay.errors import ConfigurationError
from leeway.services.bench.result import BenchResult

CONFIG: Final = Path("deploy/configs/stability.toml")
OBJECTIVES: Final = ("ppo", "grpo", "so-ppo", "so-grpo")
RATES: Final = (1e-4, 2e-4, 4e-4)
CRITIC: Final = ("learner.critic_learning_rate=3e-4",)
"""For every objective with a critic, at every rate: its own rate would else follow the policy's."""
LAGS: Final = (0, 4, 16)
SEEDS: Final = (0, 1)
SPIKE: Final = 5.0
"""A spike is a step whose gradient norm, before it is bounded, is above this many times the median
of its arm."""
COLLAPSED: Final = 0.5
"""An arm has collapsed when its final score is below this share of the score it started from."""

PENALTY: Final = ("learner.ctn=penalty", "learner.measure_ctn=true")
CHOICES: Final = {
    "turn, gradient, 4e-3": ("learner.eps_low=4e-3", "learner.eps_high=4e-3"),
    "turn, penalty, 0.2": PENALTY,
    "turn, penalty, 4e-3": (
        *PENALTY,
        "learner.eps_low=4e-3",
        "learner.eps_high=4e-3",
    ),
    "arithmetic, gradient, 0.2": ("learner.ratio=turn-arithmetic",),
    "arithmetic, gradient, 4e-3": (
        "learner.ratio=turn-arithmetic",
        "learner.eps_low=4e-3",
        "learner.eps_high=4e-3",
    ),
    "arithmetic, penalty, 0.2": ("learner.ratio=turn-arithmetic", *PENALTY),
    "arithmetic, penalty, 4e-3": (
        "learner.ratio=turn-arithmetic",
        *PENALTY,
        "learner.eps_low=4e-3",
        "learner.eps_high=4e-3",
    ),
    "turn, no ctn, 0.2": ("learner.ctn=none", "learner.measure_ctn=true"),
    "turn, raw gradient, 4e-3": (
        "learner.ctn_raw=true",
        "learner.eps_low=4e-3",
        "learner.eps_high=4e-3",
    ),
    "turn, learning rate, 4e-3": (
        "learner.ctn_target=learning-rate",
        "learner.eps_low=4e-3",
        "learner.eps_high=4e-3",
    ),
}


@dataclass(frozen=True)
class Arm:
    """One configuration to run."""

    name: str
    """Also the name of its folder."""
    group: str
    """Arms of one group differ by seed only."""
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What an arm came to."""

    arm: Arm
    failure: str | None
    """Why it did not end; None where it did. The numbers below are then 0."""
    before: float = 0.0
    """Held-out exact match, greedy."""
    after: float = 0.0
    lag: float = 0.0
    """Mean realised staleness over the steps behind the ramp."""
    clip_tokens: float = 0.0
    """Mean share of clipped tokens over steps."""
    clip_turns: float = 0.0
    bias_norm: float = 0.0
    """Mean ||C|| over steps."""
    max_bias_norm: float = 0.0
    num_normalized: int = 0
    """Steps that ||C|| shortened."""
    num_spikes: int = 0
    kl: float = 0.0
    """Largest KL(policy || sampler) of a step."""
    seconds: float = 0.0

    @property
    def has_collapsed(self) -> bool:
        """Below half of the score it started from."""
        return self.failure is not None or self.after < COLLAPSED * self.before


def arm(objective: str, lag: int, seed: int, rate: float, *more: str, label: str = "") -> Arm:
    """An arm of the bed; `label` names what `more` changes."""
    group = f"{label or objective}, lag {lag}, rate {rate:g}"
    name = f"{group}, seed {seed}".replace(", ", "_").replace(" ", "-")
    overrides = (
        f"learner.objective={objective}",
        f"replay.max_staleness={lag}",
        f"replay.max_groups={max(1024, 64 * (lag + 1))}",
        f"learner.learning_rate={rate}",
        f"seed={seed}",
        f"data.seed={seed}",
    )
    preset = PRESETS[objective]
    critic = CRITIC if preset.needs_critic else ()
    # What the clip removes is a column of every objective, also of those that do not use it.
    measured = () if preset.ctn == "gradient" else ("learner.measure_ctn=true",)
    return Arm(name, group, (*overrides, *critic, *measured, *more))


class Bed:
    """Runs arms, `parallel` beside each other, and remembers their outcomes on the disk."""

    def __init__(
        self, out: Path, *, parallel: int, overrides: Sequence[str] = (), config: Path = CONFIG
    ) -> None:
        self.out = out
        self._parallel = parallel
        self._overrides = tuple(overrides)
        self._config = config

    def run(self, arms: Sequence[Arm]) -> list[Outcome]:
        """In the order of `arms`."""
        self.out.mkdir(parents=True, exist_ok=True)
        asyncio.run(self._run_all([a for a in arms if not self._is_done(a)]))
        return [outcome(a, self.out / a.name) for a in arms]

    def _is_done(self, arm: Arm) -> bool:
        """Raises ConfigurationError where an arm of this name was run with other settings."""
        folder = self.out / arm.name
        if not (folder / "result.json").is_file():
            return False
        if (folder / "settings.json").read_text() != self._settings(arm):
            raise ConfigurationError(
                f"{folder} holds an arm that was run with other settings; give another --out"
            )
        return True

    def _settings(self, arm: Arm) -> str:
        """All that an arm's result depends on, beside the code."""
        config = self._config.read_text() if self._config.is_file() else ""
        return json.dumps({"overrides": [*arm.overrides, *self._overrides], "config": config})

    async def _run_all(self, arms: Sequence[Arm]) -> None:
        places = asyncio.Semaphore(self._parallel)

        async def run_one(number: int, arm: Arm) -> None:
            async with places:
                print(f"{number} of {len(arms)}: {arm.name}", file=sys.stderr, flush=True)
                await self._run_one(arm)

        async with asyncio.TaskGroup() as group:
            for number, one in enumerate(arms, 1):
                group.create_task(run_one(number, one))

    async def _run_one(self, arm: Arm) -> None:
        folder = self.out / arm.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        (folder / "settings.json").write_text(self._settings(arm))
        command = [sys.executable, "-m", "leeway.services.experiments.in_process"]
        command += [str(self._config), "--out", str(folder)]
        for override in (*arm.overrides, *self._overrides):
            command += ["--set", override]
        threads = max(1, len(os.sched_getaffinity(0)) // self._parallel)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        with (folder / "log.txt").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=log, stderr=log, env=environment
            )
            try:
                code = await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
            if code < 0:
                # The arm could not say so itself; out of memory, the kernel sends signal 9.
                log.write(f"\nit was ended by signal {-code}\n".encode())


def outcome(arm: Arm, folder: Path) -> Outcome:
    """Read what an arm left."""
    result = folder / "result.json"
    if not result.is_file():
        return Outcome(arm, _last_line(folder / "log.txt"))
    scores: dict[str, Any] = json.loads(result.read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    norms = [step["grad_norm"] for step in steps]
    lag = int(max(step["staleness_max"] for step in steps))
    return Outcome(
        arm,
        None,
        before=scores["before"]["exact_match"],
        after=scores["after"]["exact_match"],
        lag=fmean(step["staleness_mean"] for step in steps[min(lag, len(steps) - 1) :]),
        clip_tokens=fmean(step["clip_fraction_tokens"] for step in steps),
        clip_turns=fmean(step["clip_fraction_turns"] for step in steps),
        bias_norm=fmean(step["ctn_norm"] for step in steps),
        max_bias_norm=max(step["ctn_norm"] for step in steps),
        num_normalized=sum(step["ctn_divisor"] != 1 for step in steps),
        num_spikes=sum(norm > SPIKE * median(norms) for norm in norms),
        kl=max(step["kl_behaviour"] for step in steps),
        seconds=scores["wall_s"],
    )


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1] if lines else "it left no log"


def scan(bed: Bed) -> tuple[dict[str, float], list[Outcome]]:
    """The best rate of each objective at lag 0, seed 0: highest final score, the smaller rate of
    equals."""
    arms = [arm(name, 0, 0, rate) for name in OBJECTIVES for rate in RATES]
    found = bed.run(arms)
    best: dict[str, float] = {}
    for row, name in enumerate(OBJECTIVES):
        of_name = found[row * len(RATES) : (row + 1) * len(RATES)]
        scores = [-1.0 if o.failure else o.after for o in of_name]
        best[name] = RATES[scores.index(max(scores))]
    return best, found


def lags(bed: Bed, rates: dict[str, float]) -> list[Outcome]:
    """Objective x lag x seed."""
    return bed.run(
        [arm(name, lag, seed, rates[name]) for name in OBJECTIVES for lag in LAGS for seed in SEEDS]
    )


def choices(bed: Bed, rates: dict[str, float]) -> list[Outcome]:
    """The open choices of so-grpo, at its rate and the largest lag."""
    return bed.run(
        [
            arm("so-grpo", LAGS[-1], seed, rates["so-grpo"], *more, label=f"so-grpo {label}")
            for label, more in CHOICES.items()
            for seed in SEEDS
        ]
    )


COLUMNS: Final = (
    "arms",
    "before",
    "held-out exact match, by seed",
    "mean",
    "realised lag",
    "clip tokens",
    "clip turns",
    "mean ||C||",
    "max ||C||",
    "steps shortened",
    "spikes",
    "max KL",
)


def rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, ...]]:
    """One per group of seeds."""
    groups: dict[str, list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault(one.arm.group, []).append(one)
    for name, members in groups.items():
        ended = [m for m in members if m.failure is None]
        scores = " ".join("failed" if m.failure else f"{m.after:.3f}" for m in members)
        if not ended:
            yield (name, "", scores, *[""] * 8, (members[0].failure or "")[:60])
            continue
        yield (
            name,
            f"{fmean(m.before for m in ended):.3f}",
            scores,
            f"{fmean(m.after for m in ended):.3f}",
            f"{fmean(m.lag for m in ended):.2f}",
            f"{fmean(m.clip_tokens for m in ended):.2%}",
            f"{fmean(m.clip_turns for m in ended):.2%}",
            f"{fmean(m.bias_norm for m in ended):.3g}",
            f"{max(m.max_bias_norm for m in ended):.3g}",
            f"{fmean(m.num_normalized for m in ended):g}",
            f"{fmean(m.num_spikes for m in ended):g}",
            f"{max(m.kl for m in ended):.3g}",
        )


QUICK: Final = (
    "learner.num_steps=2",
    "replay.groups_per_step=2",
    "rollout.group_size=4",
    "rollout.max_groups_in_flight=8",
    "policy.max_num_seqs=32",
    "eval.num_questions=8",
)


def run(
    *,
    quick: bool,
    out: Path | None = None,
    parallel: int = 1,
    part: str = "all",
    overrides: Sequence[str] = (),
) -> BenchResult:
    """`part` is scan, lags, choices or all; lags and choices read the rates of the scan before."""
    out = Path("runs/stability") if out is None else out
    if quick:
        shutil.rmtree(out / "quick", ignore_errors=True)
        bed = Bed(out / "quick", parallel=2, overrides=(*QUICK, *overrides))
        found = bed.run([arm(name, 1, 0, 1e-4) for name in ("grpo", "so-ppo")])
        return _result(found, {})
    bed = Bed(out, parallel=parallel, overrides=overrides)
    rates, found = scan(bed)
    if part in ("lags", "all"):
        found = found + lags(bed, rates)
    if part in ("choices", "all"):
        found = found + choices(bed, rates)
    return _result(found, rates)


def _result(found: Sequence[Outcome], rates: dict[str, float]) -> BenchResult:
    # The lag-0 arms of the scan are also those of the lags.
    found = list({one.arm.name: one for one in found}.values())
    keys: dict[str, float | int | str] = {
        "num_arms": len(found),
        "num_failed": sum(o.failure is not None for o in found),
        "num_collapsed": sum(o.has_collapsed for o in found),
        "arm_seconds": round(sum(o.seconds for o in found), 1),
    }
    keys |= {f"learning_rate/{name}": rate for name, rate in rates.items()}
    for one in found:
        keys[f"exact_match/{one.arm.name}"] = round(one.after, 4)
    return BenchResult("stability", COLUMNS, tuple(rows(found)), keys)
