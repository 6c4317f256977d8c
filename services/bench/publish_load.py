"""What `leeway bench publish` works on: models of known shapes, and requests that never end."""

from __future__ import annotations

import asyncio
import random
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from leeway.actors.policy import CompletionRequest
from leeway.actors.tokens import write_byte_tokenizer
from leeway.services.bench.learner import BILLION, TINY

PROMPT_TOKENS: Final = 200
TURN_TOKENS: Final = 400

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "0.01B": TINY,
    "1.5B": BILLION,
    "7B": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""Those of Qwen2.5-1.5B and Qwen2.5-7B, and one for CPUs."""


def build_network(shape: str, device: torch.device) -> Any:
    """Random weights in float32, as the learner holds them."""
    torch.manual_seed(0)
    with torch.device(device):
        config = Qwen2Config(
            **SHAPES[shape], max_position_embeddings=4096, bos_token_id=None, eos_token_id=None
        )
        network = Qwen2ForCausalLM(config)
    return network.requires_grad_(False).eval()


def write_model(network: Any, folder: Path) -> None:
    """A folder that an engine loads: bfloat16 on a GPU, and a tokenizer nobody needs."""
    is_cuda = next(network.parameters()).is_cuda
    stored = deepcopy(network).to(torch.bfloat16) if is_cuda else network
    stored.save_pretrained(folder)
    write_byte_tokenizer(folder)


@dataclass
class Meter:
    """When tokens came out of the engine."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def saw(self, num_tokens: int) -> None:
        """So many, now."""
        if num_tokens:
            self.times.append(time.monotonic())
            self.counts.append(num_tokens)

    def count(self, since: float, until: float) -> int:
        """Tokens between two times."""
        first, last = bisect_left(self.times, since), bisect_left(self.times, until)
        return sum(self.counts[first:last])

    def rate(self, since: float, until: float) -> float:
        """Tokens a second between two times."""
        return self.count(since, until) / (until - since)

    def longest_gap(self, since: float, until: float) -> float:
        """The longest time without a token, of the steps that began in between, in seconds."""
        first, last = bisect_left(self.times, since), bisect_left(self.times, until)
        times = self.times[max(0, first - 1) : last + 1]
        return max((b - a for a, b in pairwise(times)), default=0.0)


class Load:
    """So many requests in flight at any time, until stopped."""

    def __init__(
        self, complete: Callable[[CompletionRequest], Awaitable[Any]], vocab_size: int, num: int
    ) -> None:
        self._complete = complete
        self._vocab_size = vocab_size
        self._tasks = [asyncio.create_task(self._play(place)) for place in range(num)]

    async def _play(self, place: int) -> None:
        draw = random.Random(place)
        for turn in range(10**9):
            prompt_ids = [draw.randrange(self._vocab_size) for _ in range(PROMPT_TOKENS)]
            # Not all alike, so that they do not begin and end together.
            num_tokens = draw.randrange(TURN_TOKENS // 2, TURN_TOKENS)
            await self._complete(
                CompletionRequest(
                    request_id=f"load-{place}-{turn}", prompt_ids=prompt_ids, max_tokens=num_tokens
                )
            )

    def check(self) -> None:
        """Raise what ended one of them."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        """Give up what is in flight."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
