"""An engine's tokens with their log-probs: as rollouts get them, and as vLLM gives them out itself.

Both sides are the same engine, started with the same arguments, one after the other, and decode the
same requests: a short prompt each, so many at once, all of one length. Ours takes log-probs as bits
behind the token ids (actors/vllm_logprobs.py). The other asks for them as vLLM's flat lists, its
cheaper kind, which still leave the engine as three arrays a token.

The model has 1.3 billion random weights on a GPU. On a CPU it is the bundled policy, and what is
saved shows in the processor time of the replica, for the model itself takes most of the rest.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from leeway.actors.config import PolicyConfig
from leeway.actors.policy import CompletionRequest
from leeway.replay.errors import ConfigurationError
from leeway.replay.schema import PolicyVersion
from leeway.services.bench.large_model import large_model
from leeway.services.bench.result import BenchResult
from leeway.services.bench.rollout_engine import endless_model
from leeway.services.bench.rollout_load import NEVER

PROMPT_TOKENS: Final = 64
PASS_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rows: tuple[int, ...]
    """Requests at once, a case each."""
    turn_tokens: int
    repeats: int
    """Of every case, after one that is not counted."""


@dataclass(frozen=True)
class Speed:
    """Medians over the repeats."""

    tokens_per_s: float
    cpu_us: float
    """Processor time a token in this process: the engine's front end, as a Serve replica has it."""


Ask = Callable[[str, list[int]], Awaitable[int]]
"""From a request's name and prompt to the number of log-probs that came with its tokens."""


def plan_of(*, quick: bool, is_cuda: bool) -> Plan:
    """Rows up to what a rollout keeps in flight on one GPU, or on two cores."""
    if is_cuda:
        return Plan((64, 192, 448), 100 if quick else 300, 1 if quick else 3)
    return Plan((16,), 32, 1) if quick else Plan((16, 64), 128, 3)


def run(*, quick: bool) -> BenchResult:
    """Raises ConfigurationError where vllm is not installed."""
    if find_spec("vllm") is None:
        raise ConfigurationError("vllm is not installed here; install leeway-rl[cpu] or [gpu]")
    is_cuda = torch.cuda.is_available()
    plan = plan_of(quick=quick, is_cuda=is_cuda)
    with endless_model() as small, tempfile.TemporaryDirectory(prefix="leeway-engine-") as folder:
        model = _endless(large_model(small, Path(folder))) if is_cuda else small
        ours = asyncio.run(_ours(model, plan))
        plain = asyncio.run(_plain(model, plan))
    return result(plan, ours, plain)


def result(plan: Plan, ours: list[Speed], plain: list[Speed]) -> BenchResult:
    """The keys are of the case with most rows."""
    rows = tuple(
        (
            f"{num_rows} rows",
            *(f"{side.tokens_per_s:,.0f}" for side in sides),
            f"{sides[0].tokens_per_s / sides[1].tokens_per_s:.2f}",
            *(f"{side.cpu_us:.1f}" for side in sides),
        )
        for num_rows, *sides in zip(plan.rows, ours, plain, strict=True)
    )
    columns = ("case", "tokens/s", "vLLM's own", "over it", "CPU us/token", "vLLM's own")
    return BenchResult(
        "engine",
        columns,
        rows,
        {
            "speedup": ours[-1].tokens_per_s / plain[-1].tokens_per_s,
            "tokens_per_s": ours[-1].tokens_per_s,
            "plain_tokens_per_s": plain[-1].tokens_per_s,
            "cpu_us_per_token": ours[-1].cpu_us,
            "plain_cpu_us_per_token": plain[-1].cpu_us,
            "num_rows": plan.rows[-1],
        },
    )


def _config(plan: Plan) -> PolicyConfig:
    return PolicyConfig(max_num_seqs=max(plan.rows), max_model_len=1024, start_timeout_s=600)


async def _ours(model: Path, plan: Plan) -> list[Speed]:
    from leeway.actors.vllm_policy import VllmPolicy

    policy = await VllmPolicy.start(model, _config(plan), seed=0, version=PolicyVersion(0))

    async def ask(name: str, ids: list[int]) -> int:
        request = CompletionRequest(
            request_id=name, prompt_ids=ids, max_tokens=plan.turn_tokens, stop=(NEVER,)
        )
        return len((await policy.complete(request)).logprobs)

    try:
        return await _speeds(ask, plan)
    finally:
        await policy.close()


async def _plain(model: Path, plan: Plan) -> list[Speed]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from leeway.actors.vllm_policy import BATCHES_OF, engine_arguments, sampling_params

    arguments = AsyncEngineArgs(**engine_arguments(model, _config(plan), 0))
    engine = AsyncLLM.from_engine_args(arguments, usage_context=BATCHES_OF)
    params = sampling_params(plan.turn_tokens, (NEVER,), [], 1.0)
    params.flat_logprobs = True

    async def ask(name: str, ids: list[int]) -> int:
        prompt: Any = {"prompt_token_ids": ids}
        num_logprobs = 0
        async for output in engine.generate(prompt, params, name):
            num_logprobs = len(output.outputs[0].logprobs or ())
        return num_logprobs

    try:
        return await _speeds(ask, plan)
    finally:
        await asyncio.to_thread(engine.shutdown, 20.0)


async def _speeds(ask: Ask, plan: Plan) -> list[Speed]:
    return [await _speed(ask, plan, num_rows) for num_rows in plan.rows]


async def _speed(ask: Ask, plan: Plan, num_rows: int) -> Speed:
    num_tokens = num_rows * plan.turn_tokens
    walls_s, cpus_s = [], []
    for repeat in range(plan.repeats + 1):
        prompts = [
            [10 + (repeat * num_rows + i + 7 * k) % 900 for k in range(PROMPT_TOKENS)]
            for i in range(num_rows)
        ]
        wall, cpu = time.perf_counter(), time.process_time()
        async with asyncio.timeout(PASS_TIMEOUT_S):
            came = await asyncio.gather(
                *(ask(f"{num_rows}-{repeat}-{i}", ids) for i, ids in enumerate(prompts))
            )
        walls_s.append(time.perf_counter() - wall)
        cpus_s.append(time.process_time() - cpu)
        assert sum(came) == num_tokens, "a turn ended early, or without its log-probs"
    return Speed(num_tokens / median(walls_s[1:]), 1e6 * median(cpus_s[1:]) / num_tokens)


def _endless(model: Path) -> Path:
    """The same, whose own files name no token that ends a turn, as its tokenizer's do not."""
    path = model / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), "eos_token_id": None}
    path.write_text(json.dumps(config), encoding="utf-8")
    (model / "generation_config.json").unlink(missing_ok=True)
    return model
