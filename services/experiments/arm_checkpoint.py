"""Where an arm in one process stands between two steps, so that it goes on there.

    arms/NAME/checkpoint/
        step-00000012/            weights, optimizers, critic: learner/checkpoint.py
        rest-00000012.msgpack     all else: the buffer, the questions, the sampler

The rest is written first, so that a checkpoint which is there has one. The folder goes away with
the arm's end: it is some hundred times the size of a result.

Under `exact` an arm that goes on trains on the same groups as one that never stopped. Under `bound`
what was in play is lost, and its questions with it; the next ones are played.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Final

import msgspec
import torch

from leeway.actors.search.questions import StreamState
from leeway.learner.checkpoint import Checkpoints, latest
from leeway.learner.errors import CheckpointError
from leeway.learner.trainer import Trainer
from leeway.learner.world import World
from leeway.replay.memory_buffer import BufferState
from leeway.services.experiments.arm_result import CHECKPOINT, drop_checkpoint

_REST: Final = "rest-"


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """What the learner's checkpoint does not hold."""

    elapsed_s: float
    """Seconds that the arm has run."""
    buffer: BufferState
    questions: StreamState
    sampler: bytes
    """State of the policy's random generator."""


class Standing(msgspec.Struct, frozen=True):
    """An arm that may go on."""

    model: Path
    """Folder of the learner's checkpoint."""
    version: int
    """Steps it has done."""
    rest: Rest


class ArmCheckpoints:
    """Writes those of one arm, the newest at most `every_s` seconds and a step ago."""

    def __init__(self, folder: Path, model: Path, world: World, every_s: float) -> None:
        """`folder` is the arm's; `model` is where the tokenizer is copied from."""
        self._folder = folder / CHECKPOINT
        self._folder.mkdir(exist_ok=True)
        self._every_s = every_s
        self._saved_at = time.monotonic()
        self._checkpoints = Checkpoints(self._folder, model, world)

    def is_due(self) -> bool:
        """Whether the last is older than `every_s`."""
        return time.monotonic() - self._saved_at >= self._every_s

    def save(self, trainer: Trainer, version: int, rest: bytes) -> None:
        """Copy everything; weights go to the disk in the background. `rest` is a Rest as msgpack.
        Raises CheckpointError."""
        self._checkpoints.wait()
        self._prune()
        _write(self._folder / f"{_REST}{version:08d}.msgpack", rest)
        self._checkpoints.save(trainer, version)
        self._saved_at = time.monotonic()

    def close(self) -> None:
        """Wait for the last one."""
        self._checkpoints.close()

    def _prune(self) -> None:
        """The rests of checkpoints that are gone."""
        for file in self._folder.glob(f"{_REST}*.msgpack"):
            number = file.stem.removeprefix(_REST)
            if not (self._folder / f"step-{number}").is_dir():
                file.unlink()


def standing(folder: Path) -> Standing | None:
    """Where the arm in `folder` may go on; None where it begins. Removes what was cut in writing.

    Raises CheckpointError for a checkpoint that cannot be read.
    """
    root = folder / CHECKPOINT
    found = latest(root)
    if found is None:
        drop_checkpoint(folder)
        return None
    file = root / f"{_REST}{found.version:08d}.msgpack"
    for path in root.iterdir():
        if path not in (found.path, file):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    try:
        rest = msgspec.msgpack.decode(file.read_bytes(), type=Rest)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            f"{file} cannot be gone on from ({error}); run the sweep with --retry-failed, and the "
            "arm begins anew"
        ) from None
    return Standing(found.path, found.version, rest)


def generator_state(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def set_generator(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _write(file: Path, content: bytes) -> None:
    partial = file.with_suffix(".partial")
    with partial.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    partial.rename(file)
