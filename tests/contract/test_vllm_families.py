"""A vLLM engine of each supported family takes weights under their learner's names.

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


@pytest.mark.parametrize("kind", FAMILIES.values(), ids=FAMILIES)
async def test_log_probs_behind_a_publish_are_those_of_the_learners_weights(
    redis_url: str, tmp_path: Path, kind: dict[str, object]
):
    from leeway.actors.vllm_policy import VllmPolicy

    async def start(folder: Path) -> Any:
        config = PolicyConfig(max_model_len=MAX_MODEL_LEN)
        return await VllmPolicy.start(folder, config, seed=0, version=PolicyVersion(0))

    async with receiving(start, tmp_path, redis_url, **kind) as receiver:
        ids = prompt(receiver, "Sir William Schwenck Gilbert was an English dramatist. " * 3)
        assert len(ids) > 128, "longer than a sliding window"
        for choice in ("collective", "direct"):
            receiver.take(choice)
            for model in reversed(receiver.models):
                await receiver.publish(model.weights())
                completion = await receiver.complete(ids, 32)
                assert gap(model, ids, completion) < TOLERANCE
