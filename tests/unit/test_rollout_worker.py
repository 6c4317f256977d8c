"""The rollout worker: every slot ends in add or drop, and what ends the worker is raised."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from leeway.actors.config import RolloutConfig, SearchConfig
from leeway.actors.environment import Question
from leeway.actors.failures import FailureBudgetExceeded, RetrievalError
from leeway.actors.policy import Completion, CompletionRequest
from leeway.actors.rollout import Limits
from leeway.actors.scripted_policy import ScriptedPolicy
from leeway.actors.search.environment import SearchEnvironment
from leeway.actors.search.protocol import TAGS
from leeway.actors.search.questions import QuestionStream
from leeway.actors.search.retriever import Passage
from leeway.actors.tokens import Tokens, write_byte_tokenizer
from leeway.actors.worker import RolloutWorker
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import DataError, SlotExpired, StoreUnavailable, WaitTimeout
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.schema import Group, PolicyVersion, check_group
from leeway.replay.store import Replay, Slot, VersionSource

ANSWER = "<answer>krone</answer>"
SEARCH = "<search>x</search>"
LIMITS = Limits(max_turns=2, max_turn_tokens=60, max_observation_tokens=200, max_model_len=600)
QUESTIONS = [Question(id=f"q{i}", question=f"{i}?", golden_answers=("krone",)) for i in range(5)]


class SlotBook:
    """The part of replay that a worker sees: slots to give, and a book of where they went."""

    def __init__(self, num_slots: int) -> None:
        self.num_left = num_slots
        self.held: set[str] = set()
        self.most_held = 0
        self.added: dict[str, Group] = {}
        self.dropped: dict[str, str] = {}
        self.asked: list[tuple[int, int]] = []
        self.fail: dict[str, list[Exception]] = {"admit": [], "add": [], "drop": []}

    def _fail(self, call: str) -> None:
        if self.fail[call]:
            raise self.fail[call].pop(0)

    async def admit(self, n: int, source: VersionSource, timeout_s: float) -> list[Slot]:
        self._fail("admit")
        version = await source()
        assert version is not None
        self.asked.append((n, version))
        num = min(n, self.num_left)
        if num == 0:
            await asyncio.sleep(min(timeout_s, 0.02))
            raise WaitTimeout("no slot: window, 4 outstanding of 4")
        self.num_left -= num
        slots = [Slot(f"s{self.num_left + i}", version) for i in range(num)]
        self.held |= {slot.slot_id for slot in slots}
        self.most_held = max(self.most_held, len(self.held))
        return slots

    async def add(self, slot: Slot, group: Group) -> None:
        self._fail("add")
        check_group(group)
        self.held.remove(slot.slot_id)
        self.added[slot.slot_id] = group

    async def drop(self, slot: Slot, reason: str) -> None:
        self._fail("drop")
        self.held.discard(slot.slot_id)
        self.dropped[slot.slot_id] = reason


class Passages:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def search(self, query: str, top_k: int) -> list[Passage]:
        if self.error:
            raise self.error
        return [Passage(id="1", title="T", text="text", score=1.0)]

    async def close(self) -> None: ...


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    write_byte_tokenizer(tmp_path, TAGS)
    return Tokens.load(tmp_path)


async def version_7() -> PolicyVersion:
    return PolicyVersion(7)


def build(
    tokens: Tokens,
    replay: SlotBook | MemoryReplay,
    script: Callable[[str], str] | dict[str, str] | None = None,
    *,
    retriever: Passages | None = None,
    token_delay_s: float = 0.0,
    store_timeout_s: float = 5.0,
    oldest_version=version_7,
    **config: Any,
) -> RolloutWorker:
    return RolloutWorker(
        worker_id="w0",
        replay=cast(Replay, replay),
        policy=ScriptedPolicy(
            tokens, script or {"": ANSWER}, version=7, token_delay_s=token_delay_s
        ),
        environment=SearchEnvironment(SearchConfig(), 0.1, retriever or Passages()),
        tokens=tokens,
        questions=QuestionStream(QUESTIONS, seed=0),
        config=RolloutConfig(**{"group_size": 2, "max_groups_in_flight": 3, **config}),
        limits=LIMITS,
        oldest_version=oldest_version,
        store_timeout_s=store_timeout_s,
    )


@asynccontextmanager
async def running(worker: RolloutWorker) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(is_true: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_true():
            await asyncio.sleep(0.005)


async def test_every_slot_is_filled_with_a_group_of_its_own_name(tokens: Tokens):
    book = SlotBook(10)
    worker = build(tokens, book)
    async with running(worker):
        await until(lambda: len(book.added) == 10)
        await worker.stop()
    assert all(group.group_id == slot_id for slot_id, group in book.added.items())
    assert all(len(group.trajectories) == 2 for group in book.added.values())
    assert (book.held, book.dropped) == (set(), {})
    # ten groups are two epochs of five questions
    assert sorted(group.question_id for group in book.added.values()) == sorted(
        question.id for question in QUESTIONS * 2
    )


async def test_admission_asks_for_what_is_free_at_the_oldest_version(tokens: Tokens):
    book = SlotBook(7)
    worker = build(tokens, book, token_delay_s=0.001)
    async with running(worker):
        await until(lambda: len(book.added) == 7)
        await worker.stop()
    assert book.asked[0] == (3, 7)
    assert all(1 <= n <= 3 and version == 7 for n, version in book.asked)
    assert book.most_held <= 3


async def test_counters_add_up(tokens: Tokens):
    book = SlotBook(4)
    script = lambda text: ANSWER if "<information>" in text else SEARCH  # noqa: E731
    worker = build(tokens, book, script)
    async with running(worker):
        await until(lambda: len(book.added) == 4)
        await until(lambda: worker.snapshot().last_refusal is not None)
        await worker.stop()
    snapshot = worker.snapshot()
    # 4 groups of 2 episodes, each a search of 3 tokens and an answer of 7
    assert snapshot.num_groups_added == 4
    assert snapshot.episodes == {"answer": 8}
    assert snapshot.num_turns == 16
    assert snapshot.num_tokens == 80
    assert (snapshot.num_groups_in_flight, snapshot.num_episodes_in_flight) == (0, 0)
    assert snapshot.dropped == {}
    assert snapshot.last_refusal == "no slot: window, 4 outstanding of 4"
    assert snapshot.position.position == 4
    assert snapshot.wait_admission_s > 0
    assert snapshot.playing_s > 0


async def test_a_failed_group_gives_its_slot_back_with_the_reason(tokens: Tokens):
    book = SlotBook(3)
    worker = build(
        tokens, book, {"": SEARCH}, retriever=Passages(RetrievalError("down")), max_failure_share=1
    )
    async with running(worker):
        await until(lambda: len(book.dropped) == 3)
        await worker.stop()
    assert set(book.dropped.values()) == {"retriever"}
    assert worker.snapshot().dropped == {"retriever": 3}
    assert worker.snapshot().num_episodes_in_flight == 0
    assert not book.held


async def test_a_group_past_its_deadline_is_dropped_as_a_timeout(tokens: Tokens):
    book = SlotBook(1)
    worker = build(tokens, book, token_delay_s=0.1, episode_timeout_s=0.05)
    async with running(worker):
        await until(lambda: len(book.dropped) == 1)
        await worker.stop()
    assert list(book.dropped.values()) == ["timeout"]


async def test_too_many_failures_end_the_run_with_a_sentence(tokens: Tokens):
    book = SlotBook(100)
    worker = build(tokens, book, {"": SEARCH}, retriever=Passages(RetrievalError("r is down")))
    with pytest.raises(FailureBudgetExceeded, match=r"11 of the last 11 .*retriever 11.*r is down"):
        await asyncio.wait_for(worker.run(), 5)
    assert not book.held


async def test_an_expired_slot_is_counted_and_the_worker_goes_on(tokens: Tokens):
    book = SlotBook(4)
    book.fail["add"] = [SlotExpired("slot s3 expired")]
    worker = build(tokens, book)
    async with running(worker):
        await until(lambda: len(book.added) == 3)
        await worker.stop()
    assert worker.snapshot().dropped == {"slot-expired": 1}
    assert book.dropped == {}


async def test_a_group_that_replay_refuses_is_dropped_as_refused(tokens: Tokens):
    book = SlotBook(2)
    book.fail["add"] = [DataError("a token is older than its slot")]
    worker = build(tokens, book)
    async with running(worker):
        await until(lambda: len(book.added) == 1 and len(book.dropped) == 1)
        await worker.stop()
    assert list(book.dropped.values()) == ["refused"]


@pytest.mark.parametrize("call", ["admit", "add"])
async def test_a_store_that_comes_back_is_asked_again(tokens: Tokens, call: str):
    book = SlotBook(2)
    book.fail[call] = [StoreUnavailable("no answer")] * 2
    worker = build(tokens, book)
    async with running(worker):
        await until(lambda: len(book.added) == 2)
        await worker.stop()
    assert worker.snapshot().dropped == {}


@pytest.mark.parametrize("call", ["admit", "add"])
async def test_a_store_that_stays_away_ends_the_worker(tokens: Tokens, call: str):
    book = SlotBook(2)
    book.fail[call] = [StoreUnavailable("no answer from Redis")] * 1000
    worker = build(tokens, book, store_timeout_s=0.2)
    with pytest.raises(StoreUnavailable, match="no answer from Redis"):
        await asyncio.wait_for(worker.run(), 5)


async def test_stopping_lets_groups_in_flight_end(tokens: Tokens):
    book = SlotBook(3)
    worker = build(tokens, book, token_delay_s=0.02)  # an answer takes 0.14 s
    async with running(worker) as task:
        await until(lambda: len(book.held) == 3)
        await worker.stop(grace_s=5.0)
        assert task.done() or await asyncio.wait_for(task, 1) is None
    assert len(book.added) == 3


async def test_after_the_grace_period_slots_are_handed_back_as_shutdown(tokens: Tokens):
    book = SlotBook(3)
    worker = build(tokens, book, token_delay_s=10.0)
    async with running(worker):
        await until(lambda: len(book.held) == 3)
        started = time.monotonic()
        await worker.stop(grace_s=0.1)
        assert time.monotonic() - started < 2.0
    assert set(book.dropped.values()) == {"shutdown"}
    assert not book.held
    assert worker.snapshot().dropped == {"shutdown": 3}


async def test_slots_granted_after_stop_are_handed_back_unplayed(tokens: Tokens):
    book = SlotBook(0)
    worker = build(tokens, book)
    granted = asyncio.Event()

    async def admit_late(n: int, source: VersionSource, timeout_s: float) -> list[Slot]:
        await granted.wait()
        return [Slot("late", PolicyVersion(7))]

    book.admit = admit_late  # type: ignore[method-assign]
    async with running(worker):
        await asyncio.sleep(0.02)
        stopping = asyncio.create_task(worker.stop())
        await asyncio.sleep(0.02)
        granted.set()
        await asyncio.wait_for(stopping, 2)
    assert book.dropped == {"late": "shutdown"}


async def test_a_cancelled_worker_hands_its_slots_back(tokens: Tokens):
    book = SlotBook(3)
    worker = build(tokens, book, token_delay_s=10.0)
    async with running(worker):
        await until(lambda: len(book.held) == 3)
    assert set(book.dropped.values()) == {"shutdown"}
    assert not book.held


async def test_a_fault_in_a_group_ends_the_worker_and_hands_every_slot_back(tokens: Tokens):
    book = SlotBook(3)

    def faulty(text: str) -> str:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        await asyncio.wait_for(build(tokens, book, faulty).run(), 5)
    assert not book.held
    assert set(book.dropped.values()) <= {"crash", "shutdown"}


async def test_a_fault_in_the_loop_is_raised(tokens: Tokens):
    async def broken_board() -> PolicyVersion:
        raise ZeroDivisionError("no engine")

    with pytest.raises(ZeroDivisionError, match="no engine"):
        await asyncio.wait_for(build(tokens, SlotBook(1), oldest_version=broken_board).run(), 5)


async def test_stopping_a_worker_that_never_ran_returns(tokens: Tokens):
    await asyncio.wait_for(build(tokens, SlotBook(1)).stop(), 1)


async def test_a_worker_evaluates_beside_its_groups(tokens: Tokens):
    book = SlotBook(3)
    worker = build(tokens, book)
    async with running(worker):
        result = await worker.evaluate(QUESTIONS)
        await until(lambda: len(book.added) == 3)
        await worker.stop()
    assert result.scores["exact_match"] == 1.0
    assert worker.snapshot().episodes == {"answer": 6}


async def test_requests_go_by_the_version_of_their_slot_and_an_evaluation_by_the_oldest_engine(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
):
    found: dict[str, set[int]] = {"group": set(), "evaluation": set()}
    complete = ScriptedPolicy.complete

    async def noted(self: ScriptedPolicy, request: CompletionRequest) -> Completion:
        name = "evaluation" if request.request_id.startswith("eval-") else "group"
        found[name].add(request.priority)
        return await complete(self, request)

    monkeypatch.setattr(ScriptedPolicy, "complete", noted)
    oldest = iter([3, 5, 4])

    async def oldest_version() -> PolicyVersion:
        return PolicyVersion(next(oldest, 4))

    book = SlotBook(2)
    worker = build(tokens, book, oldest_version=oldest_version, max_groups_in_flight=2)
    await worker.evaluate(QUESTIONS)
    async with running(worker):
        await until(lambda: len(book.added) == 2)
        await worker.stop()
    assert found == {"evaluation": {3}, "group": {5}}


async def test_a_stopped_worker_may_run_again(tokens: Tokens):
    book = SlotBook(2)
    worker = build(tokens, book)
    async with running(worker):
        await until(lambda: len(book.added) == 2)
        await worker.stop()
    book.num_left = 3
    async with running(worker):
        await until(lambda: len(book.added) == 3)
        await worker.stop()
    assert not book.held


async def test_the_window_paces_a_worker_and_the_learner_is_never_over_its_bound(tokens: Tokens):
    # two groups a step, staleness 1: at most four groups exist until the learner moves on
    replay = MemoryReplay(ReplayConfig(groups_per_step=2, max_staleness=1))
    worker = build(tokens, replay, max_groups_in_flight=16)
    policy = cast(ScriptedPolicy, worker._policy)
    policy.set_version(0)
    worker._oldest_version = policy.version
    async with running(worker):
        for step in range(5):
            lease = await replay.draw(timeout_s=5)
            assert len(lease.groups) == 2
            assert all(step - group.oldest_version <= 1 for group in lease.groups)
            await replay.acknowledge(lease, PolicyVersion(step + 1))
            assert worker.snapshot().num_groups_added <= 2 * step + 4
            policy.set_version(step + 1)
        await worker.stop()
    stats = await replay.stats()
    assert (stats.num_trained, stats.num_slots) == (10, 0)
    assert set(stats.dropped) <= {"shutdown"}


class Counting(SearchEnvironment):
    """Notes the pass of the event loop in which each turn is worked on, and counts its prompts."""

    num_passes = 0
    num_prompts = 0

    def prompt(self, question: Question) -> str:
        self.num_prompts += 1
        return super().prompt(question)

    async def step(self, question: Question, generated: str, turns_left: int):
        self.passes_of_steps = [*getattr(self, "passes_of_steps", []), self.num_passes]
        return await super().step(question, generated, turns_left)

    async def count_passes(self) -> None:
        while True:
            self.num_passes += 1
            await asyncio.sleep(0)


@pytest.fixture
async def counting(tokens: Tokens) -> Counting:
    """8 groups of 8 were played at once, every episode a search and an answer."""
    book = SlotBook(8)
    script = lambda text: ANSWER if "<information>" in text else SEARCH  # noqa: E731
    worker = build(tokens, book, script, group_size=8, max_groups_in_flight=8)
    environment = Counting(SearchConfig(), 0.1, Passages())
    worker._environment = environment
    counter = asyncio.create_task(environment.count_passes())
    async with running(worker):
        await until(lambda: len(book.added) == 8)
        await worker.stop()
    counter.cancel()
    return environment


async def test_no_two_turns_are_worked_on_in_one_pass_of_the_event_loop(counting: Counting):
    passes = counting.passes_of_steps
    assert len(passes) == 8 * 8 * 2
    assert len(set(passes)) == len(passes)


async def test_siblings_share_the_ids_of_one_prompt(counting: Counting):
    assert counting.num_prompts == 8
