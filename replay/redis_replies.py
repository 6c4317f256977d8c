"""What the scripts of the buffer are told, and what they reply."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from leeway.replay.config import ReplayConfig
from leeway.replay.limiter import limiter_of
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Held, RefusalReason, ReplayStats, Waiting
from leeway.replay.stored import StoredGroup

INFINITE: Final = 1e308
"""Scripts take what is above 1e300 for it."""

LIMITS: Final = struct.Struct(">14d")
"""The numbers of LIMIT_FIELDS. Three texts follow, each ended by a zero."""

RECORD: Final = struct.Struct(">7d")
"""Of a group: version, newest, arrival, draws, returns, size, priority. The shape follows."""


class AdmitReply(msgspec.Struct):
    granted: list[str] = []
    reason: RefusalReason = "window"
    learner_version: int = 0
    next_version: int = 0
    num_groups: int = 0
    num_slots: int = 0
    num_bytes: int = 0
    num_held_back: int = 0
    largest: int = 0
    inserts: int = 0
    samples: int = 0
    outstanding: list[int] = []
    expires_in_ms: float | None = None
    signal: str = "0-0"


class DrawReply(msgspec.Struct):
    version: int
    ramp_version: int = 0
    ids: list[str] = []
    missing: int = 0
    blocking_until: int | None = None
    is_limited: bool = False
    num_stored: int = 0
    largest: int = 0
    inserts: int = 0
    samples: int = 0
    playing: list[int] = []
    awaited: list[str] = []
    expires_in_ms: float | None = None
    signal: str = "0-0"


class State(msgspec.Struct):
    learner_version: int
    paused: bool
    num_slots: int
    num_ready: int
    num_stored: int
    num_held_back: int
    num_bytes: int
    num_admitted: int
    num_added: int
    num_drawn: int
    num_trained: int
    num_slots_expired: int
    num_leases_expired: int
    outstanding: list[int]
    wait_room_ms: float
    wait_data_ms: float
    play_ms: float
    train_ms: float


class StatsReply(msgspec.Struct):
    state: State
    dropped: list[str]
    dropped_turns: list[str]
    dropped_tokens: list[str]
    waits: list[Waiting]
    playing: list[Held]
    training: list[Held]


def for_scripts(config: ReplayConfig) -> bytes:
    """Today's limits, as every script gets them: LIMIT_FIELDS, compared as they are."""
    limiter = limiter_of(config)
    numbers = (
        config.max_staleness,
        config.groups_per_step,
        config.max_groups,
        config.max_draws,
        config.max_returns,
        config.seed,
        *(limiter.samples_per_insert, limiter.min_size, limiter.min_diff, limiter.max_diff),
        int(config.slot_timeout_s * 1000),
        int(config.lease_timeout_s * 1000),
        INFINITE if config.max_bytes is None else int(config.max_bytes),
        config.is_adaptive,
    )
    finite = [max(-INFINITE, min(INFINITE, number)) for number in numbers]
    texts = (config.staleness_policy, config.draw_by, config.evict_by)
    return LIMITS.pack(*finite) + b"".join(text.encode() + b"\0" for text in texts)


def to_stats(reply: StatsReply) -> ReplayStats:
    state = reply.state
    dropped = zip(reply.dropped[::2], reply.dropped[1::2], strict=True)
    return ReplayStats(
        learner_version=PolicyVersion(state.learner_version),
        num_slots=state.num_slots,
        num_ready=state.num_ready,
        num_leased=state.num_stored - state.num_ready,
        num_held_back=state.num_held_back,
        num_bytes=state.num_bytes,
        admission_paused=state.paused,
        num_admitted=state.num_admitted,
        num_added=state.num_added,
        num_drawn=state.num_drawn,
        num_trained=state.num_trained,
        num_slots_expired=state.num_slots_expired,
        num_leases_expired=state.num_leases_expired,
        dropped={reason: int(n) for reason, n in dropped},
        dropped_turns=by_reason(reply.dropped_turns),
        dropped_tokens=by_reason(reply.dropped_tokens),
        outstanding=pairs(state.outstanding),
        wait_room_s=state.wait_room_ms / 1000,
        play_s=state.play_ms / 1000,
        wait_data_s=state.wait_data_ms / 1000,
        train_s=state.train_ms / 1000,
        waits=tuple(reply.waits),
        slots=tuple(reply.playing),
        leases=tuple(reply.training),
    )


def shape(trajectories: Sequence[tuple[int, int]]) -> str:
    """Turns and tokens of each: [(2, 310), (4, 782)] -> "2x310 4x782"."""
    return " ".join(f"{turns}x{tokens}" for turns, tokens in trajectories)


def to_record(packed: bytes) -> StoredGroup:
    """What lua/base.lua keeps of a group."""
    version, newest, arrival, draws, returns, size, priority = RECORD.unpack_from(packed)
    pairs = (part.split("x") for part in packed[RECORD.size :].decode().split())
    return StoredGroup(
        version=int(version),
        newest=int(newest),
        arrival=int(arrival),
        draws=int(draws),
        returns=int(returns),
        size=int(size),
        priority=priority,
        trajectories=[(int(turns), int(tokens)) for turns, tokens in pairs],
    )


def by_reason(flat: list[str]) -> dict[str, dict[int, int]]:
    """["overdue 4", "7"] -> {"overdue": {4: 7}}"""
    table: dict[str, dict[int, int]] = {}
    for name, n in zip(flat[::2], flat[1::2], strict=True):
        reason, _, number = name.rpartition(" ")
        table.setdefault(reason, {})[int(number)] = int(n)
    return {reason: dict(sorted(row.items())) for reason, row in sorted(table.items())}


def pairs(flat: list[int]) -> dict[int, int]:
    """[4, 1, 5, 3] -> {4: 1, 5: 3}"""
    return dict(sorted(zip(flat[::2], flat[1::2], strict=True)))


def seconds(milliseconds: float | None) -> float | None:
    """Two milliseconds late, so that the expiry is past when the next script asks the clock."""
    return None if milliseconds is None else max(milliseconds + 2, 2) / 1000
