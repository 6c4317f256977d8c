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
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch

from leeway.actors.config import held_out_file, model_dir
from leeway.actors.counters import Counters
from leeway.actors.environment import Question
from leeway.actors.environment_factory import build_environment
from leeway.actors.evaluation import Evaluation
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
from leeway.services.experiments.collapse import CollapseRule, Evaluated, collapse_step
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


class InProcess:
    """Implements loop.Learning: publishing is a copy into the policy beside it."""

    def __init__(
        self,
        config: RunConfig,
        policy: TorchPolicy,
        trainer: Trainer,
        out: Path,
        evaluate: Callable[[], Awaitable[Evaluation]],
        rule: CollapseRule | None = None,
    ) -> None:
        """`evaluate` plays the held-out questions with the policy as it is. `rule` ends a run that
        has collapsed; None ends none."""
        self._config = config
        self._policy = policy
        self._trainer = trainer
        self._metrics: StepMetrics | None = None
        # One thread for every step: the allocator keeps what a thread has freed for that thread,
        # so that steps on the loop's own pool would keep the memory of several.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leeway-learn")
        self._out = out
        self._evaluate = evaluate
        self._rule = rule
        self._began = time.monotonic()
        self.evaluations: list[Evaluated] = []
        self.is_stopped_early = False
        self.version = PolicyVersion(0)
        self.num_steps = config.learner.num_steps
        self.draw_timeout_s = config.learner.draw_timeout_s

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
                self._thread, self._trainer.train_step, batch, self.version
            )
        self.version = PolicyVersion(self.version + 1)

    async def publish(self) -> None:
        weights = {name: tensor.clone() for name, tensor in self._trainer.weights()}
        await asyncio.to_thread(self._policy.load, weights, self.version)

    async def catch_up(self) -> None:
        """The policy is never behind."""

    async def confirm(self) -> Published | None:
        return None

    async def after_step(self, wait_s: float, published: Published | None) -> None:
        assert self._metrics is not None
        line = {"step": self.version, "time": time.time(), "wait_s": wait_s}
        line["wall_s"] = time.monotonic() - self._began
        with (self._out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line | self._metrics.as_dict()) + "\n")
        every = self._config.eval.every_steps
        if every and self.version % every == 0:
            await self.evaluate()

    async def evaluate(self) -> None:
        """Score the current version, unless that is done, and see whether the run goes on."""
        if self.evaluations and self.evaluations[-1].step == self.version:
            return
        found = await self._evaluate()
        wall_s = time.monotonic() - self._began
        self.evaluations.append(Evaluated(self.version, wall_s, found.scores["exact_match"]))
        with (self._out / "evaluations.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(self.evaluations[-1]) + b"\n")
        if self._rule is not None and self._rule.stop_early:
            step = collapse_step(self.evaluations, self._rule, is_over=False)
            self.is_stopped_early = step is not None and self.version < self.num_steps


async def run(config: RunConfig, out: Path, rule: CollapseRule | None = None) -> Ended:
    """Evaluate, train, evaluate; `out` receives metrics.jsonl and evaluations.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    tracing.start(config.tracing, config.name, "in-process")
    torch.manual_seed(config.seed)
    model = model_dir(config.model)
    policy = await TorchPolicy.start(
        model, config.policy, seed=config.seed, version=PolicyVersion(0)
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    world = World(device=torch.device(device))
    trainer = Trainer(load_model(model, device), config.learner, world)
    replay = traced(MemoryReplay(config.replay))
    worker = build_worker(config, policy, replay, model)
    held_out = held_out_questions(config)

    async def evaluate() -> Evaluation:
        return await worker.evaluate(held_out, max_concurrency=config.policy.max_num_seqs)

    began = time.monotonic()
    learning = InProcess(config, policy, trainer, out, evaluate, rule)
    await learning.evaluate()
    playing = asyncio.create_task(worker.run())
    await _until_done(loop.run(learning, replay), playing)
    await worker.stop(grace_s=0.0)
    await learning.evaluate()
    await policy.close()
    await asyncio.to_thread(tracing.stop)
    return Ended(
        evaluations=learning.evaluations,
        is_stopped_early=learning.is_stopped_early,
        wall_s=round(time.monotonic() - began, 1),
    )


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
    config: RunConfig, policy: TorchPolicy, replay: Replay, model: Path
) -> RolloutWorker:
    """A rollout worker over the policy and the buffer of this process."""
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
        questions=QuestionStream(load_sources(config.data), seed=config.data.seed),
        config=config.rollout,
        limits=Limits.of(config.search, config.policy),
        oldest_version=policy.version,
        counters=counters,
    )
