"""vLLM's own way to take new weights, packed over NCCL, with the same model and load."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from leeway.actors.config import PolicyConfig
from leeway.actors.policy import CompletionRequest
from leeway.actors.vllm_policy import engine_arguments, sampling_params

if TYPE_CHECKING:
    from leeway.services.bench.publish_learner import Learner


TRAINER: Any = NCCLWeightTransferEngine
"""Both ends in one class, down to vLLM 0.25.1; from 0.32 on the learner's end is another one, which
nothing here has met on a GPU."""


class NativeEngine:
    """An engine with the `nccl` backend of vLLM's weight transfer."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine: Any = engine
        self._info: dict[str, Any] = {}

    @classmethod
    def start(cls, model: Path, config: PolicyConfig) -> NativeEngine:
        """Load `model`."""
        arguments = engine_arguments(model, config, seed=0)
        del arguments["worker_extension_cls"]
        # Graphs make no difference to a pause, and take half a minute to capture.
        arguments["enforce_eager"] = True
        arguments["weight_transfer_config"] = WeightTransferConfig(backend="nccl")
        return cls(AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)))

    async def complete(self, request: CompletionRequest) -> None:
        """Sample, and throw away."""
        params = sampling_params(request.max_tokens, (), [], 1.0)
        prompt: Any = {"prompt_token_ids": request.prompt_ids}
        async for _ in self._engine.generate(prompt, params, request.request_id):
            pass

    async def join(self, learner: Learner) -> None:
        """Form the group of learner and engine."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
        joining = asyncio.create_task(
            self._engine.init_weight_transfer_engine(
                WeightTransferInitRequest(init_info=place | {"rank_offset": 1})
            )
        )
        await asyncio.gather(joining, learner.ask("join", place))
        named = await learner.ask("names")
        self._info = {
            "names": [name for name, _ in named],
            "dtype_names": ["bfloat16"] * len(named),
            "shapes": [shape for _, shape in named],
            "packed": True,
        }

    async def publish(self, learner: Learner) -> float:
        """Take the learner's weights; returns the seconds in which nothing was generated."""
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        began = time.monotonic()
        await self._engine.start_weight_update()
        update = WeightTransferUpdateRequest(update_info=self._info)
        await asyncio.gather(self._engine.update_weights(update), learner.ask("weights"))
        await self._engine.finish_weight_update()
        await self._engine.resume_generation()
        return time.monotonic() - began

    def close(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown(20.0)


def join_as_trainer(place: dict[str, Any]) -> Any:
    """The learner's end of vLLM's group."""
    return TRAINER.trainer_init(place)


def send_as_trainer(group: Any, weights: Mapping[str, Any]) -> None:
    """The learner's end of an update."""
    arguments = {"group": group, "packed": True}
    TRAINER.trainer_send_weights(iter(weights.items()), arguments)
