"""The order of bytes and the checksum that both ends of a weight transfer agree on."""

from __future__ import annotations

import hashlib
import threading
import time

import pytest
import torch

from leeway.replay import transfer
from leeway.replay.board import TensorSpec
from leeway.replay.errors import TransferError

CPU = torch.device("cpu")


def digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:16]


# --- checksum -----------------------------------------------------------------------------------


def test_checksum_is_the_digest_of_name_dtype_shape_and_the_sum_of_word_times_position():
    # 5 * 1 + 7 * 2 - 1 * 3 = 16
    words = torch.tensor([5, 7, -1], dtype=torch.int32)
    assert transfer.checksum({"w": words}) == digest("w|torch.int32|[3]|16\n")


def test_checksum_of_floats_reads_their_bits():
    # 1.0 is 0x3f800000 = 1065353216, -2.0 is 0xc0000000 = -1073741824 as int32.
    floats = torch.tensor([[1.0], [-2.0]])
    total = 1065353216 * 1 - 1073741824 * 2
    assert transfer.checksum({"w": floats}) == digest(f"w|torch.float32|[2, 1]|{total}\n")


def test_checksum_fills_the_last_word_with_zeros():
    # 1, 2, 0 as 16-bit: the words are 1 + 2 * 2**16 = 131073 and 3.
    odd = torch.tensor([1, 2, 3], dtype=torch.int16)
    assert transfer.checksum({"w": odd}) == digest(f"w|torch.int16|[3]|{131073 + 3 * 2}\n")


def test_checksum_of_a_view_that_begins_within_a_word_is_that_of_its_copy():
    base = torch.arange(9, dtype=torch.bfloat16)
    view = base[1:8]
    assert transfer.checksum({"w": view}) == transfer.checksum({"w": view.clone()})


def test_checksum_of_a_transposed_view_is_that_of_its_copy():
    view = torch.randn(5, 3).T
    assert transfer.checksum({"w": view}) == transfer.checksum({"w": view.contiguous()})


def swap_two(weights: torch.Tensor) -> torch.Tensor:
    flat = weights.clone().reshape(-1)
    flat[[3, 17]] = flat[[17, 3]]
    return flat.view_as(weights)


def flip_sign(weights: torch.Tensor) -> torch.Tensor:
    flipped = weights.clone()
    flipped[4, 2] *= -1
    return flipped


@pytest.mark.parametrize(
    "damage",
    [
        swap_two,
        flip_sign,
        lambda w: w.roll(1, dims=0),
        lambda w: w.roll(1, dims=1),
        lambda w: torch.nextafter(w, torch.tensor(9.0)),
        lambda w: w.reshape(6, 8),
        lambda w: w.view(torch.int32),
        lambda w: torch.zeros_like(w),
    ],
    ids=["swap", "sign", "rows", "columns", "last bit", "shape", "dtype", "zeros"],
)
def test_checksum_differs_when(damage):
    weights = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    assert transfer.checksum({"w": damage(weights)}) != transfer.checksum({"w": weights})


def test_checksum_differs_for_words_that_differ_in_the_sign_alone_and_change_places():
    # Their difference is 2**31, times an even distance: nothing may be lost to wrapping.
    ones = torch.ones(2**17)
    first, second = ones.clone(), ones.clone()
    first[0], second[2**16] = -1.0, -1.0
    assert transfer.checksum({"w": first}) != transfer.checksum({"w": second})


def test_checksum_differs_for_another_name_or_order():
    a, b = torch.ones(2), torch.zeros(2)
    assert transfer.checksum({"a": a}) != transfer.checksum({"b": a})
    assert transfer.checksum({"a": a, "b": b}) != transfer.checksum({"b": b, "a": a})


def test_checksum_counts_positions_on_over_chunks():
    # All words 1: 1 + 2 + ... + n = n (n + 1) / 2, with n of three chunks and a bit.
    num = 3 * 2**16 + 5
    ones = torch.ones(num, dtype=torch.int32)
    expected = digest(f"w|torch.int32|[{num}]|{num * (num + 1) // 2}\n")
    assert transfer.checksum({"w": ones}) == expected


def test_checksum_of_four_million_parameters_takes_milliseconds():
    weights = {f"w{i}": torch.randn(2000, 200) for i in range(10)}

    def seconds() -> float:
        began = time.perf_counter()
        transfer.checksum(weights)
        return time.perf_counter() - began

    # 10 ms on an idle core; the bound leaves room for busy ones.
    assert min(seconds() for _ in range(5)) < 0.06


# --- buckets ------------------------------------------------------------------------------------


def spec(name: str, num: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=[num])


def names(manifest: list[TensorSpec], bucket_bytes: int) -> list[str]:
    return ["".join(s.name for s in b) for b in transfer.buckets(manifest, bucket_bytes)]


def test_buckets_are_filled_up_to_their_bytes():
    # 4 + 4 floats are 32 bytes; a fifth would be too many.
    manifest = [spec("a", 4), spec("b", 4), spec("c", 1), spec("d", 7), spec("e", 1)]
    assert names(manifest, 32) == ["ab", "cd", "e"]


def test_buckets_change_with_the_dtype():
    manifest = [spec("a", 1), spec("b", 1, "bfloat16"), spec("c", 1, "bfloat16"), spec("d", 1)]
    assert names(manifest, 1000) == ["a", "bc", "d"]


def test_tensor_larger_than_a_bucket_has_one_of_its_own():
    assert names([spec("a", 1), spec("b", 100), spec("c", 1)], 32) == ["a", "b", "c"]


def test_bytes_of_a_scalar_are_those_of_one_element():
    scalar = TensorSpec(name="s", dtype="int64", shape=[])
    assert (transfer.num_elements(scalar), transfer.num_bytes(scalar)) == (1, 8)


def test_manifest_lists_names_dtypes_and_shapes_in_order():
    tensors = {"b": torch.zeros(2, 3, dtype=torch.bfloat16), "a": torch.tensor(1)}
    assert transfer.describe(tensors) == [
        TensorSpec(name="b", dtype="bfloat16", shape=[2, 3]),
        TensorSpec(name="a", dtype="int64", shape=[]),
    ]


# --- sending and receiving ----------------------------------------------------------------------


def send_to_two(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Rank 0 here sends over gloo to ranks 1 and 2, each on a thread."""
    store = transfer.build_store("0.0.0.0", 0, True, 10)
    received: list[dict[str, torch.Tensor]] = [{}, {}]

    def receive(place: int) -> None:
        own = transfer.build_store("127.0.0.1", store.port, False, 10)
        group = transfer.build_group(own, 1 + place, 3, CPU, 10)
        received[place] = transfer.receive(group, transfer.describe(tensors), CPU)

    threads = [threading.Thread(target=receive, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    transfer.send(transfer.build_group(store, 0, 3, CPU, 10), tensors)
    for thread in threads:
        thread.join(10)
    return received


def test_what_is_sent_arrives_with_names_dtypes_shapes_and_bits():
    tensors = {
        "weight": torch.randn(9, 7),
        "transposed": torch.randn(3, 5).T,
        "half": torch.randn(5).bfloat16(),
        "half too": torch.randn(3).bfloat16(),
        "scalar buffer": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "short": torch.arange(3, dtype=torch.int16),
    }
    for received in send_to_two(tensors):
        assert list(received) == list(tensors)
        for name, tensor in tensors.items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name], tensor)
        assert transfer.checksum(received) == transfer.checksum(tensors)


def test_group_that_nobody_joins_fails_within_its_deadline():
    store = transfer.build_store("0.0.0.0", 0, True, 0.5)
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"rank 0 of 2 could not join .* within 0.5 s"):
        transfer.build_group(store, 0, 2, CPU, 0.5)
    assert time.monotonic() - began < 3
