"""The rollout worker: what it costs by itself, and how much of an engine's speed it delivers.

    overhead   CPU of a turn around an engine and a retriever that answer at once, 1,024 episodes in
               flight: rollout_overhead.py
    engine     tokens per second of the real worker on a real engine, over those of the engine alone
               with equal work: rollout_engine.py and, for vLLM's LLM.generate, rollout_offline.py

Sides take turns in every repeat, and figures are medians. The engine alone has it easy: all of its
requests of a wave come at once, and their prompts are ready. Where an engine computes on the CPU,
worker and engine share the cores, and what the worker takes the engine lacks.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Final, Literal

from leeway.replay.errors import ConfigurationError
from leeway.replay.schema import PolicyVersion
from leeway.services.bench.loop_lag import percentile_ms
from leeway.services.bench.result import BenchResult
from leeway.services.bench.rollout_engine import (
    Pass,
    RolloutSide,
    endless_model,
    in_waves,
)
from leeway.services.bench.rollout_load import NUM_TURNS, Load, Script
from leeway.services.bench.rollout_overhead import TURN_TOKENS, Overhead, measure

Backend = Literal["auto", "vllm", "torch"]

NONE: Final = "-"


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    num_windows: int
    turns_per_window: int
    load: Load
    repeats: int
    """Of every side, after one that is not counted."""


FULL: Final = Plan(num_windows=5, turns_per_window=10_000, load=Load(), repeats=3)
QUICK: Final = Plan(
    num_windows=3,
    turns_per_window=3_000,
    load=Load(
        num_in_flight=32, num_rows=16, num_episodes=32, turn_tokens=16, observation_tokens=64
    ),
    repeats=3,
)


def run(*, quick: bool, backend: Backend = "auto") -> BenchResult:
    """Both parts. `auto` takes vLLM where it is installed, unless `quick`: its start alone takes
    half a minute, twice. Raises ConfigurationError where vllm is asked for and not installed."""
    has_vllm = find_spec("vllm") is not None
    if backend == "vllm" and not has_vllm:
        raise ConfigurationError(
            "vllm is not installed here; install leeway-rl[cpu] or [gpu], or take --backend torch"
        )
    if backend == "auto":
        backend = "vllm" if has_vllm and not quick else "torch"
    return measure_all(QUICK if quick else FULL, backend)


def measure_all(plan: Plan, backend: Literal["vllm", "torch"]) -> BenchResult:
    """What `plan` says."""
    overhead = measure(num_windows=plan.num_windows, turns_per_window=plan.turns_per_window)
    with endless_model() as model, ExitStack() as stack:
        generate: Offline | None = None
        if backend == "vllm":
            from leeway.services.bench.rollout_offline import OfflineEngine

            # First, in a process of its own: it measures free memory while nothing else runs.
            generate = stack.enter_context(OfflineEngine(model, plan.load)).play
        with asyncio.Runner() as runner:
            sides = runner.run(_race(plan, model, backend, generate))
    return _result(plan, backend, overhead, sides)


Offline = Callable[[Sequence[Script]], float]
"""Seconds of LLM.generate for the turns of the scripts."""


@dataclass(frozen=True)
class Side:
    """One way to play the load, medians over the repeats."""

    name: str
    tokens_per_s: float
    cpu_ms_per_turn: float | None
    """Of the worker's process, the engine's front end included. None: it was another process."""
    lags_s: list[float]


async def _race(
    plan: Plan, model: Path, backend: Literal["vllm", "torch"], generate: Offline | None
) -> list[Side]:
    """The rollout first, then the engine asked directly, then LLM.generate where there is one."""
    policy = await _start(plan.load, model, backend)
    rollouts: list[Pass] = []
    directly: list[Pass] = []
    offline_s: list[float] = []
    try:
        rollout = RolloutSide(policy, plan.load)
        for repeat in range(plan.repeats + 1):
            played, scripts = await rollout.play()
            renamed = [script.renamed(repeat) for script in scripts]
            waited = await in_waves(policy, renamed, plan.load)
            if generate is not None:
                # It is another engine, which has seen none of these prompts.
                offline_s.append(await asyncio.to_thread(generate, scripts))
            rollouts.append(played)
            directly.append(waited)
    finally:
        await policy.close()
    sides = [
        _side(f"rollout on {backend}", rollouts[1:], plan.load),
        _side(f"{backend}, asked directly", directly[1:], plan.load),
    ]
    if offline_s:
        tokens_per_s = plan.load.num_tokens / median(offline_s[1:])
        sides.append(Side("vllm, LLM.generate", tokens_per_s, None, []))
    return sides


async def _start(load: Load, model: Path, backend: Literal["vllm", "torch"]):
    config = load.policy
    if backend == "vllm":
        from leeway.actors.vllm_policy import VllmPolicy

        return await VllmPolicy.start(model, config, seed=0, version=PolicyVersion(0))
    import torch

    from leeway.actors.torch_policy import TorchPolicy

    torch.set_num_threads(config.num_threads)
    return await TorchPolicy.start(model, config, seed=0, version=PolicyVersion(0))


def _side(name: str, passes: Sequence[Pass], load: Load) -> Side:
    num_turns = load.num_episodes * NUM_TURNS
    return Side(
        name,
        load.num_tokens / median(one.wall_s for one in passes),
        1e3 * median(one.cpu_s for one in passes) / num_turns,
        [lag_s for one in passes for lag_s in one.lags_s],
    )


def engine_ratio(sides: Sequence[Side]) -> float:
    """The rollout's tokens per second over the engine's own, by whichever way it was faster."""
    rollout, *alone = sides
    return rollout.tokens_per_s / max(side.tokens_per_s for side in alone)


def _result(plan: Plan, backend: str, overhead: Overhead, sides: Sequence[Side]) -> BenchResult:
    rollout = sides[0]
    return BenchResult(
        name="rollout",
        columns=(
            *("case", "turns/s", "tokens/s", "CPU ms/turn"),
            *("lag p99 ms", "lag max ms", "rollout over it"),
        ),
        rows=(_overhead_row(overhead), *(_row(side, rollout, plan.load) for side in sides)),
        keys={
            "turns_per_s": round(overhead.turns_per_s),
            "cpu_ms_per_turn": round(overhead.cpu_ms_per_turn, 3),
            "engine_ratio": round(engine_ratio(sides), 3),
            "engine": backend,
            "rollout_tokens_per_s": round(rollout.tokens_per_s),
            "engine_tokens_per_s": round(max(side.tokens_per_s for side in sides[1:])),
            "lag_p99_ms": round(overhead.lag_p99_ms, 2),
            "lag_max_ms": round(overhead.lag_max_ms, 2),
            "num_in_flight": overhead.num_in_flight,
            "prompt_tokens": round(overhead.prompt_tokens),
            "turn_tokens": round(overhead.turn_tokens),
            "observation_tokens": round(overhead.observation_tokens),
            "note": _note(backend),
        },
    )


def _overhead_row(overhead: Overhead) -> tuple[str, ...]:
    return (
        f"worker alone, {overhead.num_in_flight:,} in flight",
        f"{overhead.turns_per_s:,.0f}",
        f"{overhead.turns_per_s * TURN_TOKENS:,.0f}",
        f"{overhead.cpu_ms_per_turn:.3f}",
        f"{overhead.lag_p99_ms:.1f}",
        f"{overhead.lag_max_ms:.1f}",
        NONE,
    )


def _row(side: Side, rollout: Side, load: Load) -> tuple[str, ...]:
    lags = [percentile_ms(side.lags_s, share) for share in (0.99, 1.0)] if side.lags_s else []
    return (
        side.name,
        f"{side.tokens_per_s / load.turn_tokens:,.1f}",
        f"{side.tokens_per_s:,.0f}",
        NONE if side.cpu_ms_per_turn is None else f"{side.cpu_ms_per_turn:.3f}",
        *([f"{lag:.1f}" for lag in lags] or [NONE, NONE]),
        NONE if side is rollout else f"{rollout.tokens_per_s / side.tokens_per_s:.3f}",
    )


def _note(backend: str) -> str:
    cores = f"{len(os.sched_getaffinity(0))} cores"
    if backend == "torch":
        return f"the torch engine decodes on a thread of the worker's process; {cores}"
    import torch

    if torch.cuda.is_available():
        return f"the engine computes on the GPU; worker and front end on {cores}"
    return f"worker, front end and engine share {cores}"
