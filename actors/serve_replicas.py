"""What runs behind Ray Serve: an engine, the index, a rollout worker, each in its own process."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
import uuid
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.serve.handle import DeploymentHandle

from leeway.actors.busy_clock import BusyClock
from leeway.actors.config import (
    DataConfig,
    EnvironmentConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    SearchConfig,
    held_out_file,
)
from leeway.actors.counters import Counters
from leeway.actors.environment_factory import build_environment
from leeway.actors.failures import EngineError
from leeway.actors.membership import Membership
from leeway.actors.policy import Completion, CompletionRequest
from leeway.actors.rollout import Limits
from leeway.actors.search.index_source import index_of
from leeway.actors.search.measured_retriever import MeasuredRetriever
from leeway.actors.search.questions import (
    QuestionStream,
    StreamState,
    load_questions,
    load_sources,
)
from leeway.actors.search.retriever import HttpRetriever, Passage, Retriever, passages_of
from leeway.actors.search.service import RetrievalService, ServiceLimits
from leeway.actors.serve_handles import (
    READY_POLL_S,
    HandlePolicy,
    HandleRetriever,
    application_handle,
)
from leeway.actors.tokens import Tokens
from leeway.actors.traced_policy import TracedPolicy
from leeway.actors.worker import RolloutWorker
from leeway.replay import free_pages, tracing
from leeway.replay.board import PolicyBoard, RunBoard
from leeway.replay.config import ReplayConfig
from leeway.replay.held_slots import HeldSlots
from leeway.replay.policy_folder import newest_policy
from leeway.replay.run_records import LiveSettings
from leeway.replay.schema import PolicyVersion
from leeway.replay.sharded_store import connect_replay
from leeway.replay.store import ReplayStats
from leeway.replay.tracing import TracingConfig
from leeway.replay.vigil import Vigil

SNAPSHOT_S = 1.0
"""Seconds between two looks at the phase, and between two snapshots on the run board."""
DRAIN_S = 0.1
"""How often a replica that is to end looks whether a request is still with it; Serve's own two
seconds, one replica after another, would be most of the time that a run takes to end."""
HEALTH_S = 2.0
"""How often Serve asks a replica whether it is well. A dead process is noticed by the next
question, an engine that died below its replica by the third."""
RETRIEVER_REQUESTS = 4096
"""Searches with the retriever's replica at once, waiting ones included; Serve holds back more."""
RECENT_SNAPSHOTS = 30
"""Snapshots over which a worker's share of waiting and an engine's speed are reported."""


class ActorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a replica needs to know, plain enough to travel."""

    run: str
    redis_url: str
    model: str
    """Directory of the base model."""
    checkpoints: str
    """Where the learner's checkpoints are, if this machine sees its disk: an engine starts from the
    newest, else from the base model; the learner then sends it what it lacks."""
    seed: int
    policy: PolicyConfig
    environment: EnvironmentConfig
    search: SearchConfig
    reward: RewardConfig
    data: DataConfig
    rollout: RolloutConfig
    replay: ReplayConfig
    tracing: TracingConfig = TracingConfig()


@serve.deployment(
    max_ongoing_requests=1024,
    health_check_period_s=HEALTH_S,
    health_check_timeout_s=30,
    graceful_shutdown_wait_loop_s=DRAIN_S,
)
class PolicyServer:
    """One engine behind a handle, its place on the policy board kept by a task of its own."""

    async def __init__(self, spec: ActorSpec) -> None:
        logging.basicConfig(level=logging.INFO)
        tracing.start(spec.tracing, spec.run, "engine")
        self._policy = await start_policy(spec)
        self._traced = TracedPolicy(self._policy)
        self._board = PolicyBoard(spec.redis_url, spec.run)
        # Process ids repeat from one container to the next.
        self.engine_id = f"engine-{uuid.uuid4().hex[:8]}"
        self._membership = Membership(
            self._board, self._policy, self.engine_id, os.uname().nodename
        )
        self._num_tokens = 0
        self._num_prompt_tokens = 0
        self._num_cached = 0
        self._num_discarded = 0
        self._num_requests = 0
        self._clock = BusyClock()
        self._run_board = RunBoard(spec.redis_url, spec.run)
        self._vigil = Vigil(self._run_board, self.engine_id, owns_loop=False)
        self._task = self._vigil.start(self._membership.run(), "its place on the policy board")
        self._snapshots = self._vigil.start(self._put_snapshots(), "its section of the run board")
        self._giving_back = self._vigil.start(free_pages.keep_giving_back(), "giving memory back")
        await self._until_current(spec)

    async def _until_current(self, spec: ActorSpec) -> None:
        """Return when the weights are recent enough to sample with; until then Serve sends nothing.

        An engine that starts again in the middle of a run holds the model the run began with. The
        learner, waiting for data, sends it the current one.
        """
        replay = connect_replay(spec.redis_url, spec.run, spec.replay)
        try:
            async with asyncio.timeout(spec.policy.start_timeout_s):
                while not self._is_current(await replay.stats(), spec.replay.max_staleness):
                    await asyncio.sleep(READY_POLL_S)
        except TimeoutError:
            version = await self._policy.version()
            raise EngineError(
                f"{self.engine_id} holds version {version} and got no newer one from the learner "
                f"within {spec.policy.start_timeout_s:.0f} s"
            ) from None
        finally:
            await replay.close()

    def _is_current(self, stats: ReplayStats, max_staleness: int) -> bool:
        staleness = stats.learner_version - self._membership.version
        return 0 <= staleness <= max_staleness

    async def complete(self, request: CompletionRequest) -> Completion:
        """See Policy.complete."""
        self._clock.begin()
        try:
            completion = await self._traced.complete(request)
        finally:
            self._clock.end()
        self._num_requests += 1
        self._num_tokens += len(completion.token_ids)
        self._num_prompt_tokens += len(request.prompt_ids)
        self._num_cached += completion.num_cached
        self._num_discarded += completion.num_discarded
        return completion

    async def version(self) -> PolicyVersion:
        """See Policy.version."""
        return await self._policy.version()

    async def _put_snapshots(self) -> None:
        """Version, speed and the last publish, on the run board every second."""
        counted: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=RECENT_SNAPSHOTS)
        while True:
            await asyncio.sleep(SNAPSHOT_S)
            last = self._membership.last
            counted.append((time.monotonic(), self._num_tokens))
            (began, before), (now, after) = counted[0], counted[-1]
            await self._run_board.put(
                f"policy:{self.engine_id}",
                {
                    "version": await self._policy.version(),
                    "tokens_per_s": (after - before) / (now - began),
                    "num_tokens": self._num_tokens,
                    "num_prompt_tokens": self._num_prompt_tokens,
                    "num_cached_tokens": self._num_cached,
                    "num_discarded_tokens": self._num_discarded,
                    "num_requests": self._num_requests,
                    "num_in_flight": self._clock.num_under_way,
                    "busy_s": self._clock.busy_s,
                    "up_s": self._clock.up_s,
                    "pause_ms": last.pause_s * 1e3 if last else None,
                    "transfer_ms": last.transfer_s * 1e3 if last else None,
                },
            )

    async def check_health(self) -> None:
        """Serve restarts the replica when this raises: engine dead, weights wrong, task over."""
        for task, what in ((self._task, "policy"), (self._snapshots, "run")):
            if task.done():
                task.result()
                raise EngineError(f"the engine has left the {what} board")
        if self._membership.broken:
            raise EngineError(self._membership.broken)
        await self._policy.check()

    async def __del__(self) -> None:
        tasks = (self._task, self._snapshots, self._giving_back)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # First of all: what follows may wait for a Redis that is away, and Ray does not wait long.
        await self._policy.close()
        await self._vigil.end()
        await self._board.close()
        await self._run_board.close()
        await asyncio.to_thread(tracing.stop)


async def start_policy(spec: ActorSpec) -> Any:
    """The policy that `policy.backend` names, at the newest version on the disk."""
    model, version = newest_policy(Path(spec.checkpoints), Path(spec.model))
    if spec.policy.backend == "vllm":
        from leeway.actors.vllm_policy import VllmPolicy

        return await VllmPolicy.start(model, spec.policy, seed=spec.seed, version=version)
    import torch

    from leeway.actors.torch_policy import TorchPolicy

    torch.set_num_threads(spec.policy.num_threads)
    return await TorchPolicy.start(model, spec.policy, seed=spec.seed, version=version)


@serve.deployment(
    max_ongoing_requests=RETRIEVER_REQUESTS,
    health_check_period_s=HEALTH_S,
    graceful_shutdown_wait_loop_s=DRAIN_S,
)
class RetrieverServer:
    """The index in a replica of its own, behind the queue, batches and cache of the service."""

    async def __init__(self, spec: ActorSpec) -> None:
        tracing.start(spec.tracing, spec.run, "retriever")
        index = await asyncio.to_thread(index_of, spec.search)
        limits = ServiceLimits(
            max_queue=RETRIEVER_REQUESTS, timeout_s=spec.search.retriever_timeout_s
        )
        self._searches = RetrievalService(index, limits)
        self._giving_back = asyncio.create_task(free_pages.keep_giving_back())

    async def search(self, query: str, top_k: int, traceparent: str | None = None) -> list[Passage]:
        """See Retriever.search; `traceparent` is the span that waits for it."""
        with tracing.span("retriever.index", parent=traceparent):
            [hits] = await self._searches.search([query], top_k)
        return passages_of(hits)

    async def __del__(self) -> None:
        self._giving_back.cancel()
        await self._searches.close()
        await asyncio.to_thread(tracing.stop)


@serve.deployment(
    max_ongoing_requests=64,
    health_check_period_s=HEALTH_S,
    graceful_shutdown_wait_loop_s=DRAIN_S,
)
class RolloutServer:
    """One rollout worker. It plays while the run's phase is `training`; evaluation is by call."""

    async def __init__(self, spec: ActorSpec) -> None:
        logging.basicConfig(level=logging.INFO)
        tracing.start(spec.tracing, spec.run, "rollout")
        wait_s = spec.policy.start_timeout_s
        policy = await application_handle("policy", wait_s)
        retriever = (
            await application_handle("retriever", wait_s)
            if spec.search.retriever_url is None
            else None
        )
        self._place = serve.get_replica_context().rank.rank
        self.worker_id = f"worker-{self._place}"
        self._spec = spec
        self._policies = PolicyBoard(spec.redis_url, spec.run)
        self._board = RunBoard(spec.redis_url, spec.run)
        replay = connect_replay(spec.redis_url, spec.run, spec.replay)
        self._replay = HeldSlots(replay, self._board, self.worker_id)
        # Serve gives a place to another replica when the one before is gone.
        await self._replay.return_those_of_the_dead()
        self._retriever = build_retriever(spec.search, retriever)
        self._worker = await self._build_worker(HandlePolicy(policy))
        self._playing: asyncio.Task[None] | None = None
        self._settings = LiveSettings()
        self._waited: deque[tuple[float, float]] = deque(maxlen=RECENT_SNAPSHOTS)
        self._vigil = Vigil(self._board, self.worker_id, owns_loop=False)
        self._task = self._vigil.start(self._follow_phase(), "following the phase of the run")
        self._giving_back = self._vigil.start(free_pages.keep_giving_back(), "giving memory back")

    async def _build_worker(self, policy: HandlePolicy) -> RolloutWorker:
        spec = self._spec
        tokens = Tokens.load(Path(spec.model))
        questions = QuestionStream(
            load_sources(spec.data),
            seed=spec.data.seed,
            worker=self._place,
            num_workers=spec.rollout.num_workers,
        )
        board = await self._board.get_all()
        # A worker that the run did not have before goes on where the first one stood.
        saved = board.get(self._section, board.get("rollout:worker-0", {})).get("position")
        if saved is not None:
            questions.restore(msgspec.convert(saved, StreamState))
        counters = Counters(board.get(self._section))
        retriever = MeasuredRetriever(self._retriever, counters.retriever)
        return RolloutWorker(
            worker_id=self.worker_id,
            replay=self._replay,
            policy=policy,
            environment=build_environment(
                spec.environment, spec.search, spec.reward, retriever, tokens.facts
            ),
            tokens=tokens,
            questions=questions,
            config=spec.rollout,
            limits=Limits.of(spec.search, spec.policy),
            oldest_version=self._policies.oldest_version,
            counters=counters,
        )

    @property
    def _section(self) -> str:
        return f"rollout:{self.worker_id}"

    async def _follow_phase(self) -> None:
        """Play while the phase is `training`, and put the counters on the board."""
        while True:
            is_training = await self._board.phase() == "training"
            if is_training and self._playing is None:
                self._playing = asyncio.create_task(self._worker.run())
            elif not is_training and self._playing is not None:
                await self._stop_playing()
            if self._playing is not None and self._playing.done():
                await self._report_failure(self._playing)
            await self._apply_settings()
            await self._put_snapshot()
            await asyncio.sleep(SNAPSHOT_S)

    async def _apply_settings(self) -> None:
        """Settings of rollouts that were changed since the run started; REST has checked them."""
        live = await self._board.settings()
        if live.revision == self._settings.revision:
            return
        part = {
            key.removeprefix("rollout."): value
            for key, value in live.values.items()
            if key.startswith("rollout.")
        }
        config = RolloutConfig.model_validate(self._spec.rollout.model_dump() | part)
        self._worker.configure(config)
        self._settings = live

    async def _report_failure(self, ended: asyncio.Task[None]) -> None:
        """Tell the run that it cannot go on; a new worker would only begin the same again."""
        error = ended.exception()
        code = getattr(error, "exit_code", 1)
        reason = f"{self.worker_id}: {error}"
        await self._board.put("failure", {"reason": reason, "exit_code": code})
        ended.result()

    async def _put_snapshot(self) -> None:
        snapshot = msgspec.to_builtins(self._worker.snapshot(), str_keys=True)
        self._waited.append((time.monotonic(), snapshot["wait_admission_s"]))
        (began, before), (now, after) = self._waited[0], self._waited[-1]
        share = (after - before) / (now - began) if now > began else None
        own = {"wait_share": share, "settings_revision": self._settings.revision}
        await self._board.put(self._section, {**snapshot, **own})

    async def _stop_playing(self) -> None:
        assert self._playing is not None
        await self._worker.stop(grace_s=0.0)
        await asyncio.gather(self._playing, return_exceptions=True)
        self._playing = None

    async def evaluate(self, num_questions: int) -> dict[str, Any]:
        """Held-out questions, greedy; see RolloutWorker.evaluate."""
        questions = load_questions(held_out_file(self._spec.data))
        # The same sample in every evaluation of every run.
        random.Random(0).shuffle(questions)
        questions = questions[:num_questions]
        return msgspec.to_builtins(
            await self._worker.evaluate(
                questions, max_concurrency=self._spec.policy.max_num_seqs, num_samples=12
            ),
            str_keys=True,
        )

    async def check_health(self) -> None:
        """Raises what ended the worker; Serve then starts another."""
        if self._task.done():
            self._task.result()

    async def __del__(self) -> None:
        tasks = (self._task, self._giving_back)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._vigil.end()
        if self._playing is not None:
            await self._stop_playing()
        await self._put_snapshot()
        for client in (self._replay, self._policies, self._board, self._retriever):
            await client.close()
        await asyncio.to_thread(tracing.stop)


def build_retriever(search: SearchConfig, handle: DeploymentHandle | None) -> Retriever:
    """The outside server where `search.retriever_url` names one, else the retriever application."""
    if search.retriever_url:
        return HttpRetriever(search.retriever_url, timeout_s=search.retriever_timeout_s)
    assert handle is not None, "deploy starts the retriever application"
    return HandleRetriever(handle, search.retriever_timeout_s)
