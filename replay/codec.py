"""Groups as bytes: a four-byte header, then one zstandard frame of msgpack.

    b"LW" | schema version, uint16 little-endian | zstd(level 1, checksum, content size)

The version stands outside the frame, so a reader of another version says both numbers without
guessing at the layout. Arrays travel as raw little-endian bytes; decoded arrays are read-only views
of the decompressed buffer.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from leeway.replay.errors import CodecError
from leeway.replay.schema import (
    SCHEMA_VERSION,
    Group,
    GroupId,
    StopReason,
    Trajectory,
    Turn,
)

MAX_DECODED_BYTES: Final = 256 * 2**20
"""A frame that would inflate beyond this is refused before any of it is decompressed."""

_MAGIC: Final = b"LW"
_HEADER: Final = struct.Struct("<2sH")
_INT: Final = np.dtype("<i4")
_FLOAT: Final = np.dtype("<f4")


class _WireTrajectory(msgspec.Struct, frozen=True, array_like=True):
    trajectory_id: str
    token_ids: bytes
    turns: tuple[Turn, ...]
    logprobs: bytes
    versions: bytes
    reward: float
    stop_reason: StopReason
    scores: dict[str, float]
    duration_s: float


class _WireGroup(msgspec.Struct, frozen=True, array_like=True):
    group_id: str
    question_id: str
    worker_id: str
    trajectories: tuple[_WireTrajectory, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_WireGroup)


def encode(group: Group) -> bytes:
    """Return the group's bytes under the current schema version."""
    wire = _WireGroup(
        group.group_id,
        group.question_id,
        group.worker_id,
        tuple(_to_wire(trajectory) for trajectory in group.trajectories),
    )
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=True, write_content_size=True)
    return _HEADER.pack(_MAGIC, SCHEMA_VERSION) + compressor.compress(_encoder.encode(wire))


def decode(data: bytes) -> Group:
    """Return the group in `data`. Raises CodecError for any other bytes, and nothing else."""
    _check_header(data)
    try:
        wire = _decoder.decode(_inflate(data[_HEADER.size :]))
        return Group(
            group_id=GroupId(wire.group_id),
            question_id=wire.question_id,
            worker_id=wire.worker_id,
            trajectories=tuple(_from_wire(trajectory) for trajectory in wire.trajectories),
        )
    except (msgspec.DecodeError, zstandard.ZstdError, ValueError, RecursionError) as error:
        raise CodecError(f"{len(data)} bytes are not a group: {error}") from error


def _check_header(data: bytes) -> None:
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise CodecError(f"{len(data)} bytes do not start with the header of a group")
    version = _HEADER.unpack_from(data)[1]
    if version != SCHEMA_VERSION:
        raise CodecError(
            f"the group has schema version {version}, this program reads {SCHEMA_VERSION}; "
            "run the version that wrote it, or start from an empty buffer"
        )


def _inflate(frame: bytes) -> bytes:
    size = zstandard.get_frame_parameters(frame).content_size
    if size > MAX_DECODED_BYTES:  # also true of "unknown", which is the largest number
        raise CodecError(f"the group would inflate to {size} bytes, over {MAX_DECODED_BYTES}")
    return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)


def _to_wire(trajectory: Trajectory) -> _WireTrajectory:
    return _WireTrajectory(
        trajectory.trajectory_id,
        _to_bytes(trajectory.token_ids, _INT),
        trajectory.turns,
        _to_bytes(trajectory.logprobs, _FLOAT),
        _to_bytes(trajectory.versions, _INT),
        float(trajectory.reward),
        trajectory.stop_reason,
        {name: float(value) for name, value in trajectory.scores.items()},
        float(trajectory.duration_s),
    )


def _from_wire(wire: _WireTrajectory) -> Trajectory:
    return Trajectory(
        trajectory_id=wire.trajectory_id,
        token_ids=np.frombuffer(wire.token_ids, _INT),
        turns=wire.turns,
        logprobs=np.frombuffer(wire.logprobs, _FLOAT),
        versions=np.frombuffer(wire.versions, _INT),
        reward=wire.reward,
        stop_reason=wire.stop_reason,
        scores=wire.scores,
        duration_s=wire.duration_s,
    )


def _to_bytes(array: NDArray[np.int32] | NDArray[np.float32], dtype: np.dtype) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()
