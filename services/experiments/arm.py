"""One arm of a sweep, in a process of its own.

    python -m leeway.services.experiments.arm FOLDER [--base FILE] [--gpu-share 0.125]
                                                     [--keep-every-s 60]
                                                     [--micro-batch-tokens 16384]

FOLDER holds arm.json. It receives metrics.jsonl and evaluations.jsonl as they come, and result.json
at the end, also when the arm failed by an error of its own. An arm that was killed leaves none, and
goes on from its checkpoint when it is started again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from leeway.services.config import RunConfig, load
from leeway.services.experiments.arm_result import (
    ARM,
    EVALUATIONS,
    METRICS,
    ArmResult,
    ArmSpec,
    curves_of,
    drop_checkpoint,
    read_lines,
    write_result,
)
from leeway.services.experiments.collapse import CollapseRule, Evaluated, collapse_step
from leeway.services.experiments.sweep_arms import MICRO

CONTEXT_BYTES: Final = 600 * 2**20
"""What the driver keeps for a process beside what torch allocates: its context and kernels."""


def main() -> None:
    """Exit code 0 when the arm has left a result of any kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", type=Path)
    parser.add_argument("--gpu-share", type=float, default=0.0)
    parser.add_argument("--keep-every-s", type=float)
    parser.add_argument("--micro-batch-tokens", type=int)
    options = parser.parse_args()
    spec = msgspec.json.decode((options.folder / ARM).read_bytes(), type=ArmSpec)
    config: RunConfig | None = None
    began = time.monotonic()
    try:
        overrides = list(spec.overrides)
        if options.micro_batch_tokens is not None:
            overrides.append(f"{MICRO}={options.micro_batch_tokens}")
        config = load(options.base, overrides)
        bound_memory(options.gpu_share)
        result = asyncio.run(_play(spec, config, options.folder, options.keep_every_s))
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        result = _result(spec, config, options.folder, wall_s=time.monotonic() - began)
        result = msgspec.structs.replace(result, status="failed", reason=reason)
    write_result(options.folder, result)
    drop_checkpoint(options.folder)
    sys.stdout.flush()


def memory_fraction(share: float, total_bytes: int) -> float:
    """What torch may allocate of a GPU on which an arm has `share`, less the driver's part.

    An eighth of 80 GiB is 10 GiB; without 600 MiB that is 0.118 of it.
    """
    return max(0.01, share - CONTEXT_BYTES / total_bytes)


def bound_memory(share: float) -> None:
    """Arms beside each other on a GPU: one that wants too much fails by itself, with a sentence,
    instead of taking the memory of the others. A whole GPU, or none, is not bounded."""
    if 0 < share < 1 and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(memory_fraction(share, total))


async def _play(
    spec: ArmSpec, config: RunConfig, folder: Path, keep_every_s: float | None
) -> ArmResult:
    rule = CollapseRule.model_validate(spec.collapse)
    if spec.loop == "train":
        from leeway.services.experiments.train_arm import train

        return await train(spec, config, folder)
    from leeway.services.experiments.in_process import run

    ended = await run(config, folder, rule, keep_every_s)
    result = _result(spec, config, folder, wall_s=ended.wall_s)
    return msgspec.structs.replace(result, is_stopped_early=ended.is_stopped_early)


def _result(spec: ArmSpec, config: RunConfig | None, folder: Path, *, wall_s: float) -> ArmResult:
    """From what the run has written so far."""
    evaluations = [msgspec.convert(line, Evaluated) for line in read_lines(folder / EVALUATIONS)]
    return result_of(spec, config, evaluations, read_lines(folder / METRICS), wall_s)


def result_of(
    spec: ArmSpec,
    config: RunConfig | None,
    evaluations: list[Evaluated],
    lines: list[dict[str, Any]],
    wall_s: float,
) -> ArmResult:
    """The result of a run that ended by itself; the rule says whether it collapsed."""
    rule = CollapseRule.model_validate(spec.collapse)
    step = collapse_step(evaluations, rule, is_over=True)
    return ArmResult(
        spec=spec,
        status="finished" if step is None else "collapsed",
        learning_rate=config.learner.learning_rate if config else None,
        num_steps=config.learner.num_steps if config else 0,
        micro_batch_tokens=config.learner.micro_batch_tokens if config else None,
        evaluations=evaluations,
        curves=curves_of(lines),
        collapse_step=step,
        wall_s=round(wall_s, 1),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    )


if __name__ == "__main__":
    main()
