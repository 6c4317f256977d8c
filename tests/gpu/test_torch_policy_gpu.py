"""TorchPolicy on a GPU: decoding steps replayed as CUDA graphs, against transformers.

python -m pytest -m gpu tests/gpu/test_torch_policy_gpu.py
"""

import asyncio
import random
from typing import Any

import pytest
import torch

from leeway.actors.config import PolicyConfig, bundled_dir
from leeway.actors.policy import Completion, CompletionRequest
from leeway.actors.search.protocol import STOP
from leeway.actors.tokens import Tokens
from leeway.actors.torch_policy import TorchPolicy
from leeway.replay.schema import PolicyVersion

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MODEL = bundled_dir() / "model"
ATOL = {torch.float32: 1e-3, torch.bfloat16: 0.3}


def build(
    dtype: torch.dtype, max_num_seqs: int, device: str = "cuda:0"
) -> tuple[TorchPolicy, Any, Tokens]:
    """Its weights on `device`, and the same module on the current GPU."""
    from transformers import AutoModelForCausalLM

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).eval()

    tokens, config = Tokens.load(MODEL), PolicyConfig(backend="torch", max_num_seqs=max_num_seqs)
    policy = TorchPolicy(load().to(device), tokens, config, seed=0, version=PolicyVersion(0))
    return policy, load().cuda(), tokens


async def complete(
    policy: TorchPolicy, prompt_ids: list[int], max_tokens: int, temperature: float = 1.0
) -> Completion:
    return await policy.complete(
        CompletionRequest(
            request_id="r",
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            stop=STOP,
            temperature=temperature,
        )
    )


@torch.no_grad()
def logprobs(model: Any, prompt_ids: list[int], token_ids: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt_ids + token_ids], device="cuda")).logits[0].float()
    lp_TV = logits[len(prompt_ids) - 1 : -1].log_softmax(-1).cpu()
    return lp_TV.gather(1, torch.tensor(token_ids)[:, None])[:, 0]


def prompts(tokens: Tokens, num: int) -> list[list[int]]:
    """Questions, with 0 to 700 random tokens before them."""
    rng = random.Random(0)
    question = tokens.encode("Question: What is the currency of Norway?\n")
    return [rng.choices(range(2000), k=(i * 97) % 700) + question for i in range(num)]


@pytest.mark.parametrize("num_rows", [1, 3, 9, 32], ids="{} rows of 32 slots".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_graphs_give_the_log_probs_of_transformers(dtype: torch.dtype, num_rows: int):
    policy, model, tokens = build(dtype, 32)
    wanted = prompts(tokens, num_rows)
    done = await asyncio.gather(*(complete(policy, prompt, 40) for prompt in wanted))
    for prompt, completion in zip(wanted, done, strict=True):
        expected = logprobs(model, prompt, completion.token_ids)
        error = (torch.tensor(completion.logprobs) - expected).abs().max().item()
        assert error < ATOL[dtype]
    await policy.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
async def test_on_a_gpu_that_is_not_the_current_one_it_gives_the_same_log_probs():
    policy, model, tokens = build(torch.float32, 16, "cuda:1")
    for num_rows in (1, 12):  # prompts, graphs of 8 rows and of 16
        wanted = prompts(tokens, num_rows)
        done = await asyncio.gather(*(complete(policy, prompt, 40) for prompt in wanted))
        for prompt, completion in zip(wanted, done, strict=True):
            expected = logprobs(model, prompt, completion.token_ids)
            error = (torch.tensor(completion.logprobs) - expected).abs().max().item()
            assert error < ATOL[torch.float32]
    assert torch.cuda.current_device() == 0
    await policy.close()


async def test_graphs_use_weights_that_were_loaded_after_their_capture():
    policy, model, tokens = build(torch.float32, 8)
    prompt = prompts(tokens, 4)[3]
    await complete(policy, prompt, 10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    policy.load(dict(model.named_parameters()), PolicyVersion(1))
    completion = await complete(policy, prompt, 10)
    assert set(completion.versions) == {1}
    expected = logprobs(model, prompt, completion.token_ids)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-3, rtol=0)
    await policy.close()


async def test_graphs_are_captured_while_another_thread_allocates():
    policy, _, tokens = build(torch.float32, 64)
    is_done = False

    def learn() -> None:
        held: list[torch.Tensor] = []
        while not is_done:
            held = [*held[-3:], torch.ones(1 << 22, device="cuda").exp()]

    learning = asyncio.create_task(asyncio.to_thread(learn))
    for num in (1, 12, 40, 64):
        done = await asyncio.gather(*(complete(policy, p, 20) for p in prompts(tokens, num)))
        assert len(done) == num
    is_done = True
    await learning
    await policy.close()


async def test_samples_of_one_prompt_differ():
    policy, _, tokens = build(torch.float32, 32)
    prompt = prompts(tokens, 1)[0]
    done = await asyncio.gather(*(complete(policy, prompt, 40) for _ in range(32)))
    assert len({tuple(completion.token_ids) for completion in done}) > 1
    greedy = [await complete(policy, prompt, 40, temperature=0.0) for _ in range(2)]
    assert greedy[0].token_ids == greedy[1].token_ids
    await policy.close()
