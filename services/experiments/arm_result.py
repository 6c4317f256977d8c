"""What an arm of a sweep leaves: one small file, from which every report is made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from leeway.replay.errors import DataError
from leeway.services.experiments.collapse import Evaluated

RESULT: Final = "result.json"
ARM: Final = "arm.json"
METRICS: Final = "metrics.jsonl"
EVALUATIONS: Final = "evaluations.jsonl"
CHECKPOINT: Final = "checkpoint"
"""Folder from which an arm in one process goes on; arm_checkpoint.py."""

CURVES: Final = (
    "step",
    "wall_s",
    "staleness_mean",
    "staleness_max",
    "reward_mean",
    "score/exact_match",
    "clip_fraction_tokens",
    "clip_fraction_turns",
    "ctn_norm",
    "ctn_divisor",
    "grad_norm",
    "effective_sample_size",
    "kl_behaviour",
    "entropy",
    "score/think_tokens",
    "trained_tokens_per_trajectory",
    "turns_per_trajectory",
    "num_trajectories",
)
"""Metrics of a step that are kept, under their names in metrics.jsonl."""

Status = Literal["finished", "collapsed", "failed"]


class ArmSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the arm's process is told: arm.json."""

    name: str
    objective: str
    staleness: int
    """As set."""
    seed: int
    variant: dict[str, Any]
    """Axes beside objective, staleness and seed, with their values."""
    is_scan: bool
    overrides: tuple[str, ...]
    """key=value beside the base configuration."""
    mode: Literal["exact", "bound"]
    loop: Literal["in-process", "train"]
    collapse: dict[str, Any]
    """The rule, by key."""


class ArmResult(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended: result.json."""

    spec: ArmSpec
    status: Status
    reason: str | None = None
    """Of a failed arm; one sentence."""
    learning_rate: float | None = None
    num_steps: int = 0
    """As configured."""
    micro_batch_tokens: int | None = None
    """Of the learner, by the configuration or by the sweep's resources."""
    evaluations: list[Evaluated] = []
    curves: dict[str, list[float | None]] = {}
    """By name of the metric, a value for each step done; None where the step had none."""
    collapse_step: int | None = None
    is_stopped_early: bool = False
    wall_s: float = 0.0
    device: str = ""
    """What it ran on."""


def curves_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Columns of the lines of metrics.jsonl, at six digits."""
    return {
        name: [_short(line.get(name)) for line in lines]
        for name in CURVES
        if any(name in line for line in lines)
    }


def _short(value: Any) -> float | None:
    return float(f"{value:.6g}") if isinstance(value, int | float) else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a JSON-lines file; a last one that was cut is left out."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n")[:-1] if line]


def write_result(folder: Path, result: ArmResult) -> None:
    """At once or not at all."""
    partial = folder / f".{RESULT}.partial"
    partial.write_bytes(msgspec.json.encode(result))
    partial.replace(folder / RESULT)


def read_result(folder: Path) -> ArmResult | None:
    """None if the arm has not ended. Raises DataError for a file that is no result."""
    file = folder / RESULT
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=ArmResult)
    except msgspec.DecodeError as error:
        raise DataError(
            f"{file} is not the result of an arm ({error}); remove it, and the sweep runs it again"
        ) from None


def has_checkpoint(folder: Path) -> bool:
    """Whether the arm in `folder` has something to go on from."""
    own = (folder / CHECKPOINT).glob("step-*")
    of_a_run = folder.glob("runs/*/checkpoints/step-*")
    return any(own) or any(of_a_run)


def drop_checkpoint(folder: Path) -> None:
    """Remove what the arm in `folder` would go on from; it is over."""
    shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
