"""Rules of the kernels of a decoding step, for Triton's interpreter: TRITON_INTERPRET=1 python -m
pytest tests/unit/decode_kernels_rules.py. test_decode_kernels.py does that."""

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from leeway.actors import decode_kernels
from leeway.actors.decode_kernels import (
    add_linear,
    gated,
    linear,
    project,
    read_cache,
    sample_next,
)
from leeway.actors.decoder import MANY_ROWS, Decoder, Feed, Linear, sample
from tests.unit.small_models import (
    CONFIGS,
    build_model,
    check_log_probs,
    check_mixed_rows,
    oracle,
    random_rows,
)


@pytest.fixture(autouse=True)
def _products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bfloat16 as integers, and would multiply those."""
    product: Any = InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits: NDArray[np.uint32] = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    monkeypatch.setattr(
        InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: product(self, widened(a), widened(b), *rest),
    )


def build(model: Any, num_slots: int = 4) -> Decoder:
    decoder = Decoder(model, num_slots, max_len=96)
    decoder.uses_kernels = True
    return decoder


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_log_probs_are_those_of_transformers(name: str):
    model = build_model(name)
    check_log_probs(model, build(model))


@torch.inference_mode()
def test_a_static_step_goes_on_by_its_own_tokens():
    model, rows, slots = build_model(), random_rows(), (2, 0, 3)
    decoder = build(model)
    decoder.logits([Feed(s, 0, row[:-1]) for s, row in zip(slots, rows, strict=True)])
    # The last row only fills the batch up: in the slot of another, at the last position.
    last = decoder.last_position
    state_4B = torch.tensor(
        [
            [*(row[-1] for row in rows), 0],
            [*slots, 0],
            [*(len(row) - 1 for row in rows), last],
            [0, 0, 0, 0],
        ]
    )
    uniform_BV, out_2B = torch.rand(4, 97), torch.zeros(2, 4, dtype=torch.float64)
    for _ in range(3):
        decoder.static_step(state_4B, uniform_BV, out_2B)
        assert torch.isfinite(out_2B).all()
        for b, row in enumerate(rows):
            lp_V = oracle(model, row)[-1]
            assert lp_V.argmax() == state_4B[0, b] == out_2B[0, b]
            assert out_2B[1, b].item() == pytest.approx(lp_V.max().item(), abs=1e-4)
            row.append(int(state_4B[0, b]))
        assert state_4B[2].tolist() == [*(len(row) - 1 for row in rows), last]


@torch.inference_mode()
def test_rows_of_any_length_and_start_go_through_together():
    model = build_model()
    check_mixed_rows(model, build(model))


@torch.inference_mode()
def test_prompts_of_many_rows_are_multiplied_by_torch(monkeypatch: pytest.MonkeyPatch):
    model = build_model()
    decoder = build(model)
    monkeypatch.setattr(decode_kernels, "project", None)  # calling it would raise
    first = torch.randint(0, 97, (60,)).tolist()
    decoder.logits([Feed(0, 0, first[:50]), Feed(1, 0, first[:20])])
    second = torch.randint(0, 97, (80,)).tolist()
    logits_BV = decoder.logits([Feed(0, 50, first[50:]), Feed(3, 0, second)])
    for logits_V, row in zip(logits_BV, (first, second), strict=True):
        expected_V = oracle(model, row)[-1]
        torch.testing.assert_close(logits_V.log_softmax(-1), expected_V, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_every_kernel_is_compiled_before_the_first_request(monkeypatch: pytest.MonkeyPatch):
    """By the sizes of programs: few rows and many, in each use of the products."""
    seen: set[tuple[str, bool]] = set()
    decoder = build(build_model())
    for name in ("project", "linear", "gated", "add_linear", "read_cache", "sample_next"):
        launch = getattr(decode_kernels, name)

        def noted(*given: Any, _name: str = name, _launch: Any = launch) -> Any:
            seen.add((_name, len(given[0]) > MANY_ROWS))
            return _launch(*given)

        monkeypatch.setattr(decode_kernels, name, noted)
    decoder._compile()
    assert len(seen) == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_q, num_kv, width", [(4, 4, 32), (6, 2, 24), (16, 1, 64)])
def test_a_row_reads_its_slot_up_to_its_own_position(
    num_q: int, num_kv: int, width: int, dtype: torch.dtype
):
    torch.manual_seed(0)
    cache = torch.randn(6, 2, num_kv, 140, width, dtype=dtype)
    positions = (0, 1, 15, 16, 127, 138)
    cache[3, :, :, positions[3] + 1 :] = torch.nan  # nobody wrote there: it must not be read
    q_BQD, slots = torch.randn(6, num_q, width, dtype=dtype), (5, 4, 2, 3, 1, 0)
    read_BQD = read_cache(q_BQD, cache, torch.tensor(slots), torch.tensor(positions), 0.3)
    for q_QD, slot, position, read_QD in zip(q_BQD, slots, positions, read_BQD, strict=True):
        kv_2QLD = cache[slot, :, :, : position + 1].float()
        k_QLD, v_QLD = kv_2QLD.repeat_interleave(num_q // num_kv, 1)
        share_QL = (0.3 * (k_QLD @ q_QD.float()[..., None])[..., 0]).softmax(-1)
        expected_QD = (share_QL[:, None] @ v_QLD)[:, 0]
        # Shares are rounded to the type of the values.
        atol = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(read_QD.float(), expected_QD, atol=atol, rtol=0)


def test_a_row_that_fills_the_batch_up_reads_one_position():
    cache = torch.arange(2.0 * 4).reshape(1, 2, 1, 4, 1).expand(1, 2, 1, 4, 8).contiguous()
    read_BQD = read_cache(
        torch.ones(1, 1, 8), cache, torch.tensor([0]), torch.tensor([3]), scale=1.0
    )
    assert read_BQD.flatten().tolist() == [4.0] * 8  # the first value: keys are 0 to 3


def test_queries_and_keys_are_rotated_and_stored_where_they_belong():
    """One query head, one key head, two rows, width 4; a quarter turn at position 1."""
    x_BH = torch.tensor([[1.0, -1, 1, -1], [2, -2, 2, -2]])  # both are the first, normalised
    weight = torch.zeros(12, 4)
    weight[:, 0] = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    cos_MD = torch.tensor([[1.0] * 4, [0.0] * 4, [1.0] * 4])
    sin_MD = torch.tensor([[0.0] * 4, [-1.0, -1, 1, 1], [0.0] * 4])
    cache = torch.zeros(2, 2, 1, 3, 4)
    q_BQD = project(
        x_BH,
        torch.ones(4),
        Linear(weight, None),
        None,
        torch.stack([cos_MD, sin_MD]),
        cache,
        torch.tensor([1, 0]),
        torch.tensor([1, 0]),
        eps=1e-12,
    )
    # A quarter turn makes (a, b) of the halves (-b, a).
    assert q_BQD[:, 0].tolist() == [[-3, -4, 1, 2], [1, 2, 3, 4]]
    assert cache[1, :, 0, 1].tolist() == [[-7, -8, 5, 6], [9, 10, 11, 12]]
    assert cache[0, :, 0, 0].tolist() == [[5, 6, 7, 8], [9, 10, 11, 12]]
    assert (cache != 0).sum() == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_any_size_are_those_of_torch(has_bias: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    x_BH, y_BN = torch.randn(19, 100, dtype=dtype), torch.randn(19, 70, dtype=dtype)
    norm_H = torch.randn(100, dtype=dtype)
    bias = torch.randn(70, dtype=dtype) if has_bias else None
    one = Linear(torch.randn(70, 100, dtype=dtype) / 10, bias)
    back = Linear(torch.randn(100, 70, dtype=dtype) / 10, None)
    normed = torch.nn.functional.rms_norm(x_BH.float(), (100,), norm_H.float(), 1e-6)
    weight, plain_bias = one.weight.float(), 0 if bias is None else bias.float()
    expected = normed @ weight.T + plain_bias
    close = {"atol": 1e-4, "rtol": 0} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
    torch.testing.assert_close(linear(x_BH, one, norm_H, 1e-6).float(), expected, **close)
    plain = x_BH.float() @ weight.T + plain_bias
    torch.testing.assert_close(linear(x_BH, one).float(), plain, **close)
    gate, up = expected.chunk(2, -1)
    torch.testing.assert_close(
        gated(x_BH, one, norm_H, 1e-6).float(),
        torch.nn.functional.silu(gate) * up,
        **close,
    )
    total = x_BH.float() + y_BN.float() @ back.weight.float().T
    add_linear(x_BH, y_BN, back)
    torch.testing.assert_close(x_BH.float(), total, **close)


def test_a_step_samples_as_torch_does_and_moves_each_row_on():
    torch.manual_seed(0)
    logits_BV, uniform_BV = 3 * torch.randn(7, 5000), torch.rand(7, 5000)
    logits_BV[6], uniform_BV[6, 4999] = 0.0, 1.0  # outside [0, 1): the clamp keeps it finite
    is_sampled = torch.tensor([1, 1, 1, 0, 0, 1, 1])
    state_4B = torch.stack([torch.zeros(7), torch.arange(7), torch.arange(7), is_sampled]).long()
    out_2B = torch.zeros(2, 7, dtype=torch.float64)
    sample_next(logits_BV, uniform_BV, state_4B, out_2B, last=5)
    token_B, lp_B = sample(logits_BV, is_sampled.float(), uniform_BV)
    assert state_4B[0].tolist() == out_2B[0].tolist() == token_B.tolist()
    assert token_B[6] == 4999
    torch.testing.assert_close(out_2B[1].float(), lp_B, atol=1e-5, rtol=0)
    assert state_4B[1].tolist() == list(range(7))
    assert state_4B[2].tolist() == [1, 2, 3, 4, 5, 5, 5]
