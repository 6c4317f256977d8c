"""Bytes that are not a group are a CodecError, soon and in little memory, whatever they claim.

`sealed` gives a body the header and the checksum of a group, so that what lies behind them is
reached: damage to bare bytes is found by the checksum alone.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.replay.codec import decode, encode
from leeway.replay.errors import CodecError, DataError
from leeway.replay.schema import SCHEMA_VERSION, Group, PolicyVersion, check_group
from leeway.replay.store import Slot
from leeway.replay.synthetic import build_group

HEADER = struct.pack("<2sH", b"LW", SCHEMA_VERSION)
DATA = encode(build_group(Slot("a-group", PolicyVersion(3))))
BODY = DATA[12:]
MAX_HOSTILE_BYTES = 64 * 2**10
"""What a few hundred bytes may make decode hold at its peak, error and all."""

BLOCKS = struct.pack("<2f2i3H", -1.0, -2.0, 3, 4, 5, 6, 7)
"""The blocks of one trajectory of 3 tokens, the last 2 generated, without runs."""


def sealed(body: bytes) -> bytes:
    return HEADER + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) + body


def built(blocks: bytes, description: bytes) -> bytes:
    return sealed(struct.pack("<I", len(description)) + blocks + description)


def described(num_tokens=3, num_generated=2, id_bytes=2, num_runs=None, **changes) -> bytes:
    fields = {
        "trajectory_id": "t",
        "num_tokens": num_tokens,
        "num_generated": num_generated,
        "turns": [[1, 2, 0, "answer"]],
        "reward": 1.0,
        "stop_reason": "answer",
        "scores": {},
        "duration_s": 0.5,
        "turn_rewards": None,
    }
    trajectory = list({**fields, **changes}.values())
    return msgspec.msgpack.encode(["g", "q", "w", id_bytes, num_runs, [trajectory]])


def assert_a_group_to_use_or_a_codec_error(data: bytes) -> None:
    with suppress(CodecError):
        group = decode(data)
        for trajectory in group.trajectories:
            assert len(trajectory.versions) == len(trajectory.logprobs)
            assert trajectory.token_ids.dtype == trajectory.versions.dtype == np.int32
            assert trajectory.logprobs.dtype == np.float32
        assert isinstance(decode(encode(group)), Group)
        with suppress(DataError):
            check_group(group)


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MAX_HOSTILE_BYTES
    finally:
        tracemalloc.stop()


def test_every_truncation_is_a_codec_error():
    for length in range(len(DATA)):
        with pytest.raises(CodecError):
            decode(DATA[:length])


def test_every_truncation_with_a_checksum_is_a_codec_error():
    for length in range(len(BODY)):
        with pytest.raises(CodecError):
            decode(sealed(BODY[:length]))


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flip_of_any_byte_is_a_codec_error(mask):
    for position in range(len(DATA)):
        damaged = bytearray(DATA)
        damaged[position] ^= mask
        with pytest.raises(CodecError):
            decode(bytes(damaged))


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flip_with_a_checksum_is_a_codec_error_or_another_group(mask):
    for position in range(len(BODY)):
        damaged = bytearray(BODY)
        damaged[position] ^= mask
        assert_a_group_to_use_or_a_codec_error(sealed(bytes(damaged)))


def test_trailing_bytes_are_a_codec_error():
    for tail in (b"\x00", b"x", b"\xc0", DATA):
        for data in (DATA + tail, sealed(BODY + tail)):
            with pytest.raises(CodecError):
                decode(data)


@given(st.integers(0, len(BODY)), st.integers(0, len(BODY)), st.binary(max_size=40))
@settings(max_examples=300, deadline=None)
def test_a_splice_is_a_codec_error_or_another_group(first, second, inserted):
    start, end = sorted((first, second))
    spliced = BODY[:start] + inserted + BODY[end:]
    assert_a_group_to_use_or_a_codec_error(sealed(spliced))
    if spliced != BODY:
        with pytest.raises(CodecError):
            decode(DATA[:12] + spliced)


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_noise_behind_a_header_is_a_codec_error(noise):
    for data in (noise, HEADER + noise, sealed(noise), built(noise, b""), built(b"", noise)):
        with pytest.raises(CodecError):
            decode(data)


NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.integers(0, 9)
ODD_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(
    st.binary(max_size=60) | st.just(BLOCKS),
    st.dictionaries(
        st.sampled_from(["num_tokens", "num_generated", "id_bytes", "num_runs", "turns", "reward"])
        | st.sampled_from(["trajectory_id", "stop_reason", "scores", "turn_rewards"]),
        ODD_VALUES,
        max_size=3,
    ),
)
@settings(max_examples=300, deadline=None)
def test_odd_fields_are_a_codec_error_or_another_group(blocks, changes):
    assert_a_group_to_use_or_a_codec_error(built(blocks, described(**changes)))


def test_the_group_that_the_hostile_ones_are_made_of_is_sound():
    check_group(decode(built(BLOCKS, described())))


def runs(*numbers: int) -> bytes:
    """The blocks of BLOCKS, their versions replaced by these values and lengths."""
    return BLOCKS[:8] + struct.pack(f"<{len(numbers)}i", *numbers) + BLOCKS[16:]


HUGE = (2**31 - 1, 2**32, 2**62, 2**64 - 1)
NESTED = b"\x91" * 400 + b"\xc0"
PREFIX = msgspec.msgpack.encode(["g", "q", "w", 2, None])[1:]
"""Five of the six fields of a group; the trajectories follow."""
HOSTILE = {
    **{f"{n} tokens": built(BLOCKS, described(num_tokens=n)) for n in (0, 2, 4, -1, *HUGE)},
    **{f"{n} generated": built(BLOCKS, described(num_generated=n)) for n in (0, 1, 3, -1, *HUGE)},
    **{f"{n} runs": built(BLOCKS, described(num_runs=n)) for n in (0, 2, -1, *HUGE)},
    "a token more, a log-prob less": built(BLOCKS, described(num_tokens=-1, num_generated=3)),
    "ids of four bytes": built(BLOCKS, described(id_bytes=4)),
    "ids of no bytes": built(BLOCKS, described(id_bytes=0)),
    "a block missing": built(BLOCKS[:16], described()),
    "a block too many": built(BLOCKS * 2, described()),
    "a run of 2**31 - 1": built(runs(3, 2**31 - 1), described(num_runs=1)),
    "a run below 0": built(runs(3, 4, -1, 3), described(num_runs=2)),
    "a run too short": built(runs(3, 1), described(num_runs=1)),
    "a run too long": built(runs(3, 3), described(num_runs=1)),
    "runs that sum to T in 32 bits": built(
        runs(3, 3, 3, 2**31 - 1, 2**31 - 1, 4), described(num_runs=3)
    ),
    "a description longer than the bytes": sealed(struct.pack("<I", 2**32 - 1) + BODY[4:]),
    "no description": built(BLOCKS, b""),
    "a description of nothing": built(BLOCKS, b"\xc0"),
    "deep arrays": built(BLOCKS, NESTED),
    "deep maps": built(BLOCKS, b"\x81" * 400 + b"\xc0"),
    "deep arrays for trajectories": built(BLOCKS, b"\x96" + PREFIX + NESTED),
    "deep arrays in a field too many": built(BLOCKS, b"\x97" + PREFIX + b"\x90" + NESTED),
    "2**32 - 1 trajectories": built(b"", b"\x96" + PREFIX + b"\xdd" + b"\xff" * 4),
    "2**28 trajectories": built(b"", b"\x96" + PREFIX + b"\xdd\x10\x00\x00\x00" + bytes(200)),
    "2**32 - 1 fields": built(b"", b"\xdd" + b"\xff" * 4 + PREFIX),
    "a text of 2**32 - 1 bytes": built(b"", b"\x96\xdb" + b"\xff" * 4 + PREFIX[2:] + b"\x90"),
    "a map of 2**32 - 1 scores": built(
        BLOCKS, described(scores=None)[:-11] + b"\xdf" + b"\xff" * 4 + bytes(10)
    ),
    "2**32 - 1 turns": built(
        BLOCKS, b"\x96" + PREFIX + b"\x91\x99\xa1t\x03\x02\xdd" + b"\xff" * 4 + bytes(200)
    ),
    "a text that is not UTF-8": built(b"", b"\x96\xa1\xff" + PREFIX[2:] + b"\x90"),
    "an extension type": built(BLOCKS, b"\xc7\x02\x01xx"),
    "an unknown stop reason": built(BLOCKS, described(stop_reason="crash")),
    "a field too many": built(BLOCKS, described(extra=1)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_a_codec_error_in_little_memory(name):
    with little_memory(), pytest.raises(CodecError):
        decode(HOSTILE[name])


@given(st.sampled_from(sorted(HOSTILE)), st.binary(max_size=20), st.integers(0, 400))
@settings(max_examples=200, deadline=None)
def test_hostile_bytes_with_noise_stay_in_little_memory(name, noise, position):
    body = HOSTILE[name][12:]
    with little_memory(), suppress(CodecError):
        decode(sealed(body[:position] + noise + body[position + len(noise) :]))


def test_arrays_claimed_in_every_level_at_once_take_little_memory():
    claim = b"\xdd\x00\x00\xff\xff"
    data = built(b"", b"\x96" + PREFIX + (claim + b"\x99\xa1t\x03\x02" + claim) * 20 + bytes(100))
    with little_memory(), pytest.raises(CodecError):
        decode(data)


def test_runs_expand_no_further_than_the_logprobs_reach():
    num_generated = 2**16
    blocks = bytes(4 * num_generated) + struct.pack("<2i", 3, num_generated)
    turns = [[0, num_generated, 0, "answer"]]
    data = built(blocks, described(0, num_generated, num_runs=1, turns=turns))
    tracemalloc.start()
    decode(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * len(data)


@pytest.mark.parametrize(
    "turn", [[1, 3, 0, "answer"], [0, 2, 0, "answer"], [2**62, 2, 0, "answer"]]
)
def test_turns_beyond_the_tokens_decode_and_are_refused_by_check_group(turn):
    group = decode(built(BLOCKS, described(turns=[turn])))
    with pytest.raises(DataError):
        check_group(group)
