"""The kernels of a decoding step by Triton's interpreter, which needs no GPU.

Triton decides at its import whether it interprets, so these tests run in a process of their own.
"""

import os
import subprocess
import sys

import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not IS_INTERPRETED:

    def test_the_kernels_under_the_interpreter():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
        assert "16 passed" in ended.stdout

else:
    import torch

    from leeway.actors.decode_kernels import read_cache, rotate_and_store
    from leeway.actors.decoder import Decoder, Feed
    from tests.unit.small_models import CONFIGS, build_model, oracle, random_rows

    @pytest.mark.parametrize("name", CONFIGS)
    @torch.inference_mode()
    def test_log_probs_are_those_of_transformers(name: str):
        model, rows, slots = build_model(name), random_rows(), (2, 0, 3)
        expected = torch.stack([oracle(model, row)[-1] for row in rows])
        decoder = Decoder(model, num_slots=4, max_len=96)
        decoder.logits([Feed(s, 0, row[:-1]) for s, row in zip(slots, rows, strict=True)])
        # The last row only fills the batch up: in the slot of another, at the last position.
        last = torch.tensor([row[-1] for row in rows] + [0])
        position = torch.tensor([len(row) - 1 for row in rows] + [decoder.num_positions - 1])
        logits_BV = decoder.static_logits(last, torch.tensor([*slots, 0]), position)
        assert torch.isfinite(logits_BV).all()
        torch.testing.assert_close(logits_BV[:3].log_softmax(-1), expected, atol=1e-4, rtol=0)

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
            rtol = 0 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(read_QD.float(), expected_QD, atol=1e-5, rtol=rtol)

    def test_a_row_that_fills_the_batch_up_reads_one_position():
        cache = torch.arange(2.0 * 4).reshape(1, 2, 1, 4, 1).expand(1, 2, 1, 4, 8).contiguous()
        read_BQD = read_cache(
            torch.ones(1, 1, 8), cache, torch.tensor([0]), torch.tensor([3]), scale=1.0
        )
        assert read_BQD.flatten().tolist() == [4.0] * 8  # the first value: keys are 0 to 3

    def test_queries_and_keys_are_rotated_and_stored_where_they_belong():
        """One query head, one key head, two rows, width 4; a quarter turn at position 1."""
        qk_BXD = torch.tensor([[[1.0, 2, 3, 4], [5, 6, 7, 8]]] * 2)
        v_BKD = torch.tensor([[[9.0, 10, 11, 12]], [[13, 14, 15, 16]]])
        cos_MD = torch.tensor([[1.0] * 4, [0.0] * 4, [1.0] * 4])
        sin_MD = torch.tensor([[0.0] * 4, [-1.0, -1, 1, 1], [0.0] * 4])
        cache = torch.zeros(2, 2, 1, 3, 4)
        q_BQD = rotate_and_store(
            qk_BXD,
            v_BKD,
            torch.stack([cos_MD, sin_MD]),
            cache,
            torch.tensor([1, 0]),
            torch.tensor([1, 0]),
        )
        # A quarter turn makes (a, b) of the halves (-b, a).
        assert q_BQD[:, 0].tolist() == [[-3, -4, 1, 2], [1, 2, 3, 4]]
        assert cache[1, :, 0, 1].tolist() == [[-7, -8, 5, 6], [9, 10, 11, 12]]
        assert cache[0, :, 0, 0].tolist() == [[5, 6, 7, 8], [13, 14, 15, 16]]
        assert (cache != 0).sum() == 16
