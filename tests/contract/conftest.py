"""Fixtures of the contract tests: one embedded Redis for the session, a run of its own per test.

Engines are slow to start, so each serves the whole session: its fixtures, and every test that uses
them, run on the session's event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from leeway.actors.config import PolicyConfig
from leeway.actors.policy import Completion, CompletionRequest, Policy
from leeway.actors.search.protocol import TAGS
from leeway.actors.tokens import Tokens, write_byte_tokenizer
from leeway.replay.board import PolicyBoard
from leeway.replay.config import ReplayConfig
from leeway.replay.flat_weights import pack
from leeway.replay.memory_store import MemoryReplay
from leeway.replay.redis_store import RedisReplay
from leeway.replay.schema import PolicyVersion
from leeway.replay.server import EmbeddedRedis
from leeway.replay.store import Replay

if TYPE_CHECKING:
    import torch

    from leeway.actors.membership import Membership
    from leeway.learner.weights.publisher import Publisher

BuildReplay = Callable[..., Replay]
SetVersion = Callable[[int], Awaitable[None]]
PolicyFactory = Callable[[], AbstractAsyncContextManager[tuple[Policy, Tokens, SetVersion]]]

MAX_MODEL_LEN = 1024
TIMEOUT_S = 20.0
HEARTBEAT_S = 0.5


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(params=["memory", "redis"])
async def build_replay(
    request: pytest.FixtureRequest, redis_url: str
) -> AsyncIterator[BuildReplay]:
    """A builder of empty buffers from ReplayConfig settings; unless told, 2 groups a step and a
    full window."""
    closers: list[Callable[[], Awaitable[None]]] = []

    def build(**settings: object) -> Replay:
        usual = {"groups_per_step": 2, "max_staleness": 1, "lookahead": "full"}
        config = ReplayConfig.model_validate({**usual, **settings})
        run = f"test-{uuid.uuid4().hex}"
        is_memory = request.param == "memory"
        replay = MemoryReplay(config) if is_memory else RedisReplay(redis_url, run, config)
        closers.append(replay.close)
        return replay

    yield build
    for close in closers:
        await close()


# --- policies that receive weights ---------------------------------------------------------------


class TinyModel:
    """Random weights of two layers, as the learner holds them: a Llama with tied embeddings, unless
    told otherwise."""

    def __init__(self, tokens: Tokens, seed: int, family: str = "llama", **changes: object) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(seed)
        settings = {
            "vocab_size": tokens.vocab_size,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": MAX_MODEL_LEN,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
            "bos_token_id": None,
            "eos_token_id": tokens.eos_id,
        }
        config = AutoConfig.for_model(family, **{**settings, **changes})
        self.network: Any = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            # Norms are 1 at the start and biases 0, and would not show that they were left out.
            for parameter in self.network.parameters():
                if parameter.ndim == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
            # The end of sequence gets logit 0 always, so a greedy completion does not end early.
            self.network.get_output_embeddings().weight[tokens.eos_id] = 0.0

    def weights(self) -> dict[str, torch.Tensor]:
        """What LearnerProcess publishes: parameters once, and saved buffers."""
        return {name: tensor.detach() for name, tensor in self.network.named_parameters()}

    def logprobs(self, prompt_ids: list[int], token_ids: list[int]) -> list[float]:
        """Log-prob of each token of a completion."""
        import torch

        with torch.no_grad():
            logits = self.network(torch.tensor([prompt_ids + token_ids])).logits[0].float()
        log_p = logits[len(prompt_ids) - 1 : -1].log_softmax(-1)
        return log_p.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


@dataclass
class Receiver:
    """A policy with its place on the policy board, and the learner's end of the line."""

    policy: Any
    tokens: Tokens
    board: PolicyBoard
    publisher: Publisher
    membership: Membership
    models: tuple[TinyModel, TinyModel]
    """Two models to take turns; the first one is what the policy started with."""

    async def complete(self, prompt_ids: list[int], max_tokens: int, **more: Any) -> Completion:
        """A greedy completion unless told otherwise."""
        request = {"request_id": uuid.uuid4().hex, "temperature": 0.0, **more}
        return await self.policy.complete(
            CompletionRequest(prompt_ids=prompt_ids, max_tokens=max_tokens, **request)
        )

    async def next_version(self) -> PolicyVersion:
        """The version to publish now."""
        return PolicyVersion(await self.policy.version() + 1)

    async def publish(self, weights: Mapping[str, torch.Tensor], version: int | None = None) -> Any:
        """Publish and confirm; the engine must have taken it."""
        await self.wait_listed()
        await self.publisher.resume()
        new = PolicyVersion(version) if version is not None else await self.next_version()
        assert await self.publisher.publish(new, pack(weights)) == 1
        published = await self.publisher.confirm()
        assert published is not None
        assert (published.version, published.evicted) == (new, {})
        return published

    def take(self, choice: str) -> None:
        """Be published to by a learner that starts anew, with this `learner.transport`."""
        import torch

        from leeway.learner.weights.publisher import Publisher

        self.publisher = Publisher(self.board, torch.device("cpu"), TIMEOUT_S, choice)

    async def wait_listed(self) -> None:
        """An engine that was evicted is back with its next heartbeat."""
        async with asyncio.timeout(TIMEOUT_S):
            while not await self.board.engines():
                await asyncio.sleep(0.02)


@asynccontextmanager
async def receiving(
    start: Callable[[Path], Awaitable[Any]], folder: Path, redis_url: str, **kind: object
) -> AsyncIterator[Receiver]:
    """Start a policy from a tiny model of that kind in `folder` and keep it on its own board."""
    import torch

    from leeway.actors.membership import Membership
    from leeway.learner.weights.publisher import Publisher

    write_byte_tokenizer(folder, TAGS)
    tokens = Tokens.load(folder)
    models = (TinyModel(tokens, 0, **kind), TinyModel(tokens, 1, **kind))
    models[0].network.save_pretrained(folder)
    policy = await start(folder)
    board = PolicyBoard(redis_url, f"test-{uuid.uuid4().hex}")
    membership = Membership(board, policy, "engine", "here", heartbeat_s=HEARTBEAT_S)
    running = asyncio.create_task(membership.run())
    publisher = Publisher(board, torch.device("cpu"), TIMEOUT_S)
    try:
        yield Receiver(policy, tokens, board, publisher, membership, models)
    finally:
        running.cancel()
        await asyncio.wait({running}, timeout=TIMEOUT_S)
        await policy.close()
        await board.close()


def factory_of(receiver: Receiver) -> PolicyFactory:
    """`set_version` publishes weights that differ a little each time."""

    @asynccontextmanager
    async def factory() -> AsyncIterator[tuple[Policy, Tokens, SetVersion]]:
        async def set_version(version: int) -> None:
            scale = 1.0 + 0.001 * (version % 7)
            weights = {n: scale * w for n, w in receiver.models[0].weights().items()}
            await receiver.publish(weights, version)

        yield receiver.policy, receiver.tokens, set_version

    return factory


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def torch_receiver(
    redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Receiver]:
    policies = pytest.importorskip("leeway.actors.torch_policy")
    config = PolicyConfig(backend="torch", max_model_len=MAX_MODEL_LEN)

    async def start(folder: Path) -> Any:
        return await policies.TorchPolicy.start(folder, config, seed=0, version=PolicyVersion(0))

    async with receiving(start, tmp_path_factory.mktemp("torch"), redis_url) as receiver:
        yield receiver


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_receiver(
    redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Receiver]:
    pytest.importorskip("vllm")
    policies = pytest.importorskip("leeway.actors.vllm_policy")
    psutil = pytest.importorskip("psutil")
    config = PolicyConfig(max_model_len=MAX_MODEL_LEN)

    async def start(folder: Path) -> Any:
        return await policies.VllmPolicy.start(folder, config, seed=0, version=PolicyVersion(0))

    async with receiving(start, tmp_path_factory.mktemp("vllm"), redis_url) as receiver:
        engine_processes = [
            process
            for process in psutil.Process().children(recursive=True)
            if process.name().startswith("VLLM::")
        ]
        yield receiver
    assert engine_processes
    assert not any(process.is_running() for process in engine_processes)


@pytest.fixture(scope="session")
def torch_policy_factory(torch_receiver: Receiver) -> PolicyFactory:
    return factory_of(torch_receiver)


@pytest.fixture(scope="session")
def vllm_policy_factory(vllm_receiver: Receiver) -> PolicyFactory:
    return factory_of(vllm_receiver)
