"""Kernels of a pass through the network on a GPU, in Triton: of single tokens, and of prompts.

With a small network a decoding step is a chain of tiny kernels, and what counts is how many there
are: of torch's own the bundled policy takes a hundred and thirty, of these twenty-eight. Torch's
attention, made for many queries, would moreover do the work of 64 for each.

A row is one token. Letters: `B` rows, `H` hidden width, `I` intermediate width, `Q` query heads,
`K` key/value heads, `D` head width, `S` slots, `M` cache positions, `V` vocabulary. All but caches
and tables of angles are contiguous. Sums are float32 whatever the type of the weights.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from leeway.actors.decoder import MANY_ROWS, Linear

TILE: Final = 4096
"""Numbers of keys that a program which reads the cache holds at a time."""
COLUMNS: Final = 32
"""Outputs of a program that multiplies; few, so that there are programs for all of a GPU."""


class Tile(NamedTuple):
    """Of a program that multiplies: rows, inputs it reads at a time, and how it is compiled.

    Measured on an H200 with networks of 4 and 135 million parameters.
    """

    rows: int
    depth: int
    warps: int
    stages: int


NORMED: Final = Tile(rows=16, depth=64, warps=2, stages=4)
"""16 rows are the fewest that Triton's product takes."""
PLAIN: Final = Tile(rows=16, depth=128, warps=4, stages=3)
"""Of a product whose inputs are not normalised on the way."""
MANY: Final = Tile(rows=MANY_ROWS, depth=64, warps=4, stages=3)
"""For more rows than that, and for more than a few where outputs are as many as a vocabulary has:
weights are read less often."""
WIDE: Final = 8192
"""Outputs from which on that is so."""
VOCABULARY: Final = 2048
"""Logits that a program which samples reads at a time."""


def project(
    x_BH: Tensor,
    norm_H: Tensor,
    qkv: Linear,
    head_norms: tuple[Tensor, Tensor] | None,
    rotary_2MD: Tensor,
    cache_S2KMD: Tensor,
    slot_B: Tensor,
    position_B: Tensor,
    eps: float,
) -> Tensor:
    """Rotated queries [B, Q, D] of the normalised rows; their rotated keys, and their values, go
    into the cache.

    `head_norms` weigh queries and keys [D] where each head is normalised. `rotary_2MD` holds
    cosines and signed sines of all positions: the halves (a, b) of a head become (a cos - b sin,
    b cos + a sin).
    """
    assert x_BH.is_contiguous()
    num_rows, hidden = x_BH.shape
    num_kv, width = cache_S2KMD.shape[2], cache_S2KMD.shape[4]
    num_heads = qkv.weight.shape[0] // width
    num_q = num_heads - 2 * num_kv
    q_norm_D, k_norm_D = head_norms or (norm_H, norm_H)
    q_BQD = x_BH.new_empty(num_rows, num_q, width)
    tile = _tile(num_rows, num_heads * width, has_norm=True)
    _project[(triton.cdiv(num_rows, tile.rows), num_heads)](
        x_BH,
        norm_H,
        qkv.weight,
        norm_H if qkv.bias is None else qkv.bias,
        q_norm_D,
        k_norm_D,
        rotary_2MD,
        cache_S2KMD,
        slot_B,
        position_B,
        q_BQD,
        num_rows,
        *_strides(rotary_2MD, 2),
        *_strides(cache_S2KMD, 4),
        eps,
        num_q,
        num_kv,
        hidden,
        width,
        max(16, _power_of_two(width // 2)),
        qkv.bias is not None,
        head_norms is not None,
        tile.rows,
        tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return q_BQD


def linear(x_BH: Tensor, of: Linear, norm_H: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """[B, N] of rows that are normalised first where `norm_H` is given."""
    out_BN = x_BH.new_empty(len(x_BH), len(of.weight))
    _launch(x_BH, of, out_BN, norm_H, eps)
    return out_BN


def gated(x_BH: Tensor, gate_up: Linear, norm_H: Tensor, eps: float) -> Tensor:
    """silu(gate) up [B, I] of the normalised rows; weights of `gate_up` stand one above the
    other."""
    out_BI = x_BH.new_empty(len(x_BH), len(gate_up.weight) // 2)
    _launch(x_BH, gate_up, out_BI, norm_H, eps, is_gated=True)
    return out_BI


def add_linear(x_BH: Tensor, y_BN: Tensor, of: Linear) -> None:
    """Add weight y + bias to x, in place."""
    _launch(y_BN, of, x_BH, is_added=True)


def _launch(
    x: Tensor,
    of: Linear,
    out: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    *,
    is_gated: bool = False,
    is_added: bool = False,
) -> None:
    assert x.is_contiguous() and out.is_contiguous()
    num_rows, num_out = out.shape
    tile = _tile(num_rows, num_out, norm is not None)
    _linear[(triton.cdiv(num_rows, tile.rows), triton.cdiv(num_out, COLUMNS))](
        x,
        x if norm is None else norm,
        of.weight,
        x if of.bias is None else of.bias,
        out,
        num_rows,
        eps,
        num_out,
        x.shape[1],
        norm is not None,
        of.bias is not None,
        is_gated,
        is_added,
        tile.rows,
        COLUMNS,
        tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def sample_next(
    logits_BV: Tensor, uniform_BV: Tensor, state_4B: Tensor, out_2B: Tensor, last: int
) -> None:
    """Choose a token for each row, and make the row ready for the next step.

    Gumbel-max: an exact sample at temperature 1, the mode at 0. `uniform_BV` is in [0, 1).
    `state_4B` holds token, slot, position and temperature; token and position are replaced,
    the position by the next one, at most `last`. `out_2B` receives the token and its log-prob at
    temperature 1.
    """
    assert logits_BV.is_contiguous() and uniform_BV.is_contiguous()
    num_rows, size = logits_BV.shape
    _sample[(num_rows,)](
        logits_BV,
        uniform_BV,
        state_4B,
        out_2B,
        state_4B.stride(0),
        out_2B.stride(0),
        last,
        size,
        VOCABULARY,
    )


def read_cache(
    q_BQD: Tensor, cache_S2KMD: Tensor, slot_B: Tensor, position_B: Tensor, scale: float
) -> Tensor:
    """What each row reads [B, Q, D]: softmax(scale q k) v over its slot's positions up to its own.

    A row at the cache's last position, where no sequence comes, only fills the batch up: it reads
    one position.
    """
    num_rows, num_q, width = q_BQD.shape
    num_kv, num_positions = cache_S2KMD.shape[2:4]
    group, padded = (max(16, _power_of_two(n)) for n in (num_q // num_kv, width))
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
        max(16, min(128, TILE // padded)),
    )
    return read_BQD


def _tile(num_rows: int, num_out: int, has_norm: bool) -> Tile:
    few = NORMED if has_norm else PLAIN
    is_wide = num_rows > few.rows and num_out >= WIDE
    return MANY if num_rows > MANY_ROWS or is_wide else few


def _strides(x: Tensor, num: int) -> tuple[int, ...]:
    """Of the first dimensions."""
    assert x.stride(-1) == 1, "the last dimension must be contiguous"
    return x.stride()[:num]


def _power_of_two(num: int) -> int:
    """3 -> 4: the sizes that a program's tensors may have."""
    return 1 << (num - 1).bit_length()


# Parameters of kernels have no types: the compiler takes them for constants. It would compile anew
# for numbers that are 1 or divisible by 16, and for such addresses; those of rows are by chance.
_jit: Any = triton.jit(
    do_not_specialize=["num_rows", "state_kind", "out_kind"],
    do_not_specialize_on_alignment=["slot", "position"],
)
_inlined: Any = triton.jit


@_inlined
def _numbers(at, exists):  # type: ignore[no-untyped-def]
    """float32 numbers at these places, 0 where there is none."""
    return tl.load(at, mask=exists, other=0.0).to(tl.float32)


@_inlined
def _row(at, exists):  # type: ignore[no-untyped-def]
    """[1, N] of N places."""
    return _numbers(at, exists)[None, :]


@_inlined
def _inputs(x, b, h, is_row, inside, NUM_IN: tl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS, DEPTH] of the rows to be multiplied."""
    return _numbers(x + b[:, None] * NUM_IN + h[None, :], is_row[:, None] & inside[None, :])


@_inlined
def _product(x_bh, weight_at, exists):  # type: ignore[no-untyped-def]
    """[ROWS, N] in float32, by tensor cores: of numbers in the type of the weights, float32 ones
    each as three of TF32, which loses next to nothing."""
    w_hn = tl.load(weight_at, mask=exists, other=0.0)
    return tl.dot(x_bh.to(w_hn.dtype), w_hn, input_precision="tf32x3")


@_jit
def _project(  # type: ignore[no-untyped-def]
    x,
    norm,
    weight,
    bias,
    q_norm,
    k_norm,
    rotary,
    cache,
    slot,
    position,
    q_out,
    num_rows,
    rotary_kind,
    rotary_position,
    cache_slot,
    cache_kind,
    cache_head,
    cache_position,
    eps,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_HEAD_NORMS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A program for each head of ROWS rows; the two halves of the head apart, for the rotation."""
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    d = tl.arange(0, HALF)
    is_row, is_column = b < num_rows, d < WIDTH // 2
    n = head * WIDTH + d
    first = tl.zeros([ROWS, HALF], tl.float32)
    second = tl.zeros([ROWS, HALF], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        h = start + tl.arange(0, DEPTH)
        inside = h < HIDDEN
        x_bh = _inputs(x, b, h, is_row, inside, HIDDEN)
        squares += tl.sum(x_bh * x_bh, 1)
        x_bh *= _row(norm + h, inside)
        where = weight + n[None, :] * HIDDEN + h[:, None]
        mask = is_column[None, :] & inside[:, None]
        first += _product(x_bh, where, mask)
        second += _product(x_bh, where + WIDTH // 2 * HIDDEN, mask)
    scale = 1 / tl.sqrt(squares / HIDDEN + eps)
    first, second = first * scale[:, None], second * scale[:, None]
    if HAS_BIAS:
        first += _row(bias + n, is_column)
        second += _row(bias + n + WIDTH // 2, is_column)
    place = tl.load(position + b, mask=is_row, other=0)
    if head < NUM_Q + NUM_KV:
        if HAS_HEAD_NORMS:
            # Padded columns are 0 and add nothing.
            squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            scale = 1 / tl.sqrt(squares / WIDTH + eps)
            head_norm = q_norm if head < NUM_Q else k_norm
            first *= scale[:, None] * _row(head_norm + d, is_column)
            second *= scale[:, None] * _row(head_norm + d + WIDTH // 2, is_column)
        angle = rotary + place[:, None] * rotary_position + d[None, :]
        has = is_column[None, :]
        turned = first * _numbers(angle, has) + second * _numbers(angle + rotary_kind, has)
        angle += WIDTH // 2
        second = second * _numbers(angle, has) + first * _numbers(angle + rotary_kind, has)
        first = turned
    mask = is_row[:, None] & is_column[None, :]
    if head < NUM_Q:
        target = q_out + (b[:, None] * NUM_Q + head) * WIDTH + d[None, :]
        tl.store(target, first.to(q_out.dtype.element_ty), mask=mask)
        tl.store(target + WIDTH // 2, second.to(q_out.dtype.element_ty), mask=mask)
    else:
        kind, kv_head = (head - NUM_Q) // NUM_KV, (head - NUM_Q) % NUM_KV
        of_row = tl.load(slot + b, mask=is_row, other=0) * cache_slot + place * cache_position
        target = cache + of_row[:, None] + kind * cache_kind + kv_head * cache_head + d[None, :]
        tl.store(target, first.to(cache.dtype.element_ty), mask=mask)
        tl.store(target + WIDTH // 2, second.to(cache.dtype.element_ty), mask=mask)


@_jit
def _linear(  # type: ignore[no-untyped-def]
    x,
    norm,
    weight,
    bias,
    out,
    num_rows,
    eps,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A program for each ROWS x COLUMNS of the output. The norm of a row is a factor of its whole
    product, so it is summed up on the way."""
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = b < num_rows, n < NUM_OUT
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    other = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, NUM_IN, DEPTH):
        h = start + tl.arange(0, DEPTH)
        inside = h < NUM_IN
        x_bh = _inputs(x, b, h, is_row, inside, NUM_IN)
        if HAS_NORM:
            squares += tl.sum(x_bh * x_bh, 1)
            x_bh *= _row(norm + h, inside)
        where = weight + n[None, :] * NUM_IN + h[:, None]
        mask = is_column[None, :] & inside[:, None]
        product += _product(x_bh, where, mask)
        if IS_GATED:
            other += _product(x_bh, where + NUM_OUT * NUM_IN, mask)
    if HAS_NORM:
        scale = 1 / tl.sqrt(squares / NUM_IN + eps)
        product, other = product * scale[:, None], other * scale[:, None]
    if HAS_BIAS:
        product += _row(bias + n, is_column)
    if IS_GATED:
        if HAS_BIAS:
            other += _row(bias + NUM_OUT + n, is_column)
        product = product / (1 + tl.exp(-product)) * other
    target = out + b[:, None] * NUM_OUT + n[None, :]
    mask = is_row[:, None] & is_column[None, :]
    if IS_ADDED:
        product += _numbers(target, mask)
    tl.store(target, product.to(out.dtype.element_ty), mask=mask)


@_jit
def _sample(  # type: ignore[no-untyped-def]
    logits,
    uniform,
    state,
    out,
    state_kind,
    out_kind,
    last,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each row, over blocks of the vocabulary."""
    row = tl.program_id(0)
    temperature = tl.load(state + 3 * state_kind + row).to(tl.float32)
    top = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    best = tl.full([], -float("inf"), tl.float32)
    token = tl.zeros([], tl.int32)
    for start in range(0, SIZE, BLOCK):
        v = start + tl.arange(0, BLOCK)
        inside = v < SIZE
        z = tl.load(logits + row * SIZE + v, mask=inside, other=-float("inf")).to(tl.float32)
        highest = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - highest) + tl.sum(tl.exp(z - highest), 0)
        top = highest
        u = tl.load(uniform + row * SIZE + v, mask=inside, other=0.5).to(tl.float32)
        gumbel = -tl.log(-tl.log(tl.minimum(tl.maximum(u, 1e-20), 1 - 1e-7)))
        score = z + temperature * gumbel
        of_block = tl.max(score, 0)
        token = tl.where(of_block > best, start + tl.argmax(score, 0), token)
        best = tl.maximum(of_block, best)
    chosen = tl.load(logits + row * SIZE + token).to(tl.float32)
    tl.store(out + row, token.to(tl.float64))
    tl.store(out + out_kind + row, (chosen - top - tl.log(total)).to(tl.float64))
    tl.store(state + row, token.to(tl.int64))
    place = state + 2 * state_kind + row
    tl.store(place, tl.minimum(tl.load(place) + 1, last))


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
    queries = tl.load(q + at, mask=exists, other=0.0)
    keys = cache + tl.load(slot + row) * cache_slot + head * cache_head
    top = tl.full([PADDED_GROUP], -float("inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    read = tl.zeros([PADDED_GROUP, PADDED_WIDTH], tl.float32)
    for start in range(0, num_read, BLOCK):
        m = start + tl.arange(0, BLOCK)
        stands = m < num_read
        mask = stands[:, None] & has_width[None, :]
        where = keys + m[:, None] * cache_position + d[None, :]
        k_md = tl.load(where, mask=mask, other=0.0)
        score = scale * tl.dot(queries, tl.trans(k_md), input_precision="tf32x3")
        score = tl.where(stands[None, :], score, -float("inf"))
        highest = tl.maximum(top, tl.max(score, 1))
        share = tl.exp(score - highest[:, None])
        shrunk = tl.exp(top - highest)
        total = total * shrunk + tl.sum(share, 1)
        v_md = tl.load(where + cache_kind, mask=mask, other=0.0)
        of_block = tl.dot(share.to(v_md.dtype), v_md, input_precision="tf32x3")
        read = read * shrunk[:, None] + of_block
        top = highest
    read = read / total[:, None]
    tl.store(out + at, read.to(out.dtype.element_ty), mask=exists)
