"""Checkpoints: a Hugging Face model directory plus what training needs to go on exactly.

    DIR/step-00000012/
        model.safetensors, config.json, tokenizer files   any tool can load it
        critic/model.safetensors                          where the objective trains one
        training.pt                                       optimizers, version, RNG, caller's values

A directory appears under its name only when all of it is on the disk. Nothing is pickled but
tensors and plain values; `training.pt` is read with weights_only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_model, save_model
from torch.optim import Optimizer
from transformers import PreTrainedModel

from leeway.learner.critic import Critic
from leeway.learner.errors import CheckpointError

NUM_KEPT: Final = 2
_STATE_FILE: Final = "training.pt"
_CRITIC_FILE: Final = "critic/model.safetensors"
"""In a folder of its own: engines take all safetensors files beside config.json for the policy."""
_PREFIX: Final = "step-"
_TEMPORARY: Final = ".writing-"
_TOKENIZER_FILES: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "*.model",
)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on the disk."""

    path: Path
    version: int


@dataclass(frozen=True)
class Restored:
    """What `restore` found beside the weights and the optimizer."""

    version: int
    extra: Mapping[str, Any]
    """The caller's plain values, such as the data position."""


def save(
    directory: Path,
    model: PreTrainedModel,
    optimizer: Optimizer,
    version: int,
    source_model: Path,
    extra: Mapping[str, int | float | str] | None = None,
    critic: Critic | None = None,
) -> Checkpoint:
    """Write the checkpoint of `version`; keep the newest two.

    `source_model` is where the tokenizer files are copied from. Call it on one rank only.
    """
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"{_PREFIX}{version:08d}"
    temporary = directory / f"{_TEMPORARY}{target.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    for pattern in _TOKENIZER_FILES:
        for file in source_model.glob(pattern):
            shutil.copyfile(file, temporary / file.name)
    state = _state(optimizer, version, dict(extra or {}))
    if critic is not None:
        (temporary / _CRITIC_FILE).parent.mkdir()
        save_model(critic.model, str(temporary / _CRITIC_FILE))
        state["critic_optimizer"] = critic.optimizer.state_dict()
    torch.save(state, temporary / _STATE_FILE)
    for path in temporary.rglob("*"):
        _sync(path)
    _sync(temporary)
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)
    _sync(directory)
    for old in _finished(directory)[:-NUM_KEPT]:
        shutil.rmtree(old.path)
    return Checkpoint(target, version)


def latest(directory: Path) -> Checkpoint | None:
    """The newest complete checkpoint; None when there is none."""
    finished = _finished(directory)
    return finished[-1] if finished else None


def restore(path: Path, optimizer: Optimizer, critic: Critic | None = None) -> Restored:
    """Put the optimizer, the critic and the random generators where they were.

    The policy's weights are read by `load_model(path)` before the optimizer is built. Raises
    CheckpointError for a damaged file, and for one without a critic where the objective needs one.
    """
    try:
        state = torch.load(path / _STATE_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can make torch.load raise anything
        raise CheckpointError(f"{path} cannot be resumed from: {error}") from error
    optimizer.load_state_dict(state["optimizer"])
    if critic is not None:
        _restore_critic(path, critic, state)
    torch.set_rng_state(state["rng"])
    if torch.cuda.is_available() and state["rng_cuda"]:
        torch.cuda.set_rng_state_all(state["rng_cuda"])
    return Restored(state["version"], state["extra"])


def _restore_critic(path: Path, critic: Critic, state: Mapping[str, Any]) -> None:
    file = path / _CRITIC_FILE
    if "critic_optimizer" not in state or not file.is_file():
        raise CheckpointError(
            f"{path} holds no critic, which the objective needs; "
            "resume with the objective of that run, or start a new run"
        )
    try:
        load_model(critic.model, str(file))
    except Exception as error:  # a damaged file can make safetensors raise anything
        raise CheckpointError(f"{file} cannot be resumed from: {error}") from error
    critic.optimizer.load_state_dict(state["critic_optimizer"])


def _state(optimizer: Optimizer, version: int, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": version,
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "rng_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "extra": extra,
    }


def _finished(directory: Path) -> list[Checkpoint]:
    """Oldest first."""
    paths = [p for p in directory.glob(f"{_PREFIX}*") if (p / _STATE_FILE).is_file()]
    found = [Checkpoint(p, int(p.name.removeprefix(_PREFIX))) for p in paths]
    return sorted(found, key=lambda checkpoint: checkpoint.version)


def _sync(path: Path) -> None:
    """Without it a power cut can leave a renamed directory with empty files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
