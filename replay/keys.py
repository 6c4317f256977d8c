"""Every Redis key. `{run}` is a hash tag: all keys of a run live in one slot of a Redis Cluster."""

from __future__ import annotations

import re
from typing import NamedTuple

from leeway.replay.errors import ConfigurationError

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class BoardKeys(NamedTuple):
    """Keys of the policy board and the run board."""

    engines: str
    """hash: engine id -> EngineRecord as JSON"""
    engine_version: str
    """hash: engine id -> version it registered"""
    engine_expiry: str
    """sorted set: engine id by the ms at which it counts as dead"""
    announcements: str
    """stream: Announcement as JSON"""
    reports: str
    """prefix of one stream per publish: EngineReport as JSON"""
    sections: str
    """hash: section -> {"updated_at": s, ...} as JSON"""
    events: str
    """stream: kind, text"""
    stop: str
    """string: the reason why the run was asked to stop"""
    phase: str
    """string: the phase of the run"""
    control: str
    """stream: wakes who waits for a stop or a phase"""
    steps: str
    """sorted set: the metrics of a step as JSON, by step"""
    publishes: str
    """stream: one confirmed publish as JSON"""
    requests: str
    """hash: action -> the latest ControlRequest as JSON"""
    settings: str
    """string: LiveSettings as JSON"""
    leader: str
    """string: who moves the run through its phases; expires unless it is set again"""
    room: str
    """the buffer's stream of that name: an engine's newer version wakes callers of admit"""


def replay_prefix(run: str, shard: int = 0) -> str:
    """What every key of a shard of the buffer starts with: leeway:{first}:, leeway:{first/1}:.

    state            counters, version window, lookahead, virtual times: 33 doubles, then msgpack,
                     the schema version of what is stored included; see lua/base.lua
    slots            sorted set of "id version" by the ms at which each expires
    ceilings         hash: slot -> newest version its group may hold, where the learner resumed
    groups           hash: group id -> record, a StoredGroup: 7 doubles, then its shape
    payload:ID       string: the encoded group
    ready, again     sorted sets by (version, arrival): groups never trained, trained before
    pick, evict      sorted sets by draw_by and evict_by, where those are not fifo
    unreadable       hash: the last group that was dropped as unreadable -> its bytes
    leases, lease    sorted set of ids by the ms at which each expires; hash of what each holds
    added:HOUR       set of the ids of an hour: makes a repeated add harmless
    acknowledged     sorted set of leases by time: makes a repeated acknowledge harmless
    dropped          hash: reason -> groups; dropped_turns, dropped_tokens: "reason number"
                     -> trajectories of so many turns, of at most so many tokens
    waits            hash: caller -> why and since when it waits
    room, data       streams: wake callers of admit and of draw
    """
    tag = _checked(run) if shard == 0 else f"{_checked(run)}/{shard}"
    return f"leeway:{{{tag}}}:"


def board_keys(run: str) -> BoardKeys:
    """Keys of the boards of `run`, such as leeway:{first}:board:engines."""
    keys = BoardKeys(*(f"{replay_prefix(run)}board:{name}" for name in BoardKeys._fields))
    return keys._replace(room=f"{replay_prefix(run)}room")


def _checked(run: str) -> str:
    if not _RUN_NAME.fullmatch(run):
        raise ConfigurationError(
            f"run name {run!r} must be 1 to 100 letters, digits, dots, dashes or underscores"
        )
    return run
