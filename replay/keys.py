"""Every Redis key. `{run}` is a hash tag: all keys of a run live in one slot of a Redis Cluster."""

from __future__ import annotations

import re
from typing import NamedTuple

from leeway.replay.errors import ConfigurationError

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class ReplayKeys(NamedTuple):
    """Keys of the buffer, in the order in which scripts receive them."""

    state: str
    """hash: learner_version, ramp_version, paused, sequence, num_bytes, the counters, wait_room_s,
    wait_data_s"""
    dropped: str
    """hash: reason -> dropped groups"""
    slots: str
    """sorted set: slot id by the ms at which it expires"""
    ceiling: str
    """hash: slot id -> newest version its group may hold; set for slots older than a restore"""
    payloads: str
    """hash: group id -> encoded group, buffered and leased"""
    order: str
    """sorted set: group id by (version, arrival), buffered and leased"""
    ready: str
    """sorted set: the part of `order` that is free to be drawn"""
    version_of: str
    """hash: slot or group id -> version at admission"""
    newest_of: str
    """hash: group id -> newest version among its tokens"""
    draws_of: str
    """hash: group id -> how often it was handed out"""
    count_playing: str
    """hash: version -> slots admitted at it"""
    count_ready: str
    """hash: version -> buffered groups admitted at it"""
    count_leased: str
    """hash: version -> leased groups admitted at it"""
    leases: str
    """sorted set: lease id by the ms at which it expires"""
    lease_groups: str
    """hash: lease id -> group ids, separated by spaces"""
    lease_version: str
    """hash: lease id -> learner version it was drawn for"""
    added: str
    """sorted set: ids of groups that were added, by time in ms; makes a repeated add harmless"""
    acknowledged: str
    """sorted set: ids of acknowledged leases, by time in ms; makes a repeated one harmless"""
    room: str
    """stream: wakes callers of admit"""
    data: str
    """stream: wakes callers of draw"""


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
    room: str
    """the buffer's stream of that name: an engine's newer version wakes callers of admit"""


def replay_keys(run: str) -> ReplayKeys:
    """Keys of the buffer of `run`, such as leeway:{first}:slots."""
    return ReplayKeys(*(f"{_prefix(run)}{name}" for name in ReplayKeys._fields))


def board_keys(run: str) -> BoardKeys:
    """Keys of the boards of `run`, such as leeway:{first}:board:engines."""
    keys = BoardKeys(*(f"{_prefix(run)}board:{name}" for name in BoardKeys._fields))
    return keys._replace(room=replay_keys(run).room)


def _prefix(run: str) -> str:
    if not _RUN_NAME.fullmatch(run):
        raise ConfigurationError(
            f"run name {run!r} must be 1 to 100 letters, digits, dots, dashes or underscores"
        )
    return f"leeway:{{{run}}}:"
