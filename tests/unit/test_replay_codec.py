"""Groups survive the wire, bit by bit, and their bytes are as few as the format says."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.replay.codec import decode, encode
from leeway.replay.errors import CodecError, DataError
from leeway.replay.schema import (
    SCHEMA_VERSION,
    Action,
    Group,
    GroupId,
    PolicyVersion,
    Trajectory,
    Turn,
    check_group,
)
from leeway.replay.store import Slot
from leeway.replay.synthetic import build_group

SLOT = Slot("a-group", PolicyVersion(3))
DATA = encode(build_group(SLOT))
INT32 = st.integers(-(2**31), 2**31 - 1)
FLOATS = st.floats()


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def build_trajectory(ids: list[int], versions: list[int], **changes) -> Trajectory:
    """One turn that generated the last tokens of `ids`, as many as there are versions."""
    start = len(ids) - len(versions)
    fields = {
        "trajectory_id": "t",
        "token_ids": ints(ids),
        "turns": (Turn(start, len(versions), 0, "answer"),),
        "logprobs": -np.arange(1, len(versions) + 1, dtype=np.float32),
        "versions": ints(versions),
        "reward": 1.0,
        "stop_reason": "answer",
        "scores": {"exact_match": 1.0},
        "duration_s": 0.5,
    }
    return Trajectory(**{**fields, **changes})


def group_of(*trajectories: Trajectory) -> Group:
    return Group(
        group_id=GroupId("g"), question_id="q", worker_id="w", trajectories=tuple(trajectories)
    )


def contents(group: Group) -> list[object]:
    """All that a group holds, in a form that compares: arrays as their bits, nan as "nan"."""
    fields = [*msgspec.structs.astuple(group)[:3]]
    for trajectory in group.trajectories:
        for value in msgspec.structs.astuple(trajectory):
            is_array = isinstance(value, np.ndarray)
            fields.append((value.dtype.name, value.tobytes()) if is_array else repr(value))
    return fields


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    turns, position = [], draw(st.integers(0, 4))
    for _ in range(draw(st.integers(0, 4))):
        generated, observed = draw(st.integers(0, 5)), draw(st.integers(0, 3))
        action: Action = draw(st.sampled_from(["search", "answer", "invalid"]))
        turns.append(Turn(position, generated, observed, action))
        position += generated + observed
    num_generated = sum(turn.num_generated for turn in turns)
    id_range = draw(st.sampled_from([st.integers(0, 65_535), st.integers(0, 65_536), INT32]))
    version_range = draw(st.sampled_from([st.just(3), st.integers(3, 4), INT32]))
    bits = draw(st.lists(st.integers(0, 2**32 - 1), min_size=num_generated, max_size=num_generated))
    rewards = st.tuples(*[FLOATS] * len(turns))
    return Trajectory(
        trajectory_id=draw(st.text()),
        token_ids=ints(draw(st.lists(id_range, min_size=position, max_size=position))),
        turns=tuple(turns),
        logprobs=np.array(bits, np.uint32).view(np.float32),
        versions=ints(
            draw(st.lists(version_range, min_size=num_generated, max_size=num_generated))
        ),
        reward=draw(FLOATS),
        stop_reason=draw(st.sampled_from(["answer", "turns", "tokens", "invalid"])),
        scores=draw(st.dictionaries(st.text(), FLOATS, max_size=3)),
        duration_s=draw(FLOATS),
        turn_rewards=draw(st.none() | rewards),
    )


@given(st.text(), st.text(), st.text(), st.lists(trajectories(), max_size=4))
@settings(max_examples=200, deadline=None)
def test_a_group_decodes_to_what_was_encoded_bit_by_bit(group_id, question_id, worker_id, siblings):
    group = Group(
        group_id=GroupId(group_id),
        question_id=question_id,
        worker_id=worker_id,
        trajectories=tuple(siblings),
    )
    assert contents(decode(encode(group))) == contents(group)


@given(st.integers(1, 4), st.integers(8, 200), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_sound_group_is_sound_after_the_wire(num_trajectories, num_tokens, seed):
    group = build_group(SLOT, None, num_trajectories, num_tokens, seed)
    got = decode(memoryview(encode(group)))
    check_group(got)
    assert contents(got) == contents(group)
    assert got.num_tokens == num_trajectories * num_tokens


def test_the_bytes_of_a_group_are_these():
    group = group_of(build_trajectory([5, 6, 7], [3, 4]))
    described = msgspec.msgpack.encode(
        [
            *("g", "q", "w", 2, None),
            [["t", 3, 2, [[1, 2, 0, "answer"]], 1.0, "answer", {"exact_match": 1.0}, 0.5, None]],
        ]
    )
    body = struct.pack("<I2f2i3H", len(described), -1.0, -2.0, 3, 4, 5, 6, 7) + described
    assert (
        encode(group)
        == struct.pack("<2sHQ", b"LW", SCHEMA_VERSION, xxhash.xxh3_64_intdigest(body)) + body
    )


@pytest.mark.parametrize(
    ("versions", "block"),
    [
        ([7] * 512, [7, 512]),
        ([7, 7, 7, 7, 7, 9], [7, 9, 5, 1]),
        ([7, 7, 9], [7, 7, 9]),
        ([7, 7, 9, 9], [7, 7, 9, 9]),
        ([7], [7]),
    ],
)
def test_versions_are_runs_where_those_are_shorter(versions, block):
    group = group_of(build_trajectory([1] * len(versions), versions))
    start = 16 + 4 * len(versions)
    assert encode(group)[start : start + 4 * len(block)] == struct.pack(f"<{len(block)}i", *block)
    assert decode(encode(group)).trajectories[0].versions.tolist() == versions


def test_a_run_of_versions_goes_on_over_trajectories():
    siblings = [build_trajectory([1] * 512, [3] * 512)] * 8
    start = 16 + 4 * 4096
    assert encode(group_of(*siblings))[start : start + 8] == struct.pack("<2i", 3, 4096)


def test_one_id_of_65536_makes_all_ids_of_the_group_four_bytes():
    low, high = (
        group_of(build_trajectory([1] * 99, [3]), build_trajectory([last], [3]))
        for last in (65_535, 65_536)
    )
    assert len(encode(high)) - len(encode(low)) == 2 * 100


def test_arrays_of_another_type_are_written_as_int32_and_float32():
    trajectory = build_trajectory(
        [5, 6],
        [3],
        token_ids=np.array([5, 6], np.int64),
        logprobs=np.array([-0.5, 9.0], np.float64)[::2],
        reward=np.float32(0.5),
        scores={"num_searches": np.int64(2)},
        turn_rewards=(np.float32(0.5),),
    )
    (got,) = decode(encode(group_of(trajectory))).trajectories
    assert (got.token_ids.dtype, got.logprobs.dtype) == (np.int32, np.float32)
    assert (got.token_ids.tolist(), got.logprobs.tolist()) == ([5, 6], [-0.5])
    assert (got.reward, got.scores, got.turn_rewards) == (0.5, {"num_searches": 2.0}, (0.5,))


def test_decoded_arrays_are_read_only_even_from_a_buffer_that_is_not():
    for data in (DATA, memoryview(bytearray(DATA))):
        trajectory = decode(data).trajectories[0]
        for array in (trajectory.token_ids, trajectory.logprobs, trajectory.versions):
            assert not array.flags.writeable


@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_decoded_arrays_are_aligned_wherever_the_bytes_lie(shift):
    for trajectory in decode(memoryview(bytes(shift) + DATA)[shift:]).trajectories:
        for array in (trajectory.token_ids, trajectory.logprobs, trajectory.versions):
            assert array.flags.aligned


def test_a_trajectory_without_a_version_for_each_logprob_is_not_encoded():
    uneven = build_trajectory([1, 2], [3, 3], logprobs=np.zeros(3, np.float32))
    with pytest.raises(DataError, match="2 versions for 3 log-probs"):
        encode(group_of(uneven, build_trajectory([1, 2], [3, 3], logprobs=np.zeros(1, np.float32))))


def test_another_schema_version_names_both_numbers():
    with pytest.raises(CodecError, match=rf"version 999, this program reads {SCHEMA_VERSION}"):
        decode(struct.pack("<2sH", b"LW", 999) + DATA[4:])


def test_a_group_of_schema_version_2_is_named_whatever_its_length():
    for rest in (b"", b"x", b"(\xb5/\xfd of another layout"):
        with pytest.raises(CodecError, match="version 2, this"):
            decode(struct.pack("<2sH", b"LW", 2) + rest)


def test_bytes_changed_after_they_were_written_are_said_to_be():
    with pytest.raises(CodecError, match="cut or changed"):
        decode(DATA[:-1])


def test_a_view_with_gaps_is_a_codec_error():
    with pytest.raises(CodecError, match="contiguous"):
        decode(memoryview(DATA)[::2])
