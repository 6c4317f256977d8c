"""A vLLM engine of each supported family takes weights under their learner's names, also where two
ranks share them.

vLLM fuses projections (qkv, gate_up), keeps biases and norms of its own and ties embeddings: what
its loader leaves out or misplaces shows in the log-probs behind a publish.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from leeway.actors.config import PolicyConfig
from leeway.replay.schema import PolicyVersion
from tests.contract.conftest import MAX_MODEL_LEN, receiving
from tests.contract.test_publish_contract import TOLERANCE, gap, prompt

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

FAMILIES: dict[str, dict[str, object]] = {
    "llama-untied": {"family": "llama", "tie_word_embeddings": False},
    "qwen2": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3", "tie_word_embeddings": False},
    "gemma3": {
        "family": "gemma3_text",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", FAMILIES.values(), ids=FAMILIES)
async def test_log_probs_behind_a_publish_are_those_of_the_learners_weights(
    redis_url: str, tmp_path: Path, kind: dict[str, object]
):
    await check_publishes(redis_url, tmp_path, 1, kind)


@pytest.mark.timeout(300)
async def test_each_rank_of_an_engine_takes_its_shard(redis_url: str, tmp_path: Path):
    # Heads, their keys and values, the gated layer and the vocabulary are divided.
    kind = {"family": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
    await check_publishes(redis_url, tmp_path, 2, kind)


async def check_publishes(
    redis_url: str, folder: Path, num_ranks: int, kind: dict[str, object]
) -> None:
    from leeway.actors.vllm_policy import VllmPolicy

    async def start(folder: Path) -> Any:
        config = PolicyConfig(max_model_len=MAX_MODEL_LEN, tensor_parallel_size=num_ranks)
        return await VllmPolicy.start(folder, config, seed=0, version=PolicyVersion(0))

    async with receiving(start, folder, redis_url, **kind) as receiver:
        ids = prompt(receiver, "Sir William Schwenck Gilbert was an English dramatist. " * 3)
        assert len(ids) > 128, "longer than a sliding window"
        for choice in ("collective", "direct"):
            receiver.take(choice)
            for model in reversed(receiver.models):
                await receiver.publish(model.weights())
                completion = await receiver.complete(ids, 32)
                assert gap(model, ids, completion) < TOLERANCE
