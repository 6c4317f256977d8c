"""Log-probs of sampled tokens on their way out of vLLM, one number each.

vLLM sends three arrays for every sampled token: the engine's process slices and packs them, the
front end unpacks them, and both do it on the thread that everything else waits for. On an H200 that
was half of an engine's speed. Here the scheduler, the last in the engine's process that sees a
step's log-probs in one piece, writes the bits of a token's log-prob behind its id, and the replica
takes them off again as they arrive.

Both ends are vLLM's own places for such a thing: the engine argument `scheduler_cls`, and the queue
of outputs that `vllm_versions` reads too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM

from leeway.actors.failures import EngineError

SCHEDULER: Final = "leeway.actors.vllm_logprobs.build_scheduler"
"""For the engine argument `scheduler_cls`."""
UNKNOWN: Final = int(np.float32("nan").view(np.int32))
"""In place of the log-prob of another token than the sampled one."""


# ---- the engine's process


class _AppendsLogprobs:
    """In front of one of vLLM's schedulers."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM's, but log-probs stand behind the token ids."""
        logprobs, model_runner_output.logprobs = model_runner_output.logprobs, None
        base: Any = super()
        clients = base.update_from_output(scheduler_output, model_runner_output)
        if logprobs is not None:
            for client in clients.values():
                append_logprobs(client.outputs, model_runner_output.req_id_to_index, logprobs)
        return clients


class _Scheduler(_AppendsLogprobs, Scheduler):
    pass


class _AsyncScheduler(_AppendsLogprobs, AsyncScheduler):
    pass


def build_scheduler(vllm_config: Any, **arguments: Any) -> Scheduler:
    """The scheduler that vLLM would take itself, with log-probs behind the token ids."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (_AsyncScheduler if is_async else _Scheduler)(vllm_config=vllm_config, **arguments)


def append_logprobs(outputs: Iterable[Any], index: Mapping[str, int], logprobs: Any) -> None:
    """Of every output in [t0 ... tn], the ids of what it sampled, make [t0 ... tn, b0 ... bn].

    `b` are the bits of the log-probs, float32 read as int32. `index` gives the request's place in
    `logprobs`, vLLM's LogprobsLists: [rows, 1 or more] ids and log-probs, the sampled one first, a
    row for each token.
    """
    ids = logprobs.logprob_token_ids[:, 0].tolist()
    firsts = np.ascontiguousarray(logprobs.logprobs[:, 0], dtype=np.float32)
    bits = firsts.view(np.int32).tolist()
    starts = logprobs.cu_num_generated_tokens
    for output in outputs:
        sampled = output.new_token_ids
        if not sampled:
            continue
        place = index[output.request_id]
        row = place if starts is None else starts[place]
        end = row + len(sampled)
        right = ids[row:end] == sampled
        output.new_token_ids = [*sampled, *(bits[row:end] if right else [UNKNOWN] * len(sampled))]


# ---- the replica's process


class SampledLogprobs:
    """What the engine's process appended, by request."""

    def __init__(self, engine: AsyncLLM) -> None:
        client: Any = engine.engine_core
        self._processor: Any = engine.output_processor
        self._bits: dict[str, list[int]] = defaultdict(list)
        self._take = client.get_output_async
        client.get_output_async = self._next

    async def _next(self) -> Any:
        outputs = await self._take()
        states = self._processor.request_states
        for output in outputs.outputs:
            both = output.new_token_ids
            if not both:
                continue
            num_tokens = len(both) // 2
            output.new_token_ids = both[:num_tokens]
            state = states.get(output.request_id)
            if state is not None:  # else it ended meanwhile, and nobody will ask
                self._bits[state.external_req_id] += both[num_tokens:]
        return outputs

    def has_begun(self, request_id: str) -> bool:
        """Whether a token of the request has come."""
        return request_id in self._bits

    def of(self, request_id: str, num_tokens: int) -> list[float]:
        """The log-probs of a finished request's tokens, in nats. To be asked once.

        Raises EngineError where one is not known.
        """
        bits = self._bits.pop(request_id, [])[:num_tokens]
        logprobs: list[float] = np.array(bits, dtype=np.int32).view(np.float32).tolist()
        if len(logprobs) != num_tokens or any(map(math.isnan, logprobs)):
            raise EngineError(f"request {request_id}: the engine's log-probs are of other tokens")
        return logprobs

    def forget(self, request_id: str) -> None:
        """The request was given up."""
        self._bits.pop(request_id, None)
