"""What both stores assert about a group: where it enters, and where it is handed out."""

from __future__ import annotations

from collections.abc import Iterable

from leeway.replay.errors import DataError, StalenessViolation
from leeway.replay.schema import Group, check_group
from leeway.replay.store import Slot


def check_fills(slot: Slot, group: Group) -> None:
    """Raise DataError unless `group` is well formed and is the one that `slot` was granted for."""
    check_group(group)
    if group.group_id != slot.slot_id:
        raise DataError(f"group {group.group_id} cannot fill slot {slot.slot_id}: ids must agree")
    if group.oldest_version < slot.version:
        raise DataError(
            f"group {group.group_id} holds tokens of version {group.oldest_version}, older than "
            f"version {slot.version} that its slot was granted for; was the oldest engine reported?"
        )


def newest_version(group: Group) -> int:
    """The newest version among all trained tokens of the group."""
    return max(int(trajectory.versions.max()) for trajectory in group.trajectories)


def check_staleness(groups: Iterable[Group], version: int, max_staleness: int) -> None:
    """Raise StalenessViolation if a token is too old to be trained at `version`.

    learner at 10, oldest versions [8, 9], max_staleness 2 -> staleness [2, 1], allowed.
    """
    for group in groups:
        staleness = version - group.oldest_version
        if staleness > max_staleness:
            raise StalenessViolation(
                f"group {group.group_id} holds tokens of version {group.oldest_version} and would "
                f"be trained at {version}: staleness {staleness} > max_staleness {max_staleness}"
            )
