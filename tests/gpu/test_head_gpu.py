"""The head on a GPU, whose softmax and gradient are compiled kernels, against the plain way.

python -m pytest -m gpu tests/gpu/test_head_gpu.py
"""

import pytest
import torch
from torch import Tensor

from leeway.learner import head
from leeway.learner.head import Head, head_logprobs, head_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SIZES = (5, 40, 3, 16)
CLOSE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (3e-2, 3e-2)}


def loss_of(lp_C: Tensor, chunk: slice) -> Tensor:
    weight_S = torch.linspace(-1, 1, sum(SIZES), device="cuda")
    return (weight_S[chunk] * lp_C.exp()).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [16, 1000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_equal_the_plain_way(
    dtype: torch.dtype, chunk_tokens: int, has_bias: bool
) -> None:
    """16 rows at a time make the trajectory of 40 tokens go in two passes."""
    torch.manual_seed(0)
    hidden_SH = torch.randn(sum(SIZES), 64, device="cuda", dtype=dtype, requires_grad=True)
    weight_VH = (torch.randn(515, 64, device="cuda") / 8).requires_grad_()
    bias_V = torch.randn(515, device="cuda").requires_grad_() if has_bias else None
    target_S = torch.randint(515, (sum(SIZES),), device="cuda")
    inputs = [hidden_SH, weight_VH, *([bias_V] if bias_V is not None else [])]

    logits_SV = hidden_SH.float() @ weight_VH.T
    lp_SV = (logits_SV if bias_V is None else logits_SV + bias_V).log_softmax(-1)
    lp_S = lp_SV.gather(-1, target_S[:, None]).squeeze(-1)
    entropy_S = -(lp_SV.exp() * lp_SV).sum(-1).detach()
    expected = torch.autograd.grad(loss_of(lp_S, slice(0, sum(SIZES))), inputs)

    found = head_loss(hidden_SH, Head(weight_VH, bias_V), target_S, loss_of, SIZES, chunk_tokens)
    rtol, atol = CLOSE[dtype]
    torch.testing.assert_close(found.lp_S, lp_S.detach(), rtol=rtol, atol=atol)
    torch.testing.assert_close(found.entropy_S, entropy_S, rtol=rtol, atol=atol)
    for gradient, wanted in zip(torch.autograd.grad(found.loss, inputs), expected, strict=True):
        assert gradient.dtype == wanted.dtype
        off = (gradient.float() - wanted.float()).norm() / wanted.float().norm()
        assert off < rtol
    read = head_logprobs(hidden_SH, Head(weight_VH, bias_V), target_S, chunk_tokens)
    torch.testing.assert_close(read, (found.lp_S, found.entropy_S))


def test_the_kernels_are_compiled_once() -> None:
    assert head._fused() is head._fused()
