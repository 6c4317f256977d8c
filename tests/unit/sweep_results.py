"""Results of arms as a sweep leaves them, made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leeway.services.experiments.arm_result import ArmResult, ArmSpec, write_result
from leeway.services.experiments.collapse import CollapseRule, Evaluated
from leeway.services.experiments.sweep_arms import keys_of
from leeway.services.experiments.sweep_folder import SweepFolder

RULE = CollapseRule().model_dump()


def arm(
    objective: str = "grpo",
    lag: int = 0,
    seed: int = 0,
    score: float = 0.9,
    *,
    lags: Sequence[float] | None = None,
    variant: dict[str, Any] | None = None,
    mode: Any = "exact",
    status: Any = "finished",
    reason: str | None = None,
    rate: float = 1e-4,
    is_scan: bool = False,
    curves: dict[str, list[float | None]] | None = None,
    collapse_step: int | None = None,
) -> ArmResult:
    """Four steps; behind the ramp every one is `lag` old, or as `lags` says."""
    told = {
        k: v for axis, value in (variant or {}).items() for k, v in keys_of(axis, value).items()
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in told.items()]
    ages = [float(min(step, lag)) for step in range(4)] if lags is None else list(lags)
    words = [objective, str(lag), str(seed), f"{rate:g}", *(variant or {}).values()]
    spec = ArmSpec(
        name="-".join(map(str, words)) + ("-scan" if is_scan else ""),
        objective=objective,
        staleness=lag,
        seed=seed,
        variant=variant or {},
        is_scan=is_scan,
        overrides=(*overrides, f"learner.learning_rate={rate}"),
        mode=mode,
        loop="in-process",
        collapse=RULE,
    )
    found: dict[str, list[float | None]] = {
        "step": [1.0, 2.0, 3.0, 4.0],
        "staleness_mean": list(ages),
        "staleness_max": list(ages),
        "grad_norm": [1.0, 1.0, 2.0, 9.0],
        "ctn_norm": [0.0, 2.0, 4.0, 6.0],
        "ctn_divisor": [1.0, 2.0, 4.0, 6.0],
        "clip_fraction_tokens": [0.0, 0.1, 0.1, 0.2],
        "kl_behaviour": [0.0, 0.01, 0.02, 0.03],
        "entropy": [0.5, 0.4, 0.3, 0.2],
        "score/think_tokens": [30.0, 20.0, 20.0, 10.0],
        "effective_sample_size": [1.0, 0.9, None, 0.8],
    }
    return ArmResult(
        spec=spec,
        status=status,
        reason=reason,
        learning_rate=rate,
        num_steps=4,
        evaluations=[Evaluated(0, 0.0, 0.3), Evaluated(2, 5.0, 0.6), Evaluated(4, 9.0, score)],
        curves=found | (curves or {}),
        collapse_step=collapse_step,
        wall_s=10.0,
        device="cpu",
    )


def leave(
    root: Path, results: Sequence[ArmResult], rates: dict[str, float] | None = None, **plan: Any
) -> SweepFolder:
    """The folder of a sweep with these arms ended."""
    folder = SweepFolder(root)
    grid = [{"objective": list(dict.fromkeys(r.spec.objective for r in results))}]
    asked = {
        "name": root.name,
        "mode": "exact",
        "retention": 0.95,
        "set": {"learner.num_steps": 4},
        "grid": grid,
        "scan": {"learning_rate": [5e-5, 1e-4], "seed": [0], "tolerance": 0.0} if rates else None,
        "collapse": RULE,
    }
    folder.begin(asked | plan)
    for result in results:
        place = folder.arm(result.spec.name)
        place.mkdir(parents=True)
        write_result(place, result)
    folder.write_grid({r.spec.name: r.learning_rate for r in results if not r.spec.is_scan})
    if rates:
        folder.write_rates(rates)
    return folder
