"""Publishing over a real Redis, engines coming and going: by gloo, and into their memory. Engines
decode with torch."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leeway.actors.config import PolicyConfig
from leeway.actors.failures import EngineError
from leeway.actors.membership import Membership
from leeway.actors.policy import CompletionRequest
from leeway.actors.tokens import Tokens, write_byte_tokenizer
from leeway.actors.torch_policy import TorchPolicy
from leeway.actors.weight_receiver import Rendezvous
from leeway.learner.weights.publisher import Publisher
from leeway.replay.board import EngineRecord, EngineReport, PolicyBoard
from leeway.replay.errors import TransferError
from leeway.replay.exposed_memory import open_memory
from leeway.replay.flat_weights import pack
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis

CPU = torch.device("cpu")
HEARTBEAT_S, TIMEOUT_S = 0.2, 1.5
V1, V2, V3 = PolicyVersion(1), PolicyVersion(2), PolicyVersion(3)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokens.load(folder)


@pytest.fixture
async def board(url: str) -> AsyncIterator[PolicyBoard]:
    board = PolicyBoard(url, f"test-{uuid.uuid4().hex}")
    yield board
    await board.close()


@pytest.fixture(params=["collective", "direct"])
async def publisher(request: pytest.FixtureRequest, board: PolicyBoard) -> Publisher:
    publisher = Publisher(board, CPU, TIMEOUT_S, request.param)
    await publisher.resume()
    return publisher


by_broadcast = pytest.mark.parametrize("publisher", ["collective"], indirect=True)
"""For what happens in a process group alone."""


def network(seed: int, vocab_size: int = 257) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in network(seed).named_parameters()}


class Engines:
    """Starts engines, and kills them as a crash would: without a word, heartbeats ending."""

    def __init__(self, board: PolicyBoard, tokens: Tokens, stack: AsyncExitStack) -> None:
        self._board = board
        self._tokens = tokens
        self._stack = stack
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, engine_id: str, kind: type[TorchPolicy] = TorchPolicy) -> TorchPolicy:
        config = PolicyConfig(backend="torch", max_model_len=512)
        policy = kind(network(0), self._tokens, config, seed=0, version=PolicyVersion(0))
        membership = Membership(self._board, policy, engine_id, "here", heartbeat_s=HEARTBEAT_S)
        task = self._tasks[engine_id] = asyncio.create_task(membership.run())
        self._stack.push_async_callback(policy.close)
        self._stack.push_async_callback(self.stop, engine_id)
        while engine_id not in {engine.engine_id for engine in await self._board.engines()}:
            assert not task.done()
            await asyncio.sleep(0.01)
        return policy

    async def stop(self, engine_id: str) -> None:
        self._tasks[engine_id].cancel()
        await asyncio.wait({self._tasks[engine_id]}, timeout=10)

    async def haunt(self, engine_id: str, *says: str, ttl_s: float = 0.6) -> None:
        """An engine that dies after its last word, which it says to the first announcement."""
        await self._board.heartbeat(EngineRecord(engine_id, 1, "float32", [], 0, "here"), ttl_s)

        async def answer() -> None:
            announcement = await self._board.next_announcement(0, 10.0)
            assert announcement is not None
            for stage in says:
                await self._board.report(
                    EngineReport(
                        publish_id=announcement.publish_id,
                        engine_id=engine_id,
                        stage=stage,  # type: ignore[arg-type]
                        version=announcement.version,
                    )
                )

        self._tasks[engine_id] = asyncio.create_task(answer())
        self._stack.push_async_callback(self.stop, engine_id)


@pytest.fixture
async def engines(board: PolicyBoard, tokens: Tokens) -> AsyncIterator[Engines]:
    async with AsyncExitStack() as stack:
        yield Engines(board, tokens, stack)


def holds(policy: TorchPolicy, seed: int) -> bool:
    held = policy._model.state_dict()
    return all(torch.equal(held[name], tensor) for name, tensor in weights(seed).items())


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


# --- the first, the next, the resumed -----------------------------------------------------------


async def test_first_publish_reaches_every_engine(engines, publisher):
    a, b = await engines.start("a"), await engines.start("b")
    async with within(TIMEOUT_S):
        assert await publisher.publish(V1, pack(weights(1))) == 2
        published = await publisher.confirm()
    assert (published.version, published.num_engines, published.evicted) == (1, 2, {})
    assert published.transport == ("direct" if publisher.choice == "direct" else "gloo")
    assert len(published.pause_s) == 2
    for policy in (a, b):
        assert holds(policy, 1)
        assert await policy.version() == 1


async def test_no_engine_is_no_publish(publisher):
    assert await publisher.publish(V1, pack(weights(1))) == 0
    assert await publisher.confirm() is None


async def test_learner_that_restarts_publishes_to_the_same_engine(engines, board, publisher):
    a = await engines.start("a")
    await publisher.publish(V1, pack(weights(1)))
    await publisher.confirm()
    restarted = Publisher(board, CPU, TIMEOUT_S, publisher.choice)
    await restarted.resume()
    async with within(TIMEOUT_S):
        assert await restarted.publish(V2, pack(weights(2))) == 1
        await restarted.confirm()
    assert holds(a, 2)
    latest = await board.latest_announcement()
    assert (latest.publish_id, latest.group_number) == (2, 2)


async def test_learner_that_died_during_a_publish_is_followed_by_the_next(
    engines, board, publisher
):
    a = await engines.start("a")
    dying = asyncio.create_task(publisher.publish(V1, pack(weights(1))))
    while await board.latest_announcement() is None:
        await asyncio.sleep(0)
    dying.cancel()
    await asyncio.wait({dying})
    restarted = Publisher(board, CPU, TIMEOUT_S, publisher.choice)
    await restarted.resume()
    async with within(TIMEOUT_S + 1.0):
        assert await restarted.publish(V2, pack(weights(2))) == 1
        assert (await restarted.confirm()).evicted == {}
    assert holds(a, 2)


async def test_engine_that_joins_late_gets_the_next_publish(engines, board, publisher):
    a = await engines.start("a")
    await publisher.publish(V1, pack(weights(1)))
    await publisher.confirm()
    b = await engines.start("b")
    assert await b.version() == 0
    assert await publisher.publish(V2, pack(weights(2))) == 2
    await publisher.confirm()
    assert holds(a, 2)
    assert holds(b, 2)
    assert (await board.latest_announcement()).group_number == 2


# --- engines that die ---------------------------------------------------------------------------


async def test_engine_that_dies_after_the_announcement_does_not_keep_the_others(engines, publisher):
    a = await engines.start("a")
    await engines.haunt("b")
    async with within(2 * TIMEOUT_S):
        assert await publisher.publish(V1, pack(weights(1))) == 1
        published = await publisher.confirm()
    assert list(published.evicted) == ["b"]
    assert holds(a, 1)


async def test_engine_that_dies_while_the_group_forms_does_not_keep_the_others(engines, publisher):
    a = await engines.start("a")
    await engines.haunt("b", "ready")
    # The group fails at its deadline; b's heartbeat has ended by then, and a is alone.
    async with within(3 * TIMEOUT_S):
        assert await publisher.publish(V1, pack(weights(1))) == 1
        await publisher.confirm()
    assert holds(a, 1)


async def test_engine_that_dies_between_publishes_is_left_out_of_the_next_group(
    engines, board, publisher
):
    a, _ = await engines.start("a"), await engines.start("b")
    await publisher.publish(V1, pack(weights(1)))
    await publisher.confirm()
    await engines.stop("b")
    async with within(TIMEOUT_S):
        assert await publisher.publish(V2, pack(weights(2))) == 1
        await publisher.confirm()
    assert holds(a, 2)
    assert (await board.latest_announcement()).group_number == 2


class StuckPolicy(TorchPolicy):
    """Its first receive never ends, as that of a process that was stopped."""

    num_stuck = 0

    async def stage(self, delivery):
        if self.num_stuck == 0:
            self.num_stuck = 1
            await asyncio.sleep(60)
        return await super().stage(delivery)


@by_broadcast
async def test_engine_that_is_stuck_once_is_sent_to_again_in_a_new_group(engines, board, publisher):
    a, b = await engines.start("a"), await engines.start("b", StuckPolicy)
    async with within(3 * TIMEOUT_S):
        assert await publisher.publish(V1, pack(weights(1))) == 2
        assert (await publisher.confirm()).evicted == {}
    assert holds(a, 1)
    assert holds(b, 1)
    assert (await board.latest_announcement()).group_number == 2


class SilentPolicy(TorchPolicy):
    """It shows its memory, and hears nothing of what is written there: the first time."""

    num_silent = 0

    async def arrived(self, checksum, wire_s):
        if self.num_silent == 0:
            self.num_silent = 1
            await asyncio.sleep(60)
        await super().arrived(checksum, wire_s)


@pytest.mark.parametrize("publisher", ["direct"], indirect=True)
async def test_engine_that_does_not_see_what_was_written_is_left_behind_and_comes_back(
    engines, board, publisher
):
    a, b = await engines.start("a"), await engines.start("b", SilentPolicy)
    async with within(3 * TIMEOUT_S):
        assert await publisher.publish(V1, pack(weights(1))) == 2
        published = await publisher.confirm()
    assert list(published.evicted) == ["b"]
    assert (holds(a, 1), holds(b, 0)) == (True, True)
    await asyncio.sleep(3 * HEARTBEAT_S)
    assert await publisher.publish(V2, pack(weights(2))) == 2
    assert (await publisher.confirm()).evicted == {}
    assert (holds(a, 2), holds(b, 2)) == (True, True)


class OverwrittenPolicy(TorchPolicy):
    """A learner that was given up goes on, and writes into memory that another's version is in."""

    async def arrived(self, checksum, wire_s):
        await super().arrived(checksum, wire_s)
        open_memory(self._staging.memory(), CPU)[:4] = 1


@pytest.mark.parametrize("publisher", ["direct"], indirect=True)
async def test_engine_that_took_what_nobody_published_leaves_the_board_for_good(
    engines, board, publisher
):
    a, _ = await engines.start("a"), await engines.start("b", OverwrittenPolicy)
    await publisher.publish(V1, pack(weights(1)))
    published = await publisher.confirm()
    assert list(published.evicted) == ["b"]
    assert "is another learner at work?" in published.evicted["b"]
    await asyncio.sleep(3 * HEARTBEAT_S)
    assert [engine.engine_id for engine in await board.engines()] == ["a"]
    assert holds(a, 1)


class SlowPolicy(TorchPolicy):
    """Does not get its weights into place."""

    async def commit(self, version, checksum):
        await asyncio.sleep(60)
        return await super().commit(version, checksum)


async def test_engine_that_does_not_commit_in_time_is_evicted_for_good(engines, board, publisher):
    a, b = await engines.start("a"), await engines.start("b", SlowPolicy)
    async with within(2 * TIMEOUT_S):
        assert await publisher.publish(V1, pack(weights(1))) == 2
        published = await publisher.confirm()
    assert list(published.evicted) == ["b"]
    assert "within 1.5 s" in published.evicted["b"]
    assert (published.num_engines, holds(a, 1), holds(b, 0)) == (1, True, True)
    await asyncio.sleep(3 * HEARTBEAT_S)
    assert [engine.engine_id for engine in await board.engines()] == ["a"]


class UnreachablePolicy(TorchPolicy):
    """Cannot reach the learner's address."""

    async def join(self, rendezvous: Rendezvous) -> None:
        raise TransferError("could not join: no route to host")


@by_broadcast
async def test_engine_that_cannot_join_ends_the_publish_with_its_reason(engines, publisher):
    await engines.start("a")
    await engines.start("b", UnreachablePolicy)
    async with within(12 * TIMEOUT_S):
        with pytest.raises(TransferError, match=r"not published: .*b: .*no route to host"):
            # Where its heartbeat is late it is off the board, and a publish goes on without it.
            for version in range(1, 6):
                await publisher.publish(PolicyVersion(version), pack(weights(version)))
                await publisher.confirm()
                await asyncio.sleep(3 * HEARTBEAT_S)


class ForgetfulPolicy(TorchPolicy):
    """Says what it was sent, but uses something else."""

    async def commit(self, version, checksum):
        committed = await super().commit(version, checksum)
        return type(committed)(version=version, checksum="0" * 16, pause_s=committed.pause_s)


async def test_engine_that_uses_other_weights_leaves_the_board_for_good(engines, board, publisher):
    a, _ = await engines.start("a"), await engines.start("b", ForgetfulPolicy)
    await publisher.publish(V1, pack(weights(1)))
    published = await publisher.confirm()
    assert list(published.evicted) == ["b"]
    assert "checksum 0000000000000000 is in use" in published.evicted["b"]
    await asyncio.sleep(3 * HEARTBEAT_S)
    assert [engine.engine_id for engine in await board.engines()] == ["a"]
    assert await publisher.publish(V2, pack(weights(2))) == 1
    await publisher.confirm()
    assert holds(a, 2)


# --- closing ------------------------------------------------------------------------------------


async def test_closed_policy_fails_what_is_in_flight_and_what_comes_later(tokens):
    config = PolicyConfig(backend="torch", max_model_len=4096)
    policy = TorchPolicy(network(0), tokens, config, seed=0, version=PolicyVersion(0))

    def complete(request_id: str) -> asyncio.Task:
        request = CompletionRequest(
            request_id=request_id, prompt_ids=[1], max_tokens=4000, temperature=0.0
        )
        return asyncio.create_task(policy.complete(request))

    running = complete("running")
    await asyncio.sleep(0.1)
    waiting = complete("waiting")
    await asyncio.sleep(0)
    async with within(3.0):
        await policy.close()
    for task in (running, waiting, complete("later")):
        with pytest.raises(EngineError, match="the policy is closed"):
            await asyncio.wait_for(task, 5)
    with pytest.raises(EngineError, match="has ended"):
        await policy.check()
