"""Checkpoints: a Hugging Face model directory plus what training needs to go on exactly.

    DIR/step-00000012/
        model.safetensors, config.json, tokenizer files   any tool can load it
        training.json                                     version, score, random generators
        training/shard-*.safetensors                      optimizer state and the critic

Each rank writes its slices of the latter (torch.distributed.checkpoint), and a run that goes on
with another number of ranks reads them anew. Writing goes on in the background while the learner
trains; `save` only copies. A directory appears under its name when all of it, of all ranks, is on
the disk. Nothing is pickled. The ranks must share the disk.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from leeway.learner.errors import CheckpointError
from leeway.learner.sharding import full_weights
from leeway.learner.trainer import Trainer
from leeway.learner.world import World

# It is one process on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

NUM_KEPT: Final = 2
"""The newest, besides the best."""
_RECORD: Final = "training.json"
_SLICES: Final = "training"
"""A folder of its own: engines take all safetensors files beside config.json for the policy."""
_PREFIX: Final = "step-"
_TEMPORARY: Final = ".writing-"
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
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
    score: float | None
    """What `save` was told of the policy; higher is better. None: nothing."""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """training.json."""

    version: int
    score: float | None
    optimizer_steps: dict[str, int]
    """By part (policy, critic): steps its optimizer has made. A part without any has no state."""
    rng: bytes
    rng_cuda: list[bytes]
    extra: dict[str, float | int | str]


@dataclass(frozen=True)
class Restored:
    """What `restore` found beside weights and optimizers."""

    version: int
    extra: Mapping[str, Any]
    """The caller's plain values, such as the data position."""


class Checkpoints:
    """Writes those of one run. Every rank makes the same calls in the same order."""

    def __init__(self, directory: Path, source_model: Path, world: World) -> None:
        """`source_model` is where the tokenizer files are copied from."""
        self._directory = directory
        self._source_model = source_model
        self._world = world
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            # On the CPU, and of its own: messages would else mix with those of the step under way.
            timeout = timedelta(seconds=world.timeout_s)
            group: Any = dist.new_group(backend="gloo", timeout=timeout)
            self._group = group
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Any] | None = None
        self._deadline = 0.0

    def save(
        self,
        trainer: Trainer,
        version: int,
        extra: Mapping[str, int | float | str] | None = None,
        score: float | None = None,
    ) -> None:
        """Copy everything and return; the one before is complete by then.

        The newest two are kept, and the one with the highest `score`.
        """
        self.wait()
        is_first = self._world.rank == 0
        target = self._directory / f"{_PREFIX}{version:08d}"
        temporary = self._directory / f"{_TEMPORARY}{target.name}"
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        # Gathering is also where the other ranks wait for the folder.
        weights: dict[str, Tensor] = {}
        for name, tensor in full_weights(trainer.model):
            if is_first:
                weights[name] = tensor.to("cpu", copy=True)
        record = _record(trainer, version, dict(extra or {}), score)
        slices: Future[Any] | None = None
        state = _state(trainer)
        if state:
            response: Any = dcp.async_save(
                state,
                storage_writer=HuggingFaceStorageWriter(
                    str(temporary / _SLICES), save_distributed=True
                ),
                process_group=self._group,
                no_dist=self._world.size == 1,
            )
            slices = response
        if is_first:
            self._pending = self._thread.submit(
                self._complete, trainer.model, weights, record, slices, target, temporary
            )
        else:
            self._pending = slices
        self._deadline = time.monotonic() + self._world.timeout_s

    def is_over(self) -> bool:
        """Whether wait() returns, or raises, at once."""
        pending = self._pending
        return pending is None or pending.done() or time.monotonic() > self._deadline

    def wait(self) -> None:
        """Until the last one is complete; raises CheckpointError if it failed or takes too long."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result(max(0.0, self._deadline - time.monotonic()))
        except TimeoutError:
            raise CheckpointError(
                f"the checkpoint in {self._directory} was not written within "
                f"{self._world.timeout_s:g} s; is the disk slow, or has another rank died?"
            ) from None
        except (
            Exception,
            CheckpointException,
        ) as error:  # disks and other ranks fail with anything
            raise CheckpointError(
                f"no checkpoint could be written to {self._directory}: {error}"
            ) from error

    def close(self) -> None:
        """Wait for the last one."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=False)

    def _complete(
        self,
        model: Any,
        weights: dict[str, Tensor],
        record: _Record,
        slices: Future[Any] | None,
        target: Path,
        temporary: Path,
    ) -> None:
        """Of rank 0, in the background."""
        model.save_pretrained(temporary, state_dict=weights)
        for pattern in _TOKENIZER_FILES:
            for file in self._source_model.glob(pattern):
                shutil.copyfile(file, temporary / file.name)
        if slices is not None:
            # Done here when it is done on every rank.
            slices.result(self._world.timeout_s)
        (temporary / _RECORD).write_bytes(msgspec.json.encode(record))
        for path in temporary.rglob("*"):
            _sync(path)
        _sync(temporary)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        _sync(self._directory)
        _prune(self._directory)


def latest(directory: Path) -> Checkpoint | None:
    """The newest complete checkpoint; None when there is none."""
    finished = _finished(directory)
    return finished[-1] if finished else None


def best(directory: Path) -> Checkpoint | None:
    """The complete checkpoint with the highest score, the newest of equal ones; None when none has
    a score."""
    scored = [found for found in _finished(directory) if found.score is not None]
    return max(scored, key=lambda found: (found.score, found.version), default=None)


def restore(path: Path, trainer: Trainer) -> Restored:
    """Put optimizers, critic and random generators where they were; on every rank.

    The policy's weights are read by `load_model(path)` before the trainer is built. Raises
    CheckpointError for a damaged checkpoint, and for one without a critic where the objective
    needs one.
    """
    record = _read(path)
    if trainer.critic is not None and "critic" not in record.optimizer_steps:
        raise CheckpointError(
            f"{path} holds no critic, which the objective needs; "
            "resume with the objective of that run, or start a new run"
        )
    for part, _, optimizer in _parts(trainer):
        _make_moments(optimizer, record.optimizer_steps[part])
    state = _state(trainer)
    reader = HuggingFaceStorageReader(str(path / _SLICES))
    try:
        if state:
            dcp.load(state, storage_reader=reader, no_dist=trainer.world.size == 1)
    except (Exception, CheckpointException) as error:  # a damaged file can make it raise anything
        raise CheckpointError(f"{path} cannot be resumed from: {error}") from error
    torch.set_rng_state(_tensor(record.rng))
    if torch.cuda.is_available() and len(record.rng_cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_tensor(state) for state in record.rng_cuda])
    return Restored(record.version, record.extra)


def _parts(trainer: Trainer) -> Iterator[tuple[str, nn.Module, torch.optim.Optimizer]]:
    yield "policy", trainer.model, trainer.optimizer
    if trainer.critic is not None:
        yield "critic", trainer.critic.model, trainer.critic.optimizer


def _state(trainer: Trainer) -> dict[str, Tensor]:
    """What ranks hold in slices: moments of the optimizers, and the critic's weights. Reading into
    them changes the trainer's own."""
    state: dict[str, Tensor] = {}
    for part, module, optimizer in _parts(trainer):
        for name, parameter in module.named_parameters():
            if part == "critic":
                state[f"{part}.weight.{name}"] = parameter.detach()
            moments = optimizer.state.get(parameter, {})
            for key in _MOMENTS:
                if key in moments:
                    state[f"{part}.{key}.{name}"] = moments[key]
    return state


def _make_moments(optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """The state that AdamW has after `num_steps`, with moments of 0."""
    optimizer.state.clear()
    if num_steps == 0:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            step = torch.tensor(float(num_steps), device=parameter.device)
            moments = {key: torch.zeros_like(parameter) for key in _MOMENTS}
            optimizer.state[parameter] = {"step": step, **moments}


def _record(trainer: Trainer, version: int, extra: dict[str, Any], score: float | None) -> _Record:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return _Record(
        version=version,
        score=score,
        optimizer_steps={part: _num_steps(o) for part, _, o in _parts(trainer)},
        rng=torch.get_rng_state().numpy().tobytes(),
        rng_cuda=[state.numpy().tobytes() for state in cuda],
        extra=extra,
    )


def _num_steps(optimizer: torch.optim.Optimizer) -> int:
    return next((int(state["step"]) for state in optimizer.state.values()), 0)


def _tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _read(path: Path) -> _Record:
    try:
        return msgspec.json.decode((path / _RECORD).read_bytes(), type=_Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} cannot be resumed from: {error}") from error


def _finished(directory: Path) -> list[Checkpoint]:
    """Oldest first."""
    found: list[Checkpoint] = []
    for path in directory.glob(f"{_PREFIX}*"):
        if (path / _RECORD).is_file():
            record = _read(path)
            found.append(Checkpoint(path, record.version, record.score))
    return sorted(found, key=lambda checkpoint: checkpoint.version)


def _prune(directory: Path) -> None:
    kept = {found.path for found in _finished(directory)[-NUM_KEPT:]}
    if (top := best(directory)) is not None:
        kept.add(top.path)
    for old in _finished(directory):
        if old.path not in kept:
            shutil.rmtree(old.path)


def _sync(path: Path) -> None:
    """Without it a power cut can leave a renamed directory with empty files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
