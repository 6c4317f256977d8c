"""Publishing from a learner on one GPU to an engine that decodes with torch on another: over NCCL,
and straight into its memory.

Engines come and go, learners too; whatever hangs ends at its deadline and leaves nothing behind
that the next transfer would stumble over.
"""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from leeway.actors.config import PolicyConfig  # noqa: E402
from leeway.actors.membership import Membership  # noqa: E402
from leeway.actors.tokens import Tokens, write_byte_tokenizer  # noqa: E402
from leeway.actors.torch_policy import TorchPolicy  # noqa: E402
from leeway.actors.weight_receiver import Delivery  # noqa: E402
from leeway.learner.weights.publisher import Publisher  # noqa: E402
from leeway.replay.board import PolicyBoard  # noqa: E402
from leeway.replay.errors import TransferError  # noqa: E402
from leeway.replay.flat_weights import describe, pack  # noqa: E402
from leeway.replay.schema import PolicyVersion  # noqa: E402
from leeway.replay.server import EmbeddedRedis  # noqa: E402

LEARNER, ENGINE = torch.device("cuda", 0), torch.device("cuda", 1)
HEARTBEAT_S, TIMEOUT_S = 0.2, 4.0
V1, V2, V3 = PolicyVersion(1), PolicyVersion(2), PolicyVersion(3)


@cache
def network(seed: int) -> LlamaForCausalLM:
    """Large enough that a broadcast to nobody does not fit into NCCL's own buffers."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    with LEARNER:
        return LlamaForCausalLM(config).requires_grad_(False)


def weights(seed: int) -> dict[str, torch.Tensor]:
    return dict(network(seed).named_parameters())


class World:
    """A board, a learner's publisher, and engines by name."""

    def __init__(self, url: str, tokens: Tokens, choice: str) -> None:
        self.board = PolicyBoard(url, f"test-{uuid.uuid4().hex}")
        self.publisher = Publisher(self.board, LEARNER, TIMEOUT_S, choice)
        self._tokens = tokens
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, kind: type[TorchPolicy] = TorchPolicy) -> TorchPolicy:
        model = copy.deepcopy(network(0)).to(ENGINE)
        config = PolicyConfig(max_model_len=64, max_num_seqs=2)
        policy = kind(model, self._tokens, config, seed=0, version=PolicyVersion(0))
        membership = Membership(self.board, policy, name, "here", heartbeat_s=HEARTBEAT_S)
        self._tasks[name] = asyncio.create_task(membership.run())
        await self.listed(name)
        return policy

    async def listed(self, name: str) -> None:
        """Its heartbeat may have been late: whole models are compared on this event loop."""
        while name not in [e.engine_id for e in await self.board.engines()]:
            await asyncio.sleep(0.02)

    async def kill(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)

    async def close(self) -> None:
        for name in list(self._tasks):
            await self.kill(name)
        await self.board.close()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokens.load(folder)


@asynccontextmanager
async def world(url: str, tokens: Tokens, choice: str = "collective") -> AsyncIterator[World]:
    for seed in range(4):  # building them would keep heartbeats waiting
        network(seed)
    found = World(url, tokens, choice)
    try:
        async with asyncio.timeout(60):
            yield found
    finally:
        await found.close()


def holds(policy: TorchPolicy, expected: dict[str, torch.Tensor]) -> bool:
    held = dict(policy._model.named_parameters())
    return all(torch.equal(held[name].cpu(), t.cpu()) for name, t in expected.items())


@pytest.mark.parametrize(
    ("choice", "transport"), [("collective", "nccl"), ("auto", "direct"), ("direct", "direct")]
)
def test_engine_holds_what_was_sent_bit_by_bit(redis_url, tokens, choice, transport):
    async def check() -> None:
        async with world(redis_url, tokens, choice) as at:
            policy = await at.start("a")
            for version, seed in ((V1, 1), (V2, 2)):
                packed = pack(weights(seed))
                torch.cuda.synchronize(LEARNER)
                await at.listed("a")
                assert await at.publisher.publish(version, packed) == 1
                published = await at.publisher.confirm()
                assert (published.version, published.evicted) == (version, {})
                assert published.wire_s > 0
                assert published.transport == transport
                assert holds(policy, weights(seed))

    asyncio.run(check())


def test_weights_in_float32_travel_rounded_to_bfloat16_where_that_is_asked(redis_url, tokens):
    async def check() -> None:
        async with world(redis_url, tokens) as at:
            policy = await at.start("a")
            sent = weights(1)
            await at.publisher.publish(V1, pack(sent, describe(sent, torch.bfloat16)))
            assert (await at.publisher.confirm()).num_engines == 1
            assert holds(policy, {name: t.bfloat16().float() for name, t in sent.items()})

    asyncio.run(check())


@pytest.mark.parametrize("choice", ["collective", "direct"])
def test_engine_lost_and_engine_added_each_make_a_new_group(redis_url, tokens, choice):
    async def check() -> None:
        async with world(redis_url, tokens, choice) as at:
            await at.start("a")
            await at.publisher.publish(V1, pack(weights(1)))
            await at.publisher.confirm()
            await at.kill("a")
            assert await at.publisher.publish(V2, pack(weights(2))) == 0
            policy = await at.start("b")
            assert await at.publisher.publish(V3, pack(weights(3))) == 1
            assert (await at.publisher.confirm()).num_engines == 1
            assert holds(policy, weights(3))

    asyncio.run(check())


@pytest.mark.parametrize("choice", ["collective", "direct"])
def test_learner_that_starts_again_publishes_to_the_engine_that_is_there(redis_url, tokens, choice):
    async def check() -> None:
        async with world(redis_url, tokens, choice) as at:
            policy = await at.start("a")
            await at.publisher.publish(V1, pack(weights(1)))
            await at.publisher.confirm()
            restarted = Publisher(at.board, LEARNER, TIMEOUT_S, choice)
            await restarted.resume()
            assert await restarted.publish(V2, pack(weights(2))) == 1
            assert (await restarted.confirm()).num_engines == 1
            assert holds(policy, weights(2))

    asyncio.run(check())


class StuckOnce(TorchPolicy):
    """In the group, but it does not receive: the first time."""

    num_stuck = 0

    async def stage(self, delivery: Delivery) -> float:
        if type(self).num_stuck == 0:
            type(self).num_stuck = 1
            await asyncio.sleep(60)
        return await super().stage(delivery)


def test_broadcast_to_an_engine_that_does_not_receive_ends_at_its_deadline(redis_url, tokens):
    async def check() -> None:
        StuckOnce.num_stuck = 0
        async with world(redis_url, tokens) as at:
            policy = await at.start("a", StuckOnce)
            began = time.monotonic()
            # Tried again, in a new group, after the first has failed.
            assert await at.publisher.publish(V1, pack(weights(1))) == 1
            assert TIMEOUT_S <= time.monotonic() - began < 4 * TIMEOUT_S
            assert (await at.publisher.confirm()).num_engines == 1
            assert holds(policy, weights(1))

    asyncio.run(check())


class Stuck(TorchPolicy):
    """It never receives."""

    async def stage(self, delivery: Delivery) -> float:
        await asyncio.sleep(60)
        return 0.0


def test_engine_that_never_receives_costs_its_deadlines_and_no_more(redis_url, tokens):
    async def check() -> None:
        async with world(redis_url, tokens) as at:
            await at.start("a", Stuck)
            began = time.monotonic()
            with pytest.raises(TransferError, match="not through within 4 s"):
                await at.publisher.publish(V1, pack(weights(1)))
            assert time.monotonic() - began < 5 * TIMEOUT_S
            await at.kill("a")
            policy = await at.start("b")
            assert await at.publisher.publish(V2, pack(weights(2))) == 1
            assert (await at.publisher.confirm()).num_engines == 1
            assert holds(policy, weights(2))

    asyncio.run(check())
