"""The learner on a GPU: packed attention against one trajectory at a time, and a step against the
same step on a CPU.

python -m pytest -m gpu tests/gpu/test_learner_gpu.py
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2Config, Qwen2ForCausalLM

from leeway.learner import attention
from leeway.learner.batch import PackedBatch, build_batch
from leeway.learner.config import LearnerConfig
from leeway.learner.metrics import StepMetrics
from leeway.learner.trainer import Trainer
from leeway.learner.world import World
from leeway.replay.schema import Group, GroupId, Trajectory, Turn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTHS = (5, 130, 1, 64, 37)
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def attend(
    inputs: tuple[Tensor, ...], lengths: tuple[int, ...], window: int | None = None
) -> Tensor:
    starts_R1 = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    module: Any = SimpleNamespace(config=SimpleNamespace(layer_types=None), layer_idx=0)
    output, _ = attention.attend(
        module,
        inputs[0],
        inputs[1],
        inputs[2],
        None,
        sliding_window=window,
        cu_seq_lens_q=starts_R1,
        max_length_q=max(lengths),
    )
    return output


def alone(inputs: tuple[Tensor, ...], window: int | None) -> Tensor:
    """Each trajectory by itself, in float32, with a mask that is written out."""
    outputs = []
    for q, k, v in zip(*(x.float().split(LENGTHS, 2) for x in inputs), strict=True):
        behind = torch.arange(q.shape[2], device="cuda")[:, None] - torch.arange(
            q.shape[2], device="cuda"
        )
        mask = (behind >= 0) & (behind < (window or 10**6))
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=mask))
    return torch.cat(outputs, 2).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_key_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("window", [None, 16])
def test_packed_attention_is_that_of_each_alone(
    dtype: torch.dtype, head_dim: int, num_heads: int, num_key_heads: int, window: int | None
) -> None:
    torch.manual_seed(0)
    inputs = tuple(
        torch.randn(1, n, sum(LENGTHS), head_dim, device="cuda", dtype=dtype, requires_grad=True)
        for n in (num_heads, num_key_heads, num_key_heads)
    )
    assert attention._has_kernel(inputs[0], inputs[2]) == (dtype == torch.bfloat16)
    weight = torch.randn(1, sum(LENGTHS), num_heads, head_dim, device="cuda")
    expected = alone(inputs, window)
    gradients = torch.autograd.grad((weight * expected).sum(), inputs)
    found = attend(inputs, LENGTHS, window)
    packed = torch.autograd.grad((weight * found).sum(), inputs)
    for ours, theirs in zip((found, *packed), (expected, *gradients), strict=True):
        off = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert off < CLOSE[dtype]


def test_what_stands_before_and_behind_changes_no_bit_of_the_kernel_s_output() -> None:
    torch.manual_seed(0)
    shape = (1, 4, 64, 64)
    middle = tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def among(before: int, behind: int) -> Tensor:
        inputs = tuple(
            torch.cat(
                [torch.randn_like(x)[:, :, :before], x, torch.randn_like(x)[:, :, :behind]], 2
            )
            for x in middle
        )
        return attend(inputs, (before, 64, behind))[:, before : before + 64]

    assert torch.equal(among(10, 3), among(40, 64))


def random_batch() -> PackedBatch:
    rng = np.random.default_rng(0)

    def trajectory(i: int) -> Trajectory:
        first, second = (int(n) for n in rng.integers(2, 20, 2))
        turns = (Turn(7, first, 30, "search"), Turn(37 + first, second, 0, "answer"))
        num = first + second
        return Trajectory(
            trajectory_id=f"t{i}",
            token_ids=rng.integers(0, 512, 37 + num).astype(np.int32),
            turns=turns,
            logprobs=(-np.log(512) + 0.3 * rng.standard_normal(num)).astype(np.float32),
            versions=np.zeros(num, np.int32),
            reward=float(i % 2),
            stop_reason="answer",
            scores={},
            duration_s=1.0,
        )

    members = tuple(trajectory(i) for i in range(16))
    return build_batch(
        [Group(group_id=GroupId("g"), question_id="q", worker_id="w", trajectories=members)]
    )


def step(device: str, objective: str, precision: str, **more: bool) -> tuple[StepMetrics, Tensor]:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model: Any = Qwen2ForCausalLM(config)
    model = model.to(device)
    learner = LearnerConfig.model_validate(
        {"objective": objective, "precision": precision, "micro_batch_tokens": 256, **more}
    )
    trainer = Trainer(model, learner, World(device=torch.device(device)))
    lp_T, _ = trainer.measure(random_batch())
    return trainer.train_step(random_batch(), 0), lp_T


@pytest.mark.parametrize(
    ("objective", "precision"),
    # Rounding may move a token across a clip; reinforce has none.
    [("so-grpo", "float32"), ("so-ppo", "float32"), ("reinforce", "bfloat16")],
)
def test_a_step_on_a_gpu_is_the_step_on_a_cpu(objective: str, precision: str) -> None:
    exact, exact_T = step("cpu", objective, "float32")
    found, found_T = step("cuda", objective, precision)
    near = 1e-3 if precision == "float32" else 5e-2
    torch.testing.assert_close(found_T, exact_T, rtol=0, atol=near)
    assert found.loss == pytest.approx(exact.loss, abs=near)
    assert found.grad_norm == pytest.approx(exact.grad_norm, rel=near)
    assert found.ctn_norm == pytest.approx(exact.ctn_norm, rel=near)
    assert found.num_tokens_read == exact.num_tokens_read


@pytest.mark.parametrize("more", [{"compile": True}, {"activation_checkpointing": True}])
def test_compiled_and_forgetful_blocks_give_the_same_step(more: dict[str, bool]) -> None:
    plain, plain_T = step("cuda", "reinforce", "bfloat16")
    found, found_T = step("cuda", "reinforce", "bfloat16", **more)
    torch.testing.assert_close(found_T, plain_T, rtol=0, atol=3e-2)
    assert found.grad_norm == pytest.approx(plain.grad_norm, rel=2e-2)


def test_blocks_are_compiled_once_for_all_layers_and_lengths() -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    step("cuda", "reinforce", "bfloat16", compile=True)
    # With a gradient and without one, and the head's two kernels; graph breaks would add to it.
    assert counters["stats"]["unique_graphs"] <= 6
    assert not counters["graph_break"]
