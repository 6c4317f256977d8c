"""The learner's end of `leeway bench publish`, in a process of its own as in a run.

bench                       learner
("publish", None)   ---->   change the weights, pack, publish, confirm; answer with Published
("logprobs", ids)   ---->   log-probs of the tokens under the weights last published
("weights", None)   ---->   send them through vLLM's own path, in time with an engine
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from leeway.learner.weights.publisher import Published, Publisher
from leeway.replay.board import PolicyBoard
from leeway.replay.flat_weights import FlatWeights, describe, pack
from leeway.replay.schema import PolicyVersion
from leeway.services.bench.publish_load import build_network

START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 240.0
PUBLISH_TIMEOUT_S = 120.0
RUN = "bench-publish"


class Learner:
    """The process, seen from the bench; within an event loop."""

    def __init__(self, shape: str, redis_url: str, on_gpu: bool, choice: str) -> None:
        """`choice` is learner.transport."""
        context = multiprocessing.get_context("spawn")
        self._end, far_end = context.Pipe()
        self._process = context.Process(
            target=_main, args=(far_end, shape, redis_url, on_gpu, choice), daemon=True
        )
        self._process.start()
        far_end.close()

    async def ready(self) -> None:
        """Wait until its model is built."""
        await self._answer(START_TIMEOUT_S)

    async def publish(self) -> Published:
        """Publish the next version and wait until it is in use."""
        return msgspec.msgpack.decode(await self.ask("publish"), type=Published)

    async def ask(self, what: str, argument: Any = None) -> Any:
        """Send an order; its answer. Raises RuntimeError with what went wrong there."""
        self._end.send((what, argument))
        return await self._answer(ANSWER_TIMEOUT_S)

    async def _answer(self, timeout_s: float) -> Any:
        if not await asyncio.to_thread(self._end.poll, timeout_s):
            raise RuntimeError(f"the learner's process did not answer within {timeout_s:g} s")
        is_fine, answer = self._end.recv()
        if not is_fine:
            raise RuntimeError(f"the learner's process: {answer}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join(10)


def _main(end: Connection, shape: str, redis_url: str, on_gpu: bool, choice: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    asyncio.run(_serve(end, build_network(shape, device), device, redis_url, choice))


async def _serve(
    end: Connection, network: Any, device: torch.device, redis_url: str, choice: str
) -> None:
    board = PolicyBoard(redis_url, RUN)
    work = _Work(network, Publisher(board, device, PUBLISH_TIMEOUT_S, choice))
    orders: dict[str, Callable[[Any], Any]] = {
        "publish": work.publish,
        "logprobs": work.logprobs,
        "join": work.join_native,
        "weights": work.send_native,
        "names": work.names,
    }
    end.send((True, None))
    while True:
        try:
            what, argument = await asyncio.to_thread(end.recv)
        except EOFError:
            return
        try:
            end.send((True, await orders[what](argument)))
        except Exception as error:
            end.send((False, f"{type(error).__name__}: {error}"))


class _Work:
    """What the process does; the weights change with each version."""

    def __init__(self, network: Any, publisher: Publisher) -> None:
        self._network = network
        self._publisher = publisher
        self._wire: FlatWeights | None = None
        self._version = 0
        self._native: Any = None
        self._rounded: dict[str, torch.Tensor] = {}

    async def publish(self, _: None) -> bytes:
        """The next version; `Published`, encoded."""
        for tensor in self._network.parameters():
            tensor.mul_(1.001)
        weights = dict(self._network.named_parameters())
        manifest = describe(weights, await self._publisher.wire_dtype())
        self._wire = pack(weights, manifest, into=self._wire and self._wire.flat)
        self._version += 1
        if await self._publisher.publish(PolicyVersion(self._version), self._wire) != 1:
            raise RuntimeError("the engine did not take part; its log says why")
        published = await self._publisher.confirm()
        if published is None or published.evicted:
            raise RuntimeError(f"version {self._version} was not taken: {published}")
        return msgspec.msgpack.encode(published)

    async def logprobs(self, ids: tuple[list[int], list[int]]) -> list[float]:
        """Log-prob of each token of a completion; `ids` are (prompt's, completion's)."""
        prompt_ids, token_ids = ids
        device = next(self._network.parameters()).device
        tokens = torch.tensor([prompt_ids + token_ids], device=device)
        logits = self._network(tokens).logits[0, len(prompt_ids) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(1, tokens[0, len(prompt_ids) :, None])
        return chosen[:, 0].tolist()

    async def names(self, _: None) -> list[tuple[str, list[int]]]:
        """Names and shapes of the weights."""
        return [(name, list(t.shape)) for name, t in self._network.named_parameters()]

    async def join_native(self, place: dict[str, Any]) -> None:
        """Meet an engine in vLLM's own group."""
        from leeway.services.bench.publish_native import join_as_trainer

        named = self._network.named_parameters()
        self._rounded = {name: tensor.to(torch.bfloat16) for name, tensor in named}
        self._native = join_as_trainer(place)

    async def send_native(self, _: None) -> None:
        """Send through it."""
        from leeway.services.bench.publish_native import send_as_trainer

        send_as_trainer(self._native, self._rounded)
