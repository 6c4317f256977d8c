"""Groups survive the wire; anything else is a CodecError."""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.replay import codec
from leeway.replay.codec import decode, encode
from leeway.replay.errors import CodecError
from leeway.replay.schema import SCHEMA_VERSION, PolicyVersion, check_group
from leeway.replay.store import Slot
from leeway.replay.synthetic import build_group

SLOT = Slot("a-group", PolicyVersion(3))
DATA = encode(build_group(SLOT))


@given(st.integers(1, 4), st.integers(8, 200), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_group_decodes_to_what_was_encoded(num_trajectories, num_tokens, seed):
    group = build_group(SLOT, None, num_trajectories, num_tokens, seed)
    got = decode(encode(group))
    check_group(got)
    assert (got.group_id, got.question_id, got.worker_id, got.oldest_version) == (
        group.group_id,
        group.question_id,
        group.worker_id,
        3,
    )
    for a, b in zip(got.trajectories, group.trajectories, strict=True):
        for name in ("token_ids", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
            assert getattr(a, name).dtype == getattr(b, name).dtype
        assert (a.turns, a.scores, a.stop_reason) == (b.turns, b.scores, b.stop_reason)


@given(st.integers(0, len(DATA) - 1))
def test_truncated_bytes_are_a_codec_error(length):
    with pytest.raises(CodecError):
        decode(DATA[:length])


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
@settings(max_examples=300)
def test_a_flipped_byte_is_a_codec_error_or_changes_nothing(position, mask):
    damaged = bytearray(DATA)
    damaged[position] ^= mask
    with suppress(CodecError):
        assert encode(decode(bytes(damaged))) == DATA


@given(st.binary(max_size=200))
def test_arbitrary_bytes_behind_the_header_are_a_codec_error(noise):
    with pytest.raises(CodecError):
        decode(DATA[:4] + noise)
    with pytest.raises(CodecError):
        decode(DATA[:4] + zstandard.ZstdCompressor().compress(noise))


def test_trailing_bytes_are_a_codec_error():
    with pytest.raises(CodecError):
        decode(DATA + b"x")


def test_another_schema_version_names_both_numbers():
    with pytest.raises(CodecError, match=rf"version 999, this program reads {SCHEMA_VERSION}"):
        decode(struct.pack("<2sH", b"LW", 999) + DATA[4:])


def test_a_frame_that_would_inflate_too_far_is_refused_before_inflating(monkeypatch):
    monkeypatch.setattr(codec, "MAX_DECODED_BYTES", 1000)
    bomb = zstandard.ZstdCompressor().compress(bytes(10**6))
    with pytest.raises(CodecError, match="1000000 bytes, over 1000"):
        decode(DATA[:4] + bomb)


def test_a_frame_that_hides_its_size_is_refused():
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(b"x")
    with pytest.raises(CodecError, match="would inflate"):
        decode(DATA[:4] + hidden)


def test_arrays_of_odd_length_are_a_codec_error():
    import msgspec

    wire = msgspec.msgpack.encode(
        ["g", "q", "w", [["t", b"abc", [], b"", b"", 0.0, "answer", {}, 0.0]]]
    )
    with pytest.raises(CodecError):
        decode(DATA[:4] + zstandard.ZstdCompressor().compress(wire))
