"""`leeway learn FILE --from ARCHIVE`: train on recorded groups, without actors.

    ARCHIVE ──> groups ──> schedules under pace and drop (trace_schedule.py) ──> the table
                                    │ the configured policy's
                                    └──> the real trainer, step by step ──> metrics.jsonl, model/

So staleness policies and objectives are compared on the very same data. Nothing is sampled but what
the held-out evaluation plays. The log-probs of the recording are those of the policies that sampled
it, and the ratios are taken against them.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from leeway.actors.config import model_dir
from leeway.actors.torch_policy import TorchPolicy
from leeway.learner.batch import build_batch
from leeway.learner.model import load_model
from leeway.learner.trainer import Trainer
from leeway.learner.world import World
from leeway.replay.archive import ArchiveReader
from leeway.replay.codec import decode
from leeway.replay.errors import ConfigurationError, DataError
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.schema import Group, PolicyVersion
from leeway.services.config import RunConfig, check_files
from leeway.services.experiments.in_process import build_worker, held_out_questions
from leeway.services.experiments.trace_report import TraceResult, show, write_page
from leeway.services.experiments.trace_schedule import (
    Outcome,
    Schedule,
    balanced_step_s,
    outcome,
    schedule,
)
from leeway.services.layout import RunDirectory
from leeway.services.learning import check_staleness

COMPARED: Final = ("pace", "drop")
"""Staleness policies that the table compares, whichever is trained under."""


def learn_from(config: RunConfig, archive: Path, out: Path, *, as_json: bool = False) -> int:
    """Train on the groups of `archive` and write `out`; returns the exit code.

    `out` is laid out as a run directory: config.toml, metrics.jsonl, model/; and trace.json,
    trace.html. Raises ConfigurationError or CodecError for an archive that cannot be read, holds
    less than one step, or does not fit the model.
    """
    check_files(config)
    groups = read_groups(archive)
    schedules, step_s = schedules_of(groups, config)
    mine = _schedule(config, archive, groups, schedules)
    run = _begin(config, out)
    result = asyncio.run(_train(config, run, groups, mine))
    outcomes = [outcome(groups, schedules[name]) for name in _policies(config)]
    result = msgspec.structs.replace(
        result, archive=archive.name, step_s=step_s, outcomes=outcomes, num_groups=len(groups)
    )
    (run.root / "trace.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    write_page(run.root / "trace.html", result)
    show(result, run.root / "trace.html", sys.stderr if as_json else sys.stdout)
    if as_json:
        print(msgspec.json.encode(result).decode(), flush=True)
    return 0


def plan_of(config: RunConfig, archive: Path, out: Path) -> tuple[int, int]:
    """Groups of the archive and the steps they make, checked as `learn_from` does; `out` is not
    made."""
    groups = read_groups(archive)
    schedules, _ = schedules_of(groups, config)
    steps = _schedule(config, archive, groups, schedules).steps
    _check_new(out)
    return len(groups), len(steps)


def _schedule(
    config: RunConfig, archive: Path, groups: list[Group], schedules: dict[str, Schedule]
) -> Schedule:
    """That of the configured policy. Raises ConfigurationError where no step comes of it."""
    mine = schedules[config.replay.staleness_policy]
    if not mine.steps:
        raise ConfigurationError(
            f"{archive} holds {len(groups)} groups, too few for one step of "
            f"replay.groups_per_step = {config.replay.groups_per_step} under replay."
            f'staleness_policy = "{config.replay.staleness_policy}"; record more, or lower it'
        )
    return mine


def _policies(config: RunConfig) -> list[str]:
    return list(dict.fromkeys([*COMPARED, config.replay.staleness_policy]))


def read_groups(archive: Path) -> list[Group]:
    """In order of arrival. Raises ConfigurationError where the file cannot be opened, CodecError
    where it is no whole archive, DataError where it is empty."""
    try:
        file = archive.open("rb")
    except OSError as error:
        raise ConfigurationError(
            f"--from {archive} cannot be read ({error.strerror}); give a file of leeway replay "
            "export or leeway rollout"
        ) from None
    with file:
        reader = ArchiveReader(file, str(archive))
        found = sorted(reader.groups(), key=lambda entry: entry.arrival)
        groups = [decode(entry.payload) for entry in found]
    if not groups:
        raise DataError(f"{archive} holds no group; export a buffer that does")
    return groups


def schedules_of(groups: list[Group], config: RunConfig) -> tuple[dict[str, Schedule], float]:
    """The recording under each policy, and the seconds of a step on its clock."""
    num_at_once = config.rollout.max_groups_in_flight * config.rollout.num_workers
    step_s = balanced_step_s(groups, config.replay.groups_per_step, num_at_once)
    found: dict[str, Schedule] = {}
    for name in _policies(config):
        found[name] = schedule(
            groups,
            config.replay,
            name,  # pyright: ignore[reportArgumentType]
            num_at_once=num_at_once,
            step_s=step_s,
            max_steps=config.learner.num_steps,
        )
    return found, step_s


def _check_new(out: Path) -> RunDirectory:
    run = RunDirectory(out.expanduser().resolve())
    if run.metrics.exists():
        raise ConfigurationError(
            f"{out} holds a run already; name another folder by --run-dir, or remove it"
        )
    return run


def _begin(config: RunConfig, out: Path) -> RunDirectory:
    """A new run directory: a step of another training would be counted to this one."""
    run = _check_new(out)
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        run.write_config(config)
    except OSError as error:
        raise ConfigurationError(
            f"--run-dir {out} cannot be written ({error.strerror}); name another folder"
        ) from None
    return run


async def _train(
    config: RunConfig, run: RunDirectory, groups: list[Group], found: Schedule
) -> TraceResult:
    torch.manual_seed(config.seed)
    model = model_dir(config.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = Trainer(load_model(model, device), config.learner, World(device=torch.device(device)))
    _check_vocabulary(groups, trainer)
    began = time.monotonic()
    before = await _score(config, model, trainer, PolicyVersion(0))
    for step in found.steps:
        check_staleness(step.lease, config.replay)
        version = step.lease.version
        metrics = await asyncio.to_thread(
            trainer.train_step, build_batch(step.lease.groups), version
        )
        line: dict[str, Any] = {"step": version + 1, "time": time.time(), "wait_s": 0.0}
        with run.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | metrics.as_dict()) + "\n")
    after = await _score(config, model, trainer, PolicyVersion(len(found.steps)))
    await asyncio.to_thread(_save, trainer, model, run.model)
    return TraceResult(
        objective=config.learner.objective,
        policy=found.policy,
        max_staleness=config.replay.max_staleness,
        score_before=before,
        score_after=after,
        wall_s=round(time.monotonic() - began, 1),
    )


def _check_vocabulary(groups: list[Group], trainer: Trainer) -> None:
    size = int(trainer.model.config.vocab_size)  # pyright: ignore
    largest = max(int(np.max(t.token_ids)) for group in groups for t in group.trajectories)
    if largest >= size:
        raise DataError(
            f"the archive holds token {largest}, and the model has {size}; name the model that it "
            "was recorded with"
        )


async def _score(
    config: RunConfig, model: Path, trainer: Trainer, version: PolicyVersion
) -> float | None:
    """Held-out exact match of the weights as they are; None where the configuration asks for none,
    or for an engine that is not of this process."""
    if config.eval.num_questions == 0 or config.policy.backend != "torch":
        return None
    policy = await TorchPolicy.start(model, config.engine, seed=config.seed, version=version)
    try:
        weights = {name: tensor.clone() for name, tensor in trainer.weights()}
        await asyncio.to_thread(policy.load, weights, version)
        worker = build_worker(config, policy, MemoryReplay(config.replay), model)
        found = await worker.evaluate(
            held_out_questions(config), max_concurrency=config.policy.max_num_seqs
        )
    finally:
        await policy.close()
    return found.scores["exact_match"]


def _save(trainer: Trainer, source: Path, target: Path) -> None:
    """A Hugging Face folder: the weights, and the tokenizer they came with."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    # In bfloat16 the model holds slices, also on one rank.
    weights = {name: tensor.to("cpu", copy=True) for name, tensor in trainer.weights()}
    model: Any = trainer.model
    model.save_pretrained(partial, state_dict=weights)
    for file in source.iterdir():
        if file.is_file() and not (partial / file.name).exists() and file.suffix != ".safetensors":
            shutil.copy(file, partial / file.name)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


__all__ = ["Outcome", "learn_from", "read_groups", "schedules_of"]
