"""Groups as bytes: a header, one block for each kind of array, one msgpack for everything else.

    b"LW" | schema version, uint16 | XXH3 of what follows, uint64 | bytes of the msgpack, uint32
    log-probs [T] float32 | versions | token ids [L] uint16 or int32 | msgpack of _WireGroup

Numbers are little-endian. `T` counts the generated tokens and `L` all tokens of the whole group:
an array of one kind is one block, trajectory after trajectory, so that numpy is called a few times
a group. Versions are runs, [R] int32 values and then [R] int32 lengths, unless their [T] int32
values are shorter: 8 trajectories of 512 generated tokens under version 3 are the run (3, 4096).
Nothing is compressed: that would take longer than all the rest, and log-probs hardly shrink.

The schema version stands before all that a schema may change, so a reader of another version says
both numbers without guessing at the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from leeway.replay.errors import CodecError, DataError
from leeway.replay.schema import (
    SCHEMA_VERSION,
    Columns,
    Group,
    GroupId,
    StopReason,
    Trajectory,
    Turn,
    columns_of,
)

_MAGIC: Final = b"LW"
_HEADER: Final = struct.Struct("<2sH")
_NUMBER: Final = struct.Struct("<I")
_CHECKSUM: Final = struct.Struct("<Q")
_CHECKED_START: Final = _HEADER.size + _CHECKSUM.size
_BLOCKS_START: Final = _CHECKED_START + _NUMBER.size
"""A multiple of 4, and the blocks of four-byte numbers come first: their views are aligned."""

_FLOAT: Final = np.dtype("<f4")
_INT: Final = np.dtype("<i4")
_ID_TYPES: Final = {2: np.dtype("<u2"), 4: _INT}
_MAX_NARROW_ID: Final = 2**16 - 1

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _WireTrajectory(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """A trajectory without its arrays."""

    trajectory_id: str
    num_tokens: _Count
    """Its share of the block of token ids."""
    num_generated: _Count
    """Its share of the log-probs and of the versions."""
    turns: tuple[Turn, ...]
    reward: float
    stop_reason: StopReason
    scores: dict[str, float]
    duration_s: float
    turn_rewards: tuple[float, ...] | None


class _WireGroup(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """A group without its arrays, and how their blocks are written."""

    group_id: str
    question_id: str
    worker_id: str
    id_bytes: Literal[2, 4]
    """Width of a token id; 2 where none reaches 65,536."""
    num_runs: _Count | None
    """R, the runs of the versions. None: every version is written."""
    trajectories: tuple[_WireTrajectory, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_WireGroup)


def encode(group: Group, columns: Columns | None = None) -> bytes:
    """Return the group's bytes under the current schema version.

    `columns` are those of the group, where the caller has them. Raises DataError where a trajectory
    has not one version for each log-prob.
    """
    trajectories = group.trajectories
    columns = columns or columns_of(group)
    num_runs, versions = _to_runs(columns)
    ids_L = _narrow(_concatenate([t.token_ids for t in trajectories], _INT))
    wire = _WireGroup(
        group.group_id,
        group.question_id,
        group.worker_id,
        2 if ids_L.itemsize == 2 else 4,
        num_runs,
        tuple([_to_wire(trajectory) for trajectory in trajectories]),
    )
    description = _encoder.encode(wire)
    blocks = (columns.logprobs_T.data, versions.data, ids_L.data)
    parts = (_NUMBER.pack(len(description)), *blocks, description)
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    start = _HEADER.pack(_MAGIC, SCHEMA_VERSION) + _CHECKSUM.pack(checksum.intdigest())
    return b"".join((start, *parts))


def decode(data: bytes | memoryview) -> Group:
    """Return the group in `data`. Raises CodecError for any other bytes, and nothing else.

    Memory is bounded by `data`: 4 bytes for each version and each token id are restored from the
    blocks present. The arrays are read-only; log-probs, and versions without runs, are views of
    `data`, which must not change while the group is in use. Each trajectory has as many versions
    as log-probs; whether its turns agree with them is the question of `check_group`.
    """
    view = _check_envelope(data)
    try:
        return _to_group(view)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CodecError(f"{len(view)} bytes are not a group: {error}") from error


def _check_envelope(data: bytes | memoryview) -> memoryview:
    """Return `data` as bytes to read, its magic, version and checksum found right."""
    try:
        view = memoryview(data).toreadonly().cast("B")
    except TypeError as error:
        raise CodecError(f"a group is read from contiguous bytes: {error}") from error
    if len(view) < _HEADER.size or bytes(view[:2]) != _MAGIC:
        raise CodecError(f"{len(view)} bytes do not start with the header of a group")
    version = _HEADER.unpack_from(view)[1]
    if version != SCHEMA_VERSION:
        raise CodecError(
            f"the group has schema version {version}, this program reads {SCHEMA_VERSION}; "
            "run the version that wrote it, or start from an empty buffer"
        )
    if len(view) < _BLOCKS_START:
        raise CodecError(f"{len(view)} bytes end before the blocks of a group; discard them")
    checksum = xxhash.xxh3_64_intdigest(view[_CHECKED_START:])
    if checksum != _CHECKSUM.unpack_from(view, _HEADER.size)[0]:
        raise CodecError(
            f"the {len(view)} bytes of a group do not match their checksum: they were cut or "
            "changed after they were written; discard them"
        )
    return view


def _to_group(view: memoryview) -> Group:
    blocks_end = len(view) - _NUMBER.unpack_from(view, _CHECKED_START)[0]
    if blocks_end < _BLOCKS_START:
        raise CodecError(f"the description of a group is longer than its {len(view)} bytes")
    wire = _decoder.decode(view[blocks_end:])
    num_tokens = sum(trajectory.num_tokens for trajectory in wire.trajectories)
    num_generated = sum(trajectory.num_generated for trajectory in wire.trajectories)
    num_words = num_generated if wire.num_runs is None else 2 * wire.num_runs
    versions_start = _BLOCKS_START + 4 * num_generated
    ids_start = versions_start + 4 * num_words
    # Before any array is made: a count may lie, and then it asks for memory that nobody sent.
    if ids_start + wire.id_bytes * num_tokens != blocks_end:
        raise CodecError(
            f"{num_tokens} tokens, {num_generated} of them generated, and {num_words} numbers of "
            f"versions do not fill the {blocks_end - _BLOCKS_START} bytes of the blocks"
        )
    logprobs_T = _read(view, _FLOAT, num_generated, _BLOCKS_START)
    versions_T = _read(view, _INT, num_words, versions_start)
    if wire.num_runs is not None:
        versions_T = _from_runs(versions_T, num_generated)
    ids_L = _frozen(_read(view, _ID_TYPES[wire.id_bytes], num_tokens, ids_start).astype(_INT))
    return Group(
        group_id=GroupId(wire.group_id),
        question_id=wire.question_id,
        worker_id=wire.worker_id,
        trajectories=tuple(_split(wire.trajectories, ids_L, logprobs_T, versions_T)),
    )


def _split(
    wires: tuple[_WireTrajectory, ...],
    ids_L: NDArray[np.int32],
    logprobs_T: NDArray[np.float32],
    versions_T: NDArray[np.int32],
) -> Iterator[Trajectory]:
    """The trajectories, each with its shares of the group's arrays."""
    token = generated = 0
    for wire in wires:
        next_token, next_generated = token + wire.num_tokens, generated + wire.num_generated
        yield Trajectory(
            trajectory_id=wire.trajectory_id,
            token_ids=ids_L[token:next_token],
            turns=wire.turns,
            logprobs=logprobs_T[generated:next_generated],
            versions=versions_T[generated:next_generated],
            reward=wire.reward,
            stop_reason=wire.stop_reason,
            scores=wire.scores,
            duration_s=wire.duration_s,
            turn_rewards=wire.turn_rewards,
        )
        token, generated = next_token, next_generated


def _to_wire(trajectory: Trajectory) -> _WireTrajectory:
    num_generated = len(trajectory.logprobs)
    if len(trajectory.versions) != num_generated:
        raise DataError(
            f"trajectory {trajectory.trajectory_id} cannot be encoded: it has "
            f"{len(trajectory.versions)} versions for {num_generated} log-probs"
        )
    rewards = trajectory.turn_rewards
    return _WireTrajectory(
        trajectory.trajectory_id,
        len(trajectory.token_ids),
        num_generated,
        trajectory.turns,
        float(trajectory.reward),
        trajectory.stop_reason,
        {name: float(value) for name, value in trajectory.scores.items()},
        float(trajectory.duration_s),
        None if rewards is None else tuple(map(float, rewards)),
    )


def _to_runs(columns: Columns) -> tuple[int | None, NDArray[np.int32]]:
    """R and the runs, [2R]; or None and the versions, where runs would not be shorter.

    [7, 7, 7, 7, 7, 9] -> 2, [7, 9, 5, 1]; [7, 7, 9] -> None, [7, 7, 9]
    """
    versions_T = columns.versions_T
    num_generated = len(versions_T)
    if columns.oldest == columns.newest and num_generated > 2:  # nearly every group
        return 1, np.array((columns.oldest, num_generated), _INT)
    changes = np.flatnonzero(versions_T[1:] != versions_T[:-1])
    num_runs = len(changes) + 1
    if 2 * num_runs >= num_generated:
        return None, versions_T
    starts_R = np.concatenate(([0], changes + 1))
    ends_R = np.concatenate((changes + 1, [num_generated]))
    runs = (versions_T[starts_R], ends_R - starts_R)
    return num_runs, np.concatenate(runs, dtype=_INT)


def _from_runs(runs: NDArray[np.int32], num_generated: int) -> NDArray[np.int32]:
    """The versions, [T], of runs [2R]. Raises CodecError where the lengths do not sum to T."""
    num_runs = len(runs) // 2
    values_R, lengths_R = runs[:num_runs], runs[num_runs:]
    if num_runs == 1 and lengths_R[0] == num_generated:
        return _frozen(np.full(num_generated, values_R[0], _INT))
    # The sum must be known before the runs are written out: a length may claim two thousand million
    # tokens. It is taken in 64 bits, where no number of lengths comes round to T again.
    if np.any(lengths_R < 0) or int(lengths_R.sum(dtype=np.int64)) != num_generated:
        raise CodecError(f"the runs of versions do not cover {num_generated} generated tokens")
    return _frozen(np.repeat(values_R, lengths_R))


def _narrow(ids_L: NDArray[np.int32]) -> NDArray[np.int32 | np.uint16]:
    """The ids in two bytes each, if all of them fit; a negative one never does."""
    if ids_L.size and ids_L.view(np.uint32).max() > _MAX_NARROW_ID:
        return ids_L
    return ids_L.astype(_ID_TYPES[2])


def _concatenate(arrays: list[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate(arrays, dtype=dtype) if arrays else np.empty(0, dtype)


def _read(view: memoryview, dtype: np.dtype[Any], count: int, start: int) -> NDArray[Any]:
    """A view of `count` numbers; a copy where `view` itself starts at an odd address."""
    array = np.frombuffer(view, dtype, count, start)
    return array if array.flags.aligned else _frozen(array.copy())


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array
