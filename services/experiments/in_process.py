"""The whole loop in one process: memory store, torch policy, local retriever, the real learner.

For experiments on a GPU (seconds a step) and for tests: everything but Redis, Ray and vLLM is the
code of a run, and staleness is admitted, bounded and asserted alike. Training and decoding share
the device, so speed says nothing about a run.

    python -m leeway.services.experiments.in_process FILE --out DIR [--set a.b=c ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from leeway.actors.config import held_out_file, model_dir
from leeway.actors.environment_factory import build_environment
from leeway.actors.evaluation import Evaluation
from leeway.actors.rollout import Limits
from leeway.actors.search.index_source import index_of
from leeway.actors.search.questions import QuestionStream, load_questions, load_sources
from leeway.actors.search.retriever import LocalRetriever
from leeway.actors.tokens import Tokens
from leeway.actors.torch_policy import TorchPolicy
from leeway.actors.worker import RolloutWorker
from leeway.learner import loop
from leeway.learner.batch import build_batch
from leeway.learner.metrics import StepMetrics
from leeway.learner.model import load_model
from leeway.learner.trainer import Trainer
from leeway.learner.weights.publisher import Published
from leeway.learner.world import World
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Lease
from leeway.services.config import RunConfig, load
from leeway.services.learning import check_staleness


class InProcess:
    """Implements loop.Learning: publishing is a copy into the policy beside it."""

    def __init__(self, config: RunConfig, policy: TorchPolicy, trainer: Trainer, out: Path) -> None:
        self._config = config
        self._policy = policy
        self._trainer = trainer
        self._metrics: StepMetrics | None = None
        # One thread for every step: the allocator keeps what a thread has freed for that thread,
        # so that steps on the loop's own pool would keep the memory of several.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leeway-learn")
        self._out = out
        self.version = PolicyVersion(0)
        self.num_steps = config.learner.num_steps
        self.draw_timeout_s = config.learner.draw_timeout_s

    async def stop_requested(self) -> bool:
        return False

    async def train(self, lease: Lease) -> None:
        check_staleness(lease, self._config.replay)
        batch = build_batch(lease.groups)
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
        with (self._out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line | self._metrics.as_dict()) + "\n")


async def run(config: RunConfig, out: Path) -> dict[str, Any]:
    """Evaluate, train, evaluate; returns exact match before and after, and writes metrics.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    model = model_dir(config.model)
    policy = await TorchPolicy.start(
        model, config.policy, seed=config.seed, version=PolicyVersion(0)
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    world = World(device=torch.device(device))
    trainer = Trainer(load_model(model, device), config.learner, world)
    replay = MemoryReplay(config.replay)
    worker = _worker(config, policy, replay, model)
    held_out = load_questions(held_out_file(config.data))
    random.Random(0).shuffle(held_out)
    held_out = held_out[: config.eval.num_questions]

    learning = InProcess(config, policy, trainer, out)
    began = time.monotonic()
    before = await worker.evaluate(held_out, max_concurrency=config.policy.max_num_seqs)
    playing = asyncio.create_task(worker.run())
    await _until_done(loop.run(learning, replay), playing)
    await worker.stop(grace_s=0.0)
    after = await worker.evaluate(held_out, max_concurrency=config.policy.max_num_seqs)
    await policy.close()
    result: dict[str, Any] = {"before": _scores(before), "after": _scores(after)}
    result["wall_s"] = round(time.monotonic() - began, 1)
    (out / "result.json").write_text(json.dumps(result, indent=1))
    return result


async def _until_done(training: Any, playing: asyncio.Task[None]) -> None:
    """Train to the end, or raise what ended the rollouts."""
    task = asyncio.ensure_future(training)
    await asyncio.wait({task, playing}, return_when=asyncio.FIRST_COMPLETED)
    if playing.done():
        task.cancel()
        playing.result()
    await task


def _worker(
    config: RunConfig, policy: TorchPolicy, replay: MemoryReplay, model: Path
) -> RolloutWorker:
    retriever = LocalRetriever(index_of(config.search))
    tokens = Tokens.load(model)
    return RolloutWorker(
        worker_id="worker-0",
        replay=replay,
        policy=policy,
        environment=build_environment(
            config.environment, config.search, config.reward, retriever, tokens.facts
        ),
        tokens=tokens,
        questions=QuestionStream(load_sources(config.data), seed=config.data.seed),
        config=config.rollout,
        limits=Limits.of(config.search, config.policy),
        oldest_version=policy.version,
    )


def _scores(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "exact_match": evaluation.scores["exact_match"],
        "by_hops": evaluation.exact_match_by_hops,
        "num_searches": evaluation.scores.get("num_searches"),
    }


def main() -> None:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    config = load(options.file, options.overrides)
    print(json.dumps(asyncio.run(run(config, options.out))), flush=True)


if __name__ == "__main__":
    main()
