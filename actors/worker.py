"""The rollout worker: asks replay for slots, plays a group in each, hands the groups over.

                          waits for                        woken by
    run                   a free place in flight           a group that ended, stop(); a group ends
                                                           within rollout.episode_timeout_s
                          a slot from replay               replay, or ADMIT_POLL_S later
    one task per group    policy and retriever             their answers, or the group's deadline
                          replay (add, drop)               replay, or store_timeout_s later
    stop                  run                              run's end: ADMIT_POLL_S, the grace period
                                                           and DROP_TIMEOUT_S at most

Every slot that was granted ends in add or drop, whatever happens to its group; the one exception is
a replay that does not answer, and there the slot's own lease ends it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

import tenacity

from leeway.actors.config import RolloutConfig
from leeway.actors.counters import Counters, RolloutSnapshot
from leeway.actors.environment import Environment, Question
from leeway.actors.evaluation import Evaluation, evaluate
from leeway.actors.failures import EpisodeFailure, FailureBudget, GroupRefused, first_cause
from leeway.actors.group import play_group
from leeway.actors.policy import Policy
from leeway.actors.rollout import Limits, check_limits, encode_prompt, play
from leeway.actors.search.questions import QuestionStream
from leeway.actors.tokens import Tokens
from leeway.actors.turnstile import Turnstile
from leeway.replay import tracing
from leeway.replay.errors import DataError, SlotExpired, StoreError, StoreUnavailable, WaitTimeout
from leeway.replay.schema import GroupId, Trajectory
from leeway.replay.store import Replay, Slot, VersionSource

log = logging.getLogger(__name__)

ADMIT_POLL_S: Final = 1.0
"""Longest single wait for a slot; stop() is noticed in between."""
DROP_TIMEOUT_S: Final = 5.0
"""Seconds a cancelled group may take to hand its slot back."""

T = TypeVar("T")


@contextmanager
def _spared_collector() -> Iterator[None]:
    """Meanwhile the garbage collector does not see what has been loaded before. Questions and
    tokenizer stay anyway, and a look at all of them stops the event loop for 0.1 s, every few
    thousand turns."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class RolloutWorker:
    """Plays groups until it is stopped."""

    def __init__(
        self,
        *,
        worker_id: str,
        replay: Replay,
        policy: Policy,
        environment: Environment,
        tokens: Tokens,
        questions: QuestionStream,
        config: RolloutConfig,
        limits: Limits,
        oldest_version: VersionSource,
        store_timeout_s: float = 60.0,
        counters: Counters | None = None,
    ) -> None:
        """`counters` are counted on, such as those of the worker that this one replaces."""
        check_limits(limits, environment, tokens)
        self._worker_id = worker_id
        self._replay = replay
        self._policy = policy
        self._environment = environment
        self._tokens = tokens
        self._questions = questions
        self._config = config
        self._limits = limits
        self._oldest_version = oldest_version
        self._store_timeout_s = store_timeout_s
        self._budget = FailureBudget(config.max_failure_share)
        self._counters = counters or Counters()
        self._turnstile = Turnstile()
        self._groups: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._is_stopping = False
        self._grace_s = 0.0

    async def run(self) -> None:
        """Until stop() is called; may be run again after it. Raises what ended it:
        FailureBudgetExceeded, StoreUnavailable after its deadline, or whatever a group raised that
        is no EpisodeFailure.
        """
        self._ended.clear()
        try:
            with _spared_collector():
                async with asyncio.TaskGroup() as groups:
                    while await self._has_room():
                        for slot in await self._admit():
                            self._start(slot, groups)
                    await self._finish()
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from failures
        finally:
            self._is_stopping = False
            self._ended.set()

    async def stop(self, grace_s: float = 10.0) -> None:
        """Admit no more; groups in flight have `grace_s` to end, the rest are dropped ("shutdown").

        Returns when run() has ended.
        """
        self._is_stopping, self._grace_s = True, grace_s
        self._changed.set()
        await self._ended.wait()

    async def evaluate(
        self, questions: Sequence[Question], *, max_concurrency: int = 64, num_samples: int = 4
    ) -> Evaluation:
        """Play held-out questions greedily, beside the training groups: behind those that are there
        and before later ones."""
        return await evaluate(
            questions,
            self._policy,
            self._environment,
            self._tokens,
            self._limits,
            max_concurrency=max_concurrency,
            episode_timeout_s=self._config.episode_timeout_s,
            priority=await self._oldest_version() or 0,
            num_samples=num_samples,
        )

    def configure(self, config: RolloutConfig) -> None:
        """Go by other settings from the next group on; groups in flight keep their deadline."""
        self._config = config
        self._budget.allow(config.max_failure_share)
        self._changed.set()

    def snapshot(self) -> RolloutSnapshot:
        """The counters now."""
        return self._counters.snapshot(
            worker_id=self._worker_id,
            num_groups_in_flight=len(self._groups),
            position=self._questions.state(),
        )

    async def _has_room(self) -> bool:
        """Wait until another group may start; False once the worker is stopping."""
        while not self._is_stopping and len(self._groups) >= self._config.max_groups_in_flight:
            self._changed.clear()
            await self._changed.wait()
        return not self._is_stopping

    async def _admit(self) -> list[Slot]:
        num_free = self._config.max_groups_in_flight - len(self._groups)

        self._counters.waiting.start()
        try:
            slots = await self._ask_store(
                lambda: self._replay.admit(num_free, self._oldest_version, ADMIT_POLL_S)
            )
        except WaitTimeout as refusal:
            self._counters.last_refusal = str(refusal)
            return []
        finally:
            self._counters.waiting.stop()
        self._counters.last_refusal = None
        if self._is_stopping:
            for slot in slots:
                await self._drop(slot, "shutdown")
            return []
        return slots

    def _start(self, slot: Slot, groups: asyncio.TaskGroup) -> None:
        task = groups.create_task(self._play_slot(slot, self._questions.next()))
        self._groups.add(task)
        self._counters.playing.start()
        task.add_done_callback(self._on_group_end)

    def _on_group_end(self, task: asyncio.Task[None]) -> None:
        self._groups.discard(task)
        if not self._groups:
            self._counters.playing.stop()
        self._changed.set()

    async def _play_slot(self, slot: Slot, question: Question) -> None:
        try:
            attributes = {"leeway.question": question.id, "leeway.worker": self._worker_id}
            with tracing.group_span(slot.slot_id, attributes):
                failure = await self._fill_or_drop(slot, question)
        except BaseException as error:
            # Cancelled, or a fault of the program: no time to be patient, but the slot goes back.
            is_shutdown = isinstance(error, asyncio.CancelledError)
            await self._drop_at_once(slot, "shutdown" if is_shutdown else "crash")
            raise
        if failure is not None:
            self._budget.record_failure(failure)

    async def _fill_or_drop(self, slot: Slot, question: Question) -> EpisodeFailure | None:
        try:
            await self._fill(slot, question)
        except EpisodeFailure as failure:
            log.warning("group %s dropped (%s): %s", slot.slot_id, failure.reason, failure)
            await self._drop(slot, failure.reason)
            return failure
        return None

    async def _fill(self, slot: Slot, question: Question) -> None:
        await self._turnstile.enter()
        prompt_ids = encode_prompt(question, self._environment, self._tokens, self._limits)
        group = await play_group(
            GroupId(slot.slot_id),
            question,
            self._worker_id,
            partial(self._play_episode, prompt_ids, slot.version),
            size=self._config.group_size,
            timeout_s=self._config.episode_timeout_s,
        )
        try:
            await self._ask_store(lambda: self._replay.add(slot, group))
        except SlotExpired as error:
            # Nothing to hand back. Not a failure of the budget: a Redis that was away for a while
            # expires every slot in flight at once.
            log.warning("group %s: %s", slot.slot_id, error)
            self._counters.dropped["slot-expired"] += 1
        except DataError as error:
            raise GroupRefused(str(error)) from error
        else:
            self._counters.num_groups_added += 1
            self._budget.record_success()

    async def _play_episode(
        self, prompt_ids: list[int], priority: int, question: Question, trajectory_id: str
    ) -> Trajectory:
        in_flight = self._counters.begin()
        try:
            with tracing.span("rollout.episode", {"leeway.trajectory": trajectory_id}):
                trajectory = await play(
                    question,
                    self._policy,
                    self._environment,
                    self._tokens,
                    self._limits,
                    trajectory_id,
                    priority=priority,
                    prompt_ids=prompt_ids,
                    turnstile=self._turnstile,
                    in_flight=in_flight,
                )
        finally:
            self._counters.end(in_flight)
        self._counters.count(trajectory)
        return trajectory

    async def _finish(self) -> None:
        """Wait out the grace period, then cancel what is left; each hands its own slot back."""
        if not self._groups:
            return
        _, late = await asyncio.wait(self._groups, timeout=self._grace_s)
        for task in late:
            task.cancel()

    async def _drop(self, slot: Slot, reason: str) -> None:
        await self._ask_store(lambda: self._replay.drop(slot, reason))
        self._counters.dropped[reason] += 1

    async def _drop_at_once(self, slot: Slot, reason: str) -> None:
        self._counters.dropped[reason] += 1
        try:
            async with asyncio.timeout(DROP_TIMEOUT_S):
                await self._replay.drop(slot, reason)
        except (StoreError, TimeoutError) as error:
            log.warning("slot %s was not handed back and will expire: %s", slot.slot_id, error)

    async def _ask_store(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call replay; while it does not answer try again, `store_timeout_s` in all."""
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_delay(self._store_timeout_s),
            wait=tenacity.wait_exponential_jitter(initial=0.1, max=2.0, jitter=0.1),
            retry=tenacity.retry_if_exception_type(StoreUnavailable),
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                return await call()
        raise AssertionError("tenacity ends a retry by returning or raising")
