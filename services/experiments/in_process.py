"""The whole loop in one process: memory store, torch policy, local retriever, the real learner.

For experiments on a GPU (seconds a step) and for tests: everything but Redis, Ray and vLLM is the
code of a run, and staleness is admitted, bounded and asserted alike. Training and decoding share
the device, so speed says nothing about a run. An arm of a sweep is one such run (arm.py).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from leeway.actors.config import held_out_file, model_dir
from leeway.actors.counters import Counters
from leeway.actors.environment import Question
from leeway.actors.environment_factory import build_environment
from leeway.actors.rollout import Limits
from leeway.actors.search.index_source import index_of
from leeway.actors.search.measured_retriever import MeasuredRetriever
from leeway.actors.search.questions import QuestionStream, load_questions, load_sources
from leeway.actors.search.retriever import LocalRetriever
from leeway.actors.tokens import Tokens
from leeway.actors.torch_policy import TorchPolicy
from leeway.actors.traced_policy import TracedPolicy
from leeway.actors.worker import RolloutWorker
from leeway.learner import loop
from leeway.learner.batch import build_batch
from leeway.learner.checkpoint import restore
from leeway.learner.errors import LearnerStopped
from leeway.learner.metrics import StepMetrics
from leeway.learner.model import load_model
from leeway.learner.trainer import Trainer
from leeway.learner.weights.publisher import Published
from leeway.learner.world import World
from leeway.replay import tracing
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Lease, Replay
from leeway.replay.traced_replay import traced
from leeway.services.config import RunConfig
from leeway.services.experiments.arm_checkpoint import (
    ArmCheckpoints,
    Rest,
    Standing,
    generator_state,
    set_generator,
    standing,
)
from leeway.services.experiments.arm_result import EVALUATIONS, METRICS, read_lines
from leeway.services.experiments.collapse import CollapseRule, Evaluated, collapse_step
from leeway.services.experiments.sweep_folder import replace_text
from leeway.services.learning import check_staleness

HELD_OUT_SEED = 0
"""Of the choice of held-out questions: the same ones whatever the seed of the run."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    evaluations: list[Evaluated]
    """Before training, every eval.every_steps, and after the last step."""
    is_stopped_early: bool
    """It had collapsed, and the rule says to end such a run."""
    wall_s: float
    """From the first evaluation to the last."""


class Parts(NamedTuple):
    """What a run in one process is made of."""

    policy: TorchPolicy
    trainer: Trainer
    replay: MemoryReplay
    worker: RolloutWorker
    held_out: Sequence[Question]


class InProcess:
    """Implements loop.Learning: publishing is a copy into the policy beside it."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        out: Path,
        *,
        kept: ArmCheckpoints | None = None,
        rule: CollapseRule | None = None,
    ) -> None:
        """`kept` writes the checkpoints, None: there are none. `rule` ends a run that has
        collapsed; None ends none."""
        self._config = config
        self._parts = parts
        self._kept = kept
        self._metrics: StepMetrics | None = None
        # One thread for every step: the allocator keeps what a thread has freed for that thread,
        # so that steps on the loop's own pool would keep the memory of several.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leeway-learn")
        self._out = out
        self._rule = rule
        self._began = time.monotonic()
        self._is_resting = False
        """Nothing may be admitted until `look_around`."""
        self._is_keeping = False
        """A checkpoint is written after this step."""
        self.evaluations: list[Evaluated] = []
        self.is_stopped_early = False
        self.version = PolicyVersion(0)
        self.num_steps = config.learner.num_steps
        self.draw_timeout_s = config.learner.draw_timeout_s

    def go_on(self, found: Standing, evaluations: Sequence[Evaluated]) -> None:
        """From a checkpoint, and the evaluations before it."""
        self.version = PolicyVersion(found.version)
        self.evaluations = list(evaluations)
        self._began = time.monotonic() - found.rest.elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Seconds of this run, in all calls."""
        return time.monotonic() - self._began

    async def stop_requested(self) -> bool:
        return self.is_stopped_early

    async def answer_requests(self) -> None:
        """Nobody is there to ask."""

    async def is_paused(self) -> bool:
        return False

    async def is_drained(self) -> bool:
        return False

    async def train(self, lease: Lease) -> None:
        check_staleness(lease, self._config.replay)
        batch = build_batch(lease.groups)
        with tracing.training([group.group_id for group in lease.groups], self.version):
            self._metrics = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._parts.trainer.train_step, batch, self.version
            )
        self.version = PolicyVersion(self.version + 1)

    async def publish(self) -> None:
        weights = {name: tensor.clone() for name, tensor in self._parts.trainer.weights()}
        await asyncio.to_thread(self._parts.policy.load, weights, self.version)
        is_last = self.version >= self.num_steps
        self._is_keeping = self._kept is not None and self._kept.is_due() and not is_last
        rests = self._is_keeping or is_last or self._is_evaluation_due()
        if rests and self._config.replay.staleness_policy == "exact":
            # Nothing is in play now, and nothing begins before `look_around`: what is evaluated and
            # kept does not depend on how far the next rollouts have come.
            self._is_resting = True
            await self._parts.replay.pause_admission(True)

    async def catch_up(self) -> None:
        """The policy is never behind."""

    async def confirm(self) -> Published | None:
        return None

    async def after_step(self, wait_s: float, published: Published | None) -> None:
        assert self._metrics is not None
        line = {"step": self.version, "time": time.time(), "wait_s": wait_s}
        line["wall_s"] = self.elapsed_s
        with (self._out / METRICS).open("a") as file:
            file.write(json.dumps(line | self._metrics.as_dict()) + "\n")
        # Before the evaluation, which leaves keys and values in the engine that one which goes on
        # does not have.
        if self._is_keeping:
            await self._keep()
        await self.look_around()

    async def _keep(self) -> None:
        assert self._kept is not None
        rest = Rest(
            elapsed_s=self.elapsed_s,
            buffer=self._parts.replay.state(),
            questions=self._parts.worker.snapshot().position,
            sampler=generator_state(self._parts.policy.generator),
        )
        # Encoded here: the next step changes the groups.
        encoded = msgspec.msgpack.encode(rest)
        await asyncio.get_running_loop().run_in_executor(
            self._thread, self._kept.save, self._parts.trainer, self.version, encoded
        )

    async def look_around(self) -> None:
        """Evaluate where that is due, then let the next rollouts begin."""
        is_last = self.version >= self.num_steps
        if self._is_evaluation_due() or (self._is_resting and is_last):
            await self.evaluate()
        if self._is_resting and not is_last:
            self._is_resting = False
            await self._parts.replay.pause_admission(False)

    def _is_evaluation_due(self) -> bool:
        every = self._config.eval.every_steps
        return bool(every) and self.version > 0 and self.version % every == 0

    async def evaluate(self) -> None:
        """Score the current version, unless that is done, and see whether the run goes on."""
        if self.evaluations and self.evaluations[-1].step == self.version:
            return
        found = await self._parts.worker.evaluate(
            self._parts.held_out, max_concurrency=self._config.policy.max_num_seqs
        )
        self.evaluations.append(
            Evaluated(self.version, self.elapsed_s, found.scores["exact_match"])
        )
        with (self._out / EVALUATIONS).open("ab") as file:
            file.write(msgspec.json.encode(self.evaluations[-1]) + b"\n")
        if self._rule is not None and self._rule.stop_early:
            step = collapse_step(self.evaluations, self._rule, is_over=False)
            self.is_stopped_early = step is not None and self.version < self.num_steps


async def run(
    config: RunConfig,
    out: Path,
    rule: CollapseRule | None = None,
    keep_every_s: float | None = None,
) -> Ended:
    """Evaluate, train, evaluate; `out` receives metrics.jsonl and evaluations.jsonl.

    With `keep_every_s` a checkpoint is written after the first step that ends so many seconds after
    the last; a run that was ended goes on from there, and the checkpoint of one that is over is
    left for the caller to drop.
    """
    out.mkdir(parents=True, exist_ok=True)
    tracing.start(config.tracing, config.name, "in-process")
    torch.manual_seed(config.seed)
    found = None if keep_every_s is None else standing(out)
    evaluations = _cut_back(out, 0 if found is None else found.version)
    parts = await _build(config, found)
    kept = None
    if keep_every_s is not None:
        kept = ArmCheckpoints(out, model_dir(config.model), parts.trainer.world, keep_every_s)
    learning = InProcess(config, parts, out, kept=kept, rule=rule)
    try:
        if found is not None:
            learning.go_on(found, evaluations)
            await learning.look_around()
        else:
            await learning.evaluate()
        playing = asyncio.create_task(parts.worker.run())
        await _until_done(loop.run(learning, traced(parts.replay)), playing)
        await parts.worker.stop(grace_s=0.0)
        await learning.evaluate()
    finally:
        await parts.policy.close()
        if kept is not None:
            # A checkpoint still being written would come back after the caller has dropped it.
            await asyncio.to_thread(kept.close)
        await asyncio.to_thread(tracing.stop)
    return Ended(
        evaluations=learning.evaluations,
        is_stopped_early=learning.is_stopped_early,
        wall_s=round(learning.elapsed_s, 1),
    )


async def _build(config: RunConfig, found: Standing | None) -> Parts:
    """New, or as they stood in a checkpoint."""
    source = model_dir(config.model)
    model = source if found is None else found.model
    version = PolicyVersion(0 if found is None else found.version)
    policy = await TorchPolicy.start(model, config.engine, seed=config.seed, version=version)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = Trainer(load_model(model, device), config.learner, World(device=torch.device(device)))
    replay = MemoryReplay(config.replay)
    questions = training_questions(config)
    if found is not None:
        restore(found.model, trainer)
        replay.go_on(found.rest.buffer)
        questions.restore(found.rest.questions)
        set_generator(policy.generator, found.rest.sampler)
    worker = build_worker(config, policy, traced(replay), source, questions)
    return Parts(policy, trainer, replay, worker, held_out_questions(config))


def _cut_back(out: Path, version: int) -> list[Evaluated]:
    """Leave the lines up to a version, and the evaluations before it, which are returned: that of
    the version itself comes after its checkpoint."""
    lines = [line for line in read_lines(out / METRICS) if line["step"] <= version]
    found = [msgspec.convert(line, Evaluated) for line in read_lines(out / EVALUATIONS)]
    evaluations = [one for one in found if one.step < version]
    replace_text(out / METRICS, "".join(json.dumps(line) + "\n" for line in lines))
    written = [msgspec.json.encode(one).decode() + "\n" for one in evaluations]
    replace_text(out / EVALUATIONS, "".join(written))
    return evaluations


def training_questions(config: RunConfig) -> QuestionStream:
    """From the first on; data.seed decides the order."""
    return QuestionStream(load_sources(config.data), seed=config.data.seed)


def held_out_questions(config: RunConfig) -> Sequence[Question]:
    """The first eval.num_questions of a fixed shuffle: the same for every arm and seed."""
    questions = load_questions(held_out_file(config.data))
    random.Random(HELD_OUT_SEED).shuffle(questions)
    return questions[: config.eval.num_questions]


async def _until_done(training: Any, playing: asyncio.Task[None]) -> None:
    """Train to the end, or to an early stop, or raise what ended the rollouts."""
    task = asyncio.ensure_future(training)
    await asyncio.wait({task, playing}, return_when=asyncio.FIRST_COMPLETED)
    if playing.done():
        task.cancel()
        playing.result()
    try:
        await task
    except LearnerStopped:
        return


def build_worker(
    config: RunConfig,
    policy: TorchPolicy,
    replay: Replay,
    model: Path,
    questions: QuestionStream | None = None,
) -> RolloutWorker:
    """A rollout worker over the policy and the buffer of this process. `questions` None: those of
    the configuration from the first on."""
    if questions is None:
        questions = training_questions(config)
    counters = Counters()
    retriever = MeasuredRetriever(LocalRetriever(index_of(config.search)), counters.retriever)
    tokens = Tokens.load(model)
    return RolloutWorker(
        worker_id="worker-0",
        replay=replay,
        policy=TracedPolicy(policy),
        environment=build_environment(
            config.environment, config.search, config.reward, retriever, tokens.facts
        ),
        tokens=tokens,
        questions=questions,
        config=config.rollout,
        limits=Limits.of(config.search, config.policy),
        oldest_version=policy.version,
        counters=counters,
    )
