"""Kernels of a decoding step, one token a row, in Triton.

What torch offers for it wastes a GPU: the fused attention of float32 does the work of 64 queries
for each, and rotating and storing a token's keys is eight launches. A step of the bundled policy is
half as long with these, and other processes on the GPU wait less.

Letters: `B` rows, `Q` query heads, `K` key/value heads, `G` = Q / K, `D` head width, `S` slots,
`M` cache positions, `X` = Q + K. The last dimension of every tensor is contiguous.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE: Final = 8192
"""Products of queries and keys that a program holds at a time."""


def rotate_and_store(
    qk_BXD: Tensor,
    v_BKD: Tensor,
    rotary_2MD: Tensor,
    cache_S2KMD: Tensor,
    slot_B: Tensor,
    position_B: Tensor,
) -> Tensor:
    """Rotated queries [B, Q, D]; rotated keys, and values, go into the cache.

    `rotary_2MD` holds cosines and signed sines of all positions: the halves (a, b) of a head become
    (a cos - b sin, b cos + a sin).
    """
    num_rows, num_kv, width = v_BKD.shape
    num_q = qk_BXD.shape[1] - num_kv
    q_BQD = torch.empty(num_rows, num_q, width, dtype=qk_BXD.dtype, device=qk_BXD.device)
    _rotate_and_store[(num_rows, num_q + 2 * num_kv)](
        qk_BXD,
        v_BKD,
        rotary_2MD,
        cache_S2KMD,
        slot_B,
        position_B,
        q_BQD,
        *_strides(qk_BXD, 2),
        *_strides(v_BKD, 2),
        *_strides(rotary_2MD, 2),
        *_strides(cache_S2KMD, 4),
        num_q,
        num_kv,
        width,
        _power_of_two(width),
    )
    return q_BQD


def read_cache(
    q_BQD: Tensor, cache_S2KMD: Tensor, slot_B: Tensor, position_B: Tensor, scale: float
) -> Tensor:
    """What one token of each row reads [B, Q, D]: softmax(scale q k) v over its slot's positions up
    to its own.

    A row at the cache's last position, where no sequence comes, only fills the batch up: it reads
    one position.
    """
    num_rows, num_q, width = q_BQD.shape
    num_kv, num_positions = cache_S2KMD.shape[2:4]
    group, padded = _power_of_two(num_q // num_kv), _power_of_two(width)
    read_BQD = torch.empty_like(q_BQD)
    _read_cache[(num_rows, num_kv)](
        q_BQD,
        cache_S2KMD,
        slot_B,
        position_B,
        read_BQD,
        *_strides(q_BQD, 2),
        *_strides(cache_S2KMD, 4),
        num_positions - 1,
        scale,
        num_q // num_kv,
        width,
        group,
        padded,
        max(16, min(128, TILE // (group * padded))),
    )
    return read_BQD


def _strides(x: Tensor, num: int) -> tuple[int, ...]:
    """Of the first dimensions."""
    assert x.stride(-1) == 1, "the last dimension must be contiguous"
    return x.stride()[:num]


def _power_of_two(num: int) -> int:
    """3 -> 4: the sizes that a program's tensors may have."""
    return 1 << (num - 1).bit_length()


# Parameters of kernels have no types: the compiler takes them for constants.
_jit: Any = triton.jit


@_jit
def _rotate_and_store(  # type: ignore[no-untyped-def]
    qk,
    v,
    rotary,
    cache,
    slot,
    position,
    q_out,
    qk_row,
    qk_head,
    v_row,
    v_head,
    rotary_kind,
    rotary_position,
    cache_slot,
    cache_kind,
    cache_head,
    cache_position,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """A program for each head of each row."""
    row, head = tl.program_id(0), tl.program_id(1)
    place = tl.load(position + row)
    target = cache + tl.load(slot + row) * cache_slot + place * cache_position
    d = tl.arange(0, PADDED)
    exists = d < WIDTH
    if head < NUM_Q + NUM_KV:
        source = qk + row * qk_row + head * qk_head
        x = tl.load(source + d, mask=exists).to(tl.float32)
        other = tl.load(source + (d + WIDTH // 2) % WIDTH, mask=exists).to(tl.float32)
        angle = rotary + place * rotary_position + d
        cos = tl.load(angle, mask=exists).to(tl.float32)
        sin = tl.load(angle + rotary_kind, mask=exists).to(tl.float32)
        x = (x * cos + other * sin).to(q_out.dtype.element_ty)
        if head < NUM_Q:
            tl.store(q_out + (row * NUM_Q + head) * WIDTH + d, x, mask=exists)
        else:
            tl.store(target + (head - NUM_Q) * cache_head + d, x, mask=exists)
    else:
        kv_head = head - NUM_Q - NUM_KV
        value = tl.load(v + row * v_row + kv_head * v_head + d, mask=exists)
        tl.store(target + cache_kind + kv_head * cache_head + d, value, mask=exists)


@_jit
def _read_cache(  # type: ignore[no-untyped-def]
    q,
    cache,
    slot,
    position,
    out,
    q_row,
    q_head,
    cache_slot,
    cache_kind,
    cache_head,
    cache_position,
    last,
    scale,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each key/value head of each row, over blocks of positions; the softmax is
    taken as they come (Milakov and Gimelshein 2018)."""
    row, head = tl.program_id(0), tl.program_id(1)
    place = tl.load(position + row)
    num_read = tl.where(place < last, place + 1, 1)
    g, d = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_WIDTH)
    has_width = d < WIDTH
    exists = (g < GROUP)[:, None] & has_width[None, :]
    at = row * q_row + (head * GROUP + g)[:, None] * q_head + d[None, :]
    queries = tl.load(q + at, mask=exists, other=0.0).to(tl.float32) * scale
    keys = cache + tl.load(slot + row) * cache_slot + head * cache_head
    top = tl.full([PADDED_GROUP], -float("inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    read = tl.zeros([PADDED_GROUP, PADDED_WIDTH], tl.float32)
    for start in range(0, num_read, BLOCK):
        m = start + tl.arange(0, BLOCK)
        stands = m < num_read
        mask = stands[:, None] & has_width[None, :]
        where = m[:, None] * cache_position + d[None, :]
        k = tl.load(keys + where, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(keys + cache_kind + where, mask=mask, other=0.0).to(tl.float32)
        score = tl.sum(queries[:, None, :] * k[None, :, :], 2)
        score = tl.where(stands[None, :], score, -float("inf"))
        highest = tl.maximum(top, tl.max(score, 1))
        share = tl.exp(score - highest[:, None])
        shrunk = tl.exp(top - highest)
        total = total * shrunk + tl.sum(share, 1)
        read = read * shrunk[:, None] + tl.sum(share[:, :, None] * v[None, :, :], 1)
        top = highest
    read = read / total[:, None]
    tl.store(out + at, read.to(out.dtype.element_ty), mask=exists)
