"""The learner process: what the loop of learner/loop.py works with, built and wired.

Rank 0 runs the loop. The other ranks follow its orders: they train the same step, hand over their
slices of the weights for a publish, write theirs of a checkpoint, and end when rank 0 says so.
Every collective has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Mapping

import msgspec
import torch

from leeway.actors.config import model_dir
from leeway.learner import checkpoint, loop
from leeway.learner.batch import build_batch
from leeway.learner.errors import LearnerStopped
from leeway.learner.metrics import StepMetrics
from leeway.learner.model import load_model
from leeway.learner.trainer import Trainer
from leeway.learner.weights.publisher import Published, Publisher
from leeway.learner.world import World
from leeway.replay import free_pages, tracing
from leeway.replay.board import PolicyBoard, RunBoard
from leeway.replay.bounds import check_exact
from leeway.replay.codec import decode, encode
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import LeewayError, StalenessViolation
from leeway.replay.flat_weights import FlatWeights, pack
from leeway.replay.schema import Group, PolicyVersion
from leeway.replay.sharded_store import check_shards, connect_replay
from leeway.replay.store import Lease
from leeway.replay.traced_replay import traced
from leeway.replay.vigil import Vigil
from leeway.services.beginning import Beginning, until_training
from leeway.services.config import RunConfig
from leeway.services.config_machine import check_packages
from leeway.services.ending import ERROR_S, end_within, until_done, until_stopped
from leeway.services.heartbeat import Heartbeat
from leeway.services.layout import RunDirectory
from leeway.services.learner_orders import Change, End, Gather, Idle, Order, Save, Train
from leeway.services.learner_requests import Requests
from leeway.services.live_settings import applied
from leeway.services.metering import Metering
from leeway.services.processes.joining import JOINED, begin
from leeway.services.records import Records
from leeway.services.results import write_results
from leeway.services.step_records import StepRecords
from leeway.services.timeline import keep_timeline

log = logging.getLogger(__name__)

ASK_S = 2.0
WRITTEN_S = 0.5
"""Between two looks whether a checkpoint is on the disk."""
EPOCH_S = 60.0
"""Added to the deadlines of a draw and of a publish, which may be tried twice: how long ranks wait
for rank 0 between two orders."""


class LearnerProcess:
    """One rank of the learner. Implements loop.Learning on rank 0."""

    def __init__(
        self, run: RunDirectory, config: RunConfig, redis_url: str, *, stays: bool = False
    ) -> None:
        """`stays`: once the run is done it waits for stop() instead of ending."""
        check_packages(config)
        learner = config.learner
        torch.set_num_threads(learner.num_threads)
        torch.manual_seed(config.seed)
        self._run = run
        self._config = config
        self._redis_url = redis_url
        self._stays = stays
        self._stop = False
        self._heartbeat = Heartbeat.from_environment()
        self._metrics: StepMetrics | None = None
        self._max_staleness_seen = 0
        self._revision = 0
        """Of the settings that are in force."""
        self._checkpointed = -1
        self._wire: FlatWeights | None = None
        """What was published last; its buffer serves the next version."""
        self._publish_s = self._confirm_s = 0.0
        self._waited_s: Mapping[str, float] = {}
        self.num_steps = learner.num_steps
        self.draw_timeout_s = learner.draw_timeout_s
        between_orders_s = learner.draw_timeout_s + 8 * learner.publish_timeout_s + EPOCH_S
        self._world = World.from_environment(timeout_s=between_orders_s)
        self._load()
        self._heartbeat.beat()

    def _load(self) -> None:
        """Model, optimizer and version: from the last checkpoint, else from the base model."""
        base = model_dir(self._config.model)
        found = checkpoint.latest(self._run.checkpoints)
        model = load_model(
            found.path if found else base,
            self._world.device,
            trust_remote_code=self._config.policy.trust_remote_code,
        )
        self._trainer = Trainer(model, self._config.learner, self._world)
        self._checkpoints = checkpoint.Checkpoints(self._run.checkpoints, base, self._world)
        self.version = PolicyVersion(0)
        if found:
            restored = checkpoint.restore(found.path, self._trainer)
            self.version = PolicyVersion(restored.version)
            self._max_staleness_seen = int(restored.extra.get("max_staleness_seen", 0))
            self._checkpointed = restored.version

    def stop(self) -> None:
        """Finish the step under way, checkpoint, end. Safe from a signal handler."""
        self._stop = True

    async def run(self) -> None:
        """Train to the end; raises LearnerStopped after a stop, with a checkpoint on disk."""
        if self._world.rank == 0:
            await self._lead()
        else:
            try:
                await self._follow()
            except LearnerStopped:
                raise
            except Exception:
                end_within(ERROR_S)
                raise
        self._world.close()

    # ---- rank 0

    async def _lead(self) -> None:
        tracing.start(self._config.tracing, self._run.root.name, "learner")
        self._connect()
        records = Records(self._run, self._board)
        vigil = Vigil(self._board, "learner")
        keeping = vigil.start(records.keep(), "copying events to the run directory")
        try:
            await self._join()
            if self.version < self.num_steps:
                await until_training(self._board, self.stop_requested, self.catch_up)
            await loop.run(self, self._replay)
            await self._save_and_close()
            await self._requests.ended()
            await until_done(self._board, self.stop_requested)
            await records.copy()
            await write_results(self._run, self._config, self._board)
            await self._metering.finish(is_done=True)
            if self._stays:
                await until_stopped(self.stop_requested)
            self._order(End())
        except LearnerStopped:
            await self._save_and_close()
            self._order(End())
            raise
        except Exception:
            end_within(ERROR_S + math.ceil(self._metering.finish_s))
            raise
        # After an error the others are told nothing: it would wait for one that may be what failed,
        # and hide the error meanwhile. They end when this process closes its connections.
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            # Not in a thread: after an error one may not start any more.
            keep_timeline(self._run)
            await self._metering.finish()
            await vigil.end()
            await self._replay.close()
            await self._policies.close()
            await self._board.close()
            tracing.stop()

    def _connect(self) -> None:
        """Make what speaks to Redis; nothing is sent yet."""
        url, name = self._redis_url, self._run.root.name
        self._board = RunBoard(url, name)
        self._metering = Metering(self._config, self._run, self._board, self.version)
        self._policies = PolicyBoard(url, name)
        self._replay = traced(connect_replay(url, name, self._config.replay))
        learner = self._config.learner
        self._publisher = Publisher(
            self._policies, self._world.device, learner.publish_timeout_s, learner.transport
        )
        self._requests = Requests(self._board, self)
        self._steps = StepRecords(
            self._run, self._board, self._replay, self._metering, self._max_staleness_seen
        )

    async def _join(self) -> None:
        """Bring buffer and engines to this learner's version before anything is admitted."""
        await check_shards(self._redis_url, self._run.root.name, self._config.replay.num_shards)
        await begin(self._board, self._config, self._run.root.name, self.version)
        was_draining = await self._requests.forget()
        await self._apply_settings()
        await self._metering.resume()
        await self._publisher.resume()
        beginning = Beginning(self._run, self._board, self._replay, self.version)
        was_paused = await beginning.restore() and not was_draining
        await self.catch_up()
        if not await self.stop_requested():
            await beginning.open(is_paused=was_paused)
        await self._board.put(JOINED, {"version": self.version})

    async def stop_requested(self) -> bool:
        """By signal or through the run board. Asked every few seconds of a wait, which is also how
        the other ranks learn that this one lives."""
        self._sign()
        return self._stop or await self._board.stop_requested() is not None

    def _sign(self) -> None:
        """This one lives: to the other ranks, and to the probe of a supervisor."""
        self._heartbeat.beat()
        if self._world.size > 1:
            self._order(Idle())

    async def train(self, lease: Lease) -> None:
        """One optimizer step; the staleness bound is asserted on what is about to be trained."""
        check_staleness(lease, self._config.replay)
        self._waited_s = lease.waited_s
        if self._world.size > 1:
            self._order(Train([encode(group) for group in lease.groups]))
        with tracing.training([group.group_id for group in lease.groups], self.version):
            self._step(lease.groups)

    def _step(self, groups: tuple[Group, ...]) -> None:
        batch = build_batch(groups)
        self._metrics = self._trainer.train_step(batch, self.version)
        self.version = PolicyVersion(self.version + 1)

    async def publish(self) -> None:
        """Send the current version to every live engine."""
        began = time.monotonic()
        if not await self._policies.engines():
            return  # whoever comes later is brought to this version by catch_up
        manifest = self._trainer.weight_manifest(await self._publisher.wire_dtype())
        if self._wire is not None and self._wire.layout.manifest != tuple(manifest):
            self._wire = None  # not two buffers at once
        self._order(Gather())
        self._wire = pack(self._trainer.weights(), manifest, into=self._wire and self._wire.flat)
        await self._publisher.publish(self.version, self._wire)
        self._publish_s = time.monotonic() - began

    async def answer_requests(self) -> None:
        """Between two steps: settings that were changed, and what REST asks for."""
        await self._apply_settings()
        await self._requests.answer()

    async def close_admission(self) -> None:
        """For a drain: no further group is begun."""
        await self._replay.pause_admission(True)

    async def is_paused(self) -> bool:
        """Whether somebody has closed admission: then it is no fault that no group comes."""
        return (await self._replay.stats()).admission_paused

    async def is_drained(self) -> bool:
        """Whether the run is being drained and no group is played any more."""
        return self._requests.is_draining and (await self._replay.stats()).num_slots == 0

    async def _apply_settings(self) -> None:
        live = await self._board.settings()
        if live.revision == self._revision:
            return
        self._order(Change(live.values))
        self._change(live.values)
        self._revision = live.revision
        known = (await self._board.get_all()).get("run", {})
        await self._board.put("run", {**known, "num_steps": self.num_steps})

    def _change(self, values: Mapping[str, float]) -> None:
        self._config = applied(self._config, values)
        self._trainer.config = self._config.learner
        self.num_steps = self._config.learner.num_steps
        self.draw_timeout_s = self._config.learner.draw_timeout_s

    async def catch_up(self) -> None:
        """While waiting for data: engines that hold another version get the current one.

        They started with older weights, or hold versions that were lost with a crash.
        """
        if await self._engines_elsewhere():
            await self.confirm()
        elsewhere = await self._engines_elsewhere()
        if elsewhere:
            log.info("bringing %s to version %d", elsewhere, self.version)
            await self.publish()
            await self.confirm()

    async def _engines_elsewhere(self) -> list[str]:
        return [e.engine_id for e in await self._policies.engines() if e.version != self.version]

    async def confirm(self) -> Published | None:
        """Wait until the version before is in use; evictions become events."""
        began = time.monotonic()
        published = await self._publisher.confirm()
        self._confirm_s = time.monotonic() - began
        if published is not None:
            with self._run.publishes.open("a") as file:
                file.write(msgspec.json.encode(published).decode() + "\n")
            await self._metering.publish(published)
            await self._board.append_publish(msgspec.to_builtins(published))
        for engine_id, reason in (published.evicted if published else {}).items():
            await self._board.append_event("publish", f"{engine_id} was evicted: {reason}")
        return published

    async def after_step(self, wait_s: float, published: Published | None) -> None:
        """Metrics to disk and board; a checkpoint when it is due."""
        assert self._metrics is not None
        await self._steps.write(
            self.version,
            self._metrics,
            published,
            wait_s=wait_s,
            waited_s=self._waited_s,
            publish_s=self._publish_s,
            confirm_s=self._confirm_s,
            settings_revision=self._revision,
        )
        if self.version % self._config.learner.checkpoint_every == 0:
            await self.save()

    async def save(self) -> None:
        """Begin a checkpoint of the current version, once; it is written while training goes on.

        Its score is the mean reward of the steps since the one before.
        """
        if self.version in (self._checkpointed, 0):
            return
        # What failed of the one before is raised here, before others begin the next.
        await self._until_written()
        free_pages.give_back()
        self._order(Save())
        self._save(self._steps.take_score(), self._steps.max_staleness_seen)

    def _save(self, score: float | None = None, max_staleness_seen: int = 0) -> None:
        extra = {"max_staleness_seen": max_staleness_seen}
        self._checkpoints.save(self._trainer, self.version, extra, score)
        self._checkpointed = self.version

    async def save_now(self) -> None:
        """A checkpoint of the current version, on the disk when this returns."""
        await self.save()
        await self._until_written()

    async def _save_and_close(self) -> None:
        try:
            await self.save_now()
        finally:
            self._checkpoints.close()

    async def _until_written(self) -> None:
        """A slow disk may take longer than a silence may last, so signs of life go on."""
        while not self._checkpoints.is_over():
            self._sign()
            await asyncio.sleep(WRITTEN_S)
        self._checkpoints.wait()

    def _order(self, order: Order) -> None:
        """Tell the other ranks what comes next."""
        self._world.broadcast_bytes(msgspec.msgpack.encode(order))

    # ---- the other ranks

    async def _follow(self) -> None:
        """Do as rank 0 says. What a gather yields is let go: rank 0 alone publishes.

        A rank that is told to stop, as when its pod alone is deleted, asks rank 0 to: by itself it
        can write no checkpoint, since each holds a part of one.
        """
        has_asked = False
        while True:
            order = msgspec.msgpack.decode(self._world.broadcast_bytes(None), type=Order)
            self._heartbeat.beat()
            if self._stop and not has_asked:
                has_asked = await self._ask_to_stop()
            match order:
                case Train(groups):
                    self._step(tuple(decode(group) for group in groups))
                case Gather():
                    deque(self._trainer.weights(), maxlen=0)
                case Save():
                    self._save()
                case Idle():
                    pass
                case Change(values):
                    self._change(values)
                case End():
                    self._checkpoints.close()
                    return

    async def _ask_to_stop(self) -> bool:
        """Whether it could be asked; else it is, behind the next order."""
        board = RunBoard(self._redis_url, self._run.root.name, retry_s=ASK_S)
        try:
            await board.request_stop(f"rank {self._world.rank} of the learner was told to stop")
        except LeewayError as error:
            log.warning("rank 0 could not be asked to stop: %s", error)
            return False
        finally:
            await board.close()
        return True


def check_staleness(lease: Lease, replay: ReplayConfig) -> None:
    """Raise StalenessViolation if a trained token of the lease is older than the bound allows.

    learner at 10, oldest versions [8, 9] -> staleness [2, 1]; with max_staleness 1 this raises.
    Under exact also if one is younger, or a group of more than one version.
    """
    for group in lease.groups:
        staleness = lease.version - group.oldest_version
        if not 0 <= staleness <= replay.max_staleness:
            raise StalenessViolation(
                f"group {group.group_id} holds a token of version {group.oldest_version}; "
                f"at learner version {lease.version} its staleness is {staleness} "
                f"and the bound is {replay.max_staleness}"
            )
    if replay.staleness_policy == "exact":
        check_exact(lease, replay.max_staleness)
