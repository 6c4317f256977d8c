"""What both stores assert about a group: where it enters, and where it is handed out."""

from __future__ import annotations

import math
from collections.abc import Mapping

from leeway.replay.config import ReplayConfig
from leeway.replay.errors import DataError, StalenessViolation
from leeway.replay.schema import Columns, Group, check_group, columns_of
from leeway.replay.store import Lease, Slot


def check_fills(
    slot: Slot, group: Group, config: ReplayConfig, columns: Columns | None = None
) -> None:
    """Raise DataError unless `group` is well formed and is the one that `slot` was granted for.

    Under exact all its tokens must be of the slot's version: a group that saw weights change is
    refused here, and another is admitted in its place at the same version. `columns` are those of
    the group, where the caller has them.
    """
    columns = columns or columns_of(group)
    check_group(group, columns)
    if group.group_id != slot.slot_id:
        raise DataError(f"group {group.group_id} cannot fill slot {slot.slot_id}: ids must agree")
    if columns.oldest < slot.version:
        raise DataError(
            f"group {group.group_id} holds tokens of version {columns.oldest}, older than "
            f"version {slot.version} that its slot was granted for; was the oldest engine reported?"
        )
    if config.staleness_policy == "exact" and columns.newest > slot.version:
        raise DataError(
            f"group {group.group_id} holds tokens of version {columns.newest}, newer than "
            f"version {slot.version} that its slot was granted for, under exact staleness; were "
            "weights published while it was played?"
        )


def newest_version(group: Group) -> int:
    """The newest version among all trained tokens of the group."""
    return group.version_range[1]


def priority_of(group: Group) -> float:
    """How much a group teaches under advantages relative to it: the standard deviation of its
    rewards. Rewards 0, 0, 1, 1 -> 0.5; equal rewards -> 0."""
    rewards = [trajectory.reward for trajectory in group.trajectories]
    mean = sum(rewards) / len(rewards)
    return math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))


MAX_SLOTS = 1000
"""Slots of one admission."""


def checked_number(n: int) -> int:
    """Slots to ask for. Raises DataError below 1."""
    if n < 1:
        raise DataError(f"admit wants n of at least 1, not {n}")
    return min(n, MAX_SLOTS)


def check_priorities(priorities: Mapping[str, float]) -> None:
    """Raise DataError for a number that is not finite or below 0."""
    for group_id, priority in priorities.items():
        if not (math.isfinite(priority) and priority >= 0):
            raise DataError(
                f"the priority of group {group_id} is {priority}; it must be a finite number of at "
                "least 0"
            )


def check_staleness(lease: Lease, config: ReplayConfig) -> None:
    """Raise StalenessViolation if a token may not be trained at the lease's version.

    learner at 10, oldest versions [8, 9], max_staleness 2 -> staleness [2, 1], allowed by pace.
    """
    for group in lease.groups:
        staleness = lease.version - group.oldest_version
        if staleness > config.max_staleness:
            raise StalenessViolation(
                f"group {group.group_id} holds tokens of version {group.oldest_version} and would "
                f"be trained at {lease.version}: staleness {staleness} > max_staleness "
                f"{config.max_staleness}"
            )
    if config.staleness_policy == "exact":
        check_exact(lease, config.max_staleness)


def check_exact(lease: Lease, max_staleness: int) -> None:
    """Raise StalenessViolation unless each group is of one version and `max_staleness` old.

    Groups of the ramp, admitted up to `lease.ramp_version`, may be younger. lease for 10, ramp
    began at 3, max_staleness 2: version 8 is right, 9 raises; with the ramp begun at 9 it is right.
    """
    for group in lease.groups:
        oldest, newest = group.oldest_version, newest_version(group)
        if newest != oldest:
            raise StalenessViolation(
                f"group {group.group_id} holds tokens of versions {oldest} to {newest}; under "
                "exact staleness a group is of one version"
            )
        staleness = lease.version - oldest
        if staleness != max_staleness and oldest > lease.ramp_version:
            raise StalenessViolation(
                f"group {group.group_id} of version {oldest} would be trained at {lease.version}: "
                f"staleness {staleness}, and under exact staleness it must be {max_staleness} for "
                f"every version after {lease.ramp_version}, where the ramp began"
            )
