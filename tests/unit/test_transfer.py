"""Weights as they travel: where they lie in the buffer, the checksum, and the broadcast."""

from __future__ import annotations

import hashlib
import threading
import time

import psutil
import pytest
import torch

from leeway.replay import transfer
from leeway.replay.board import TensorSpec
from leeway.replay.errors import TransferError
from leeway.replay.flat_weights import (
    ROW_WORDS,
    Checksum,
    Chunk,
    Layout,
    describe,
    num_bytes,
    pack,
)

CPU = torch.device("cpu")
TENSORS = {
    "weight": torch.randn(9, 7),
    "transposed": torch.randn(3, 5).T,
    "half": torch.randn(5).bfloat16(),
    "half too": torch.randn(3).bfloat16(),
    "scalar buffer": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 4),
    "short": torch.arange(3, dtype=torch.int16),
}


def spec(name: str, num: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=[num])


# --- where tensors lie --------------------------------------------------------------------------


def test_tensors_begin_at_multiples_of_16_bytes():
    # 24 bytes, filled up to 32; 10 bytes, filled up to 16.
    layout = Layout([spec("a", 6), spec("b", 5, "bfloat16")])
    assert layout.num_bytes == 48
    flat = torch.arange(48, dtype=torch.uint8)
    views = layout.views(flat)
    assert views["b"].view(torch.uint8).tolist() == list(range(32, 42))


def test_views_share_the_buffers_memory():
    layout = Layout([spec("a", 2)])
    flat = layout.empty(CPU)
    layout.views(flat)["a"].fill_(1.0)
    assert flat.view(torch.float32)[:2].tolist() == [1.0, 1.0]


def test_chunks_are_cut_between_tensors_and_filled_up_to_their_bytes():
    # 16 + 16 bytes are 32; a third would be too many. The fourth alone is larger.
    layout = Layout([spec("a", 4), spec("b", 4), spec("c", 1), spec("d", 100), spec("e", 1)])
    assert layout.chunks(32) == [
        Chunk(0, 32, 0, 2),
        Chunk(32, 48, 2, 3),
        Chunk(48, 448, 3, 4),
        Chunk(448, 464, 4, 5),
    ]


def test_views_of_a_chunk_are_its_tensors_alone():
    layout = Layout([spec("a", 4), spec("b", 4), spec("c", 1)])
    second = layout.chunks(16)[1]
    assert list(layout.views(torch.zeros(16, dtype=torch.uint8), second)) == ["b"]


def test_nothing_has_no_chunks():
    assert Layout([]).chunks(32) == []


def test_bytes_of_a_scalar_are_those_of_one_element():
    assert num_bytes(TensorSpec(name="s", dtype="int64", shape=[])) == 8


# --- packing ------------------------------------------------------------------------------------


def test_manifest_lists_names_dtypes_and_shapes_in_order():
    tensors = {"b": torch.zeros(2, 3, dtype=torch.float64), "a": torch.tensor(1)}
    assert describe(tensors) == [
        TensorSpec(name="b", dtype="float64", shape=[2, 3]),
        TensorSpec(name="a", dtype="int64", shape=[]),
    ]


def test_floats_may_travel_rounded_and_integers_never_do():
    tensors = {"w": torch.tensor([1.0, 1.001]), "count": torch.tensor([257])}
    packed = pack(tensors, describe(tensors, torch.bfloat16))
    views = packed.layout.views(packed.flat)
    # bfloat16 has 8 bits: the next number behind 1 is 1.0078125.
    assert (views["w"].dtype, views["w"].tolist()) == (torch.bfloat16, [1.0, 1.0])
    assert views["count"].tolist() == [257]


def test_packed_tensors_are_found_again_bit_by_bit():
    packed = pack(TENSORS)
    for name, tensor in packed.layout.views(packed.flat).items():
        assert torch.equal(tensor, TENSORS[name])


def test_tensors_may_come_one_by_one_and_a_buffer_serves_again():
    first = pack(TENSORS)
    second = pack(iter(TENSORS.items()), first.layout.manifest, into=first.flat)
    assert second.flat is first.flat
    assert second.checksum == first.checksum


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.ones(2)}, "the manifest lists b, which did not come"),
        ({"b": torch.ones(1), "a": torch.ones(2)}, r"b \[1\] is not what the manifest lists next"),
        ({"a": torch.ones(3), "b": torch.ones(1)}, r"a \[3\] is not what the manifest lists next"),
        ({"a": torch.ones(2), "b": torch.ones(1), "c": torch.ones(1)}, r"c \[1\] is not"),
    ],
)
def test_tensors_that_are_not_the_manifests_are_refused(tensors, message):
    with pytest.raises(TransferError, match=message):
        pack(tensors, [spec("a", 2), spec("b", 1)])


# --- checksum -----------------------------------------------------------------------------------


def digest(lines: str) -> str:
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def test_checksum_is_the_digest_of_the_manifest_and_the_sums_by_rows_and_columns():
    # One row: 5 + 7 - 1 = 11, times 1. Columns: 5 * 1 + 7 * 3 - 1 * 5 = 21; the rest is zero.
    words = torch.tensor([5, 7, -1])
    assert pack({"w": words}).checksum == digest("w|int64|[3]\n11|21")


def test_checksum_of_floats_reads_their_bits():
    # 1.0 is 0x3ff0000000000000, -2.0 is 0xc000000000000000 as int64.
    one, minus_two = 0x3FF0000000000000, 0xC000000000000000 - 2**64
    columns = (one + 3 * minus_two + 2**63) % 2**64 - 2**63
    packed = pack({"w": torch.tensor([1.0, -2.0], dtype=torch.float64)})
    assert packed.checksum == digest(f"w|float64|[2]\n{one + minus_two}|{columns}")


def test_checksum_counts_rows_and_columns_from_the_start_of_the_buffer():
    # All words 1, two rows and six more. Rows: 4096 * 1 + 4096 * 3 + 6 * 5. Columns: 3 times the
    # first six odd numbers, 36 in all, and twice the others up to the 4096th, 4096**2 in all.
    num = 2 * ROW_WORDS + 6
    ones = torch.ones(num, dtype=torch.int64)
    rows, columns = 4 * 4096 + 30, 3 * 36 + 2 * (4096**2 - 36)
    assert pack({"w": ones}).checksum == digest(f"w|int64|[{num}]\n{rows}|{columns}")


@pytest.mark.parametrize("chunk_bytes", [1000, 40_000, 100_000])
def test_checksum_of_chunks_is_that_of_the_whole(chunk_bytes):
    packed = pack({f"w{i}": torch.randn(3000 + 1000 * i) for i in range(12)})
    total = Checksum(packed.layout, CPU)
    for chunk in packed.layout.chunks(chunk_bytes):
        total.add(packed.flat[chunk.start : chunk.stop], chunk.start)
    assert total.hexdigest() == packed.checksum


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
    assert pack({"w": damage(weights)}).checksum != pack({"w": weights}).checksum


@pytest.mark.parametrize("place", [0, 2**15, 2**16 - 4])
def test_checksum_shows_a_change_of_the_highest_bit_anywhere(place):
    # Times an even number it would be lost to wrapping.
    ones = torch.ones(2**17, dtype=torch.bfloat16)
    changed = ones.clone()
    changed[4 * place // 2 + 3] *= -1
    assert pack({"w": changed}).checksum != pack({"w": ones}).checksum


def test_checksum_differs_for_another_name_or_order():
    a, b = torch.ones(2), torch.zeros(2)
    assert pack({"a": a}).checksum != pack({"b": a}).checksum
    assert pack({"a": a, "b": b}).checksum != pack({"b": b, "a": a}).checksum


# --- sending and receiving ----------------------------------------------------------------------


def test_what_is_sent_arrives_at_every_rank_bit_by_bit():
    packed = pack(TENSORS)
    chunks = packed.layout.chunks(64)
    store = transfer.build_store("0.0.0.0", 0, True, 10)
    buffers = [packed.layout.empty(CPU) for _ in range(2)]
    seen: list[list[int]] = [[], []]

    def receive(place: int) -> None:
        own = transfer.build_store("127.0.0.1", store.port, False, 10)
        group = transfer.build_group(own, 1 + place, 3, CPU, 10)
        pieces = [buffers[place][c.start : c.stop] for c in chunks]
        transfer.broadcast(group, pieces, 10, arrived=seen[place].append)

    threads = [threading.Thread(target=receive, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    group = transfer.build_group(store, 0, 3, CPU, 10)
    transfer.broadcast(group, [packed.flat[c.start : c.stop] for c in chunks], 10)
    for thread in threads:
        thread.join(10)
    for buffer in buffers:
        assert torch.equal(buffer, packed.flat)
    assert seen == [list(range(len(chunks)))] * 2


def test_rank_that_sends_nothing_more_fails_the_others_within_their_deadline():
    store = transfer.build_store("0.0.0.0", 0, True, 10)
    errors: list[TransferError] = []

    def receive() -> None:
        own = transfer.build_store("127.0.0.1", store.port, False, 10)
        group = transfer.build_group(own, 1, 2, CPU, 10)
        with pytest.raises(TransferError) as caught:
            transfer.broadcast(group, [torch.zeros(16, dtype=torch.uint8)], 0.5)
        errors.append(caught.value)

    thread = threading.Thread(target=receive)
    thread.start()
    group = transfer.build_group(store, 0, 2, CPU, 10)
    thread.join(10)
    assert len(errors) == 1
    del group


def test_group_that_nobody_joins_fails_within_its_deadline():
    store = transfer.build_store("0.0.0.0", 0, True, 0.5)
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"rank 0 of 2 could not join .* within 0.5 s"):
        transfer.build_group(store, 0, 2, CPU, 0.5)
    assert time.monotonic() - began < 3


def listeners() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections()
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


def test_a_store_of_one_machine_listens_on_loopback_alone():
    before = listeners()
    store = transfer.build_store(transfer.LOOPBACK, 0, True, 30)
    assert listeners() - before == {(transfer.LOOPBACK, store.port)}
    other = transfer.build_store(transfer.LOOPBACK, store.port, False, 30)
    other.set("from", "there")
    assert store.get("from") == b"there"


def test_a_port_of_loopback_that_is_taken_is_refused_in_a_sentence():
    store = transfer.build_store(transfer.LOOPBACK, 0, True, 30)
    with pytest.raises(TransferError, match=r"no rendezvous at 127\.0\.0\.1:"):
        transfer.build_store(transfer.LOOPBACK, store.port, True, 30)


@pytest.mark.parametrize(("interface", "stays"), [("lo", True), ("eth0", False), (None, False)])
def test_gloo_on_the_loopback_interface_keeps_weights_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, interface: str | None, stays: bool
):
    monkeypatch.delenv(transfer.INTERFACE, raising=False)
    if interface is not None:
        monkeypatch.setenv(transfer.INTERFACE, interface)
    assert transfer.stays_on_this_machine() is stays
