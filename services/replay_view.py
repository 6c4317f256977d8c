"""What `leeway replay inspect` shows: a buffer in numbers, or one of its groups in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leeway.replay.archive_buffer import OpenBuffer
from leeway.replay.codec import decode
from leeway.replay.errors import ConfigurationError, DataError
from leeway.replay.schema import Group, Trajectory
from leeway.replay.store import Held, ReplayStats
from leeway.replay.stored import StoredGroup

MAX_SLOTS = 8
"""Slots that a person is shown; --json has those of ReplayStats."""

Histogram = dict[int, int]
"""Groups by a number that each of them has."""


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """A buffer at one moment; counters and records are read one after the other."""

    run: str
    stats: ReplayStats
    largest_bytes: int
    """Of the groups stored now, as stored; 0 without one."""
    staleness: Histogram
    """Stored groups by how many versions theirs is behind the learner's."""
    oldest_arrival: int | None
    """Arrivals are numbered by each shard; None without a group."""
    newest_arrival: int | None
    draws: Histogram
    """Stored groups by the steps that have trained them."""
    returns: Histogram
    """Stored groups by how often they came back untrained."""


async def inspect(buffer: OpenBuffer) -> Inspection:
    """Counters and records of the buffer."""
    stats = await buffer.replay.stats()
    records = [placed.record for placed in await buffer.records()]  # by arrival
    return Inspection(
        run=buffer.run,
        stats=stats,
        largest_bytes=max((record.size for record in records), default=0),
        staleness=_counted(stats.learner_version - record.version for record in records),
        oldest_arrival=records[0].arrival if records else None,
        newest_arrival=records[-1].arrival if records else None,
        draws=_counted(record.draws for record in records),
        returns=_counted(record.returns for record in records),
    )


def _counted(numbers: Iterator[int]) -> Histogram:
    return dict(sorted(Counter(numbers).items()))


def show(inspection: Inspection, console: Console) -> None:
    """A table for people."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for label, value in _rows(inspection):
        table.add_row(label, Text(value))
    console.print(Text(f"replay buffer of {inspection.run}", style="bold"))
    console.print(table)


def _rows(inspection: Inspection) -> Iterator[tuple[str, str]]:
    stats = inspection.stats
    yield "learner version", str(stats.learner_version)
    yield (
        "groups",
        f"{stats.num_slots:,} being played, {stats.num_ready:,} ready, {stats.num_leased:,} leased",
    )
    yield "bytes", f"{stats.num_bytes:,} stored, largest group {inspection.largest_bytes:,}"
    admission = "paused" if stats.admission_paused else "open"
    if stats.num_held_back:
        admission += f", {stats.num_held_back:,} groups of the window held back"
    yield "admission", admission
    yield (
        "so far",
        f"{stats.num_admitted:,} admitted, {stats.num_added:,} added, {stats.num_drawn:,} drawn, "
        f"{stats.num_trained:,} trained",
    )
    yield "expired", f"{stats.num_slots_expired:,} slots, {stats.num_leases_expired:,} leases"
    yield "versions", _row(stats.outstanding, "outstanding, by version")
    yield "staleness", _row(inspection.staleness, "stored, by versions behind the learner")
    yield "trained", _row(inspection.draws, "stored, by steps that trained them")
    yield "returned", _row(inspection.returns, "stored, by returns untrained")
    yield "arrivals", _arrivals(inspection)
    yield "waited", f"rollouts {stats.wait_room_s:.1f} s, learner {stats.wait_data_s:.1f} s"
    yield from _listed("waits now", _waits(stats))
    yield from _listed("dropped", _drops(stats))
    yield from _listed("slots", _slots(stats))
    yield from _listed("leases", (_held(lease) for lease in stats.leases))


def _row(counts: Mapping[int, int], words: str) -> str:
    """{4: 1, 5: 3}, "stored, by version" -> `stored, by version 4: 1, 5: 3`"""
    parts = ", ".join(f"{number}: {n:,}" for number, n in sorted(counts.items()))
    return f"{words} {parts}" if parts else "none"


def _arrivals(inspection: Inspection) -> str:
    if inspection.oldest_arrival is None:
        return "none"
    return f"oldest number {inspection.oldest_arrival:,}, newest {inspection.newest_arrival:,}"


def _listed(label: str, lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """The label beside the first line alone."""
    found = list(lines) or ["none"]
    yield label, found[0]
    yield from (("", line) for line in found[1:])


def _waits(stats: ReplayStats) -> Iterator[str]:
    for wait in sorted(stats.waits, key=lambda wait: -wait.since_s):
        who = "a rollout worker" if wait.side == "rollout" else "the learner"
        yield f"{who} for {wait.since_s:.1f} s ({wait.reason})"


def _drops(stats: ReplayStats) -> Iterator[str]:
    for reason, n in sorted(stats.dropped.items()):
        yield f"{reason}: {n:,}"
        for name, table in (("turns", stats.dropped_turns), ("tokens up to", stats.dropped_tokens)):
            if reason in table:
                yield _row(table[reason], f"  trajectories by {name}")


def _slots(stats: ReplayStats) -> Iterator[str]:
    yield from (_held(slot) for slot in stats.slots[:MAX_SLOTS])
    if stats.num_slots > MAX_SLOTS:
        yield f"and {stats.num_slots - MAX_SLOTS:,} more that expire later"


def _held(held: Held) -> str:
    """The start of the id is enough to find it; --json has the whole."""
    groups = f", {held.num_groups} groups" if held.num_groups > 1 else ""
    return (
        f"{held.id[:8]} version {held.version}{groups}, for {held.since_s:.1f} s, "
        f"expires in {held.expires_in_s:.1f} s"
    )


# ---- one group


class TrajectoryView(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory without its arrays."""

    trajectory_id: str
    num_tokens: int
    num_prompt_tokens: int
    turns: list[tuple[str, int, int]]
    """Action, generated and observed tokens of each."""
    oldest_version: int
    newest_version: int
    reward: float
    turn_rewards: tuple[float, ...] | None
    stop_reason: str
    scores: dict[str, float]
    duration_s: float


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """A stored group without its arrays."""

    group_id: str
    question_id: str
    worker_id: str
    record: Annotated[StoredGroup, "an array, fields in the order of StoredGroup"]
    trajectories: list[TrajectoryView]


async def find_group(buffer: OpenBuffer, wanted: str) -> GroupView:
    """The group whose id is or begins with `wanted`. Raises ConfigurationError unless it is one."""
    records = await buffer.records()
    found = [placed for placed in records if placed.group_id.startswith(wanted)]
    found = [placed for placed in found if placed.group_id == wanted] or found
    if len(found) != 1:
        count = "no group" if not found else f"{len(found)} groups"
        raise ConfigurationError(
            f"the buffer holds {count} whose id begins with {wanted!r}, among "
            f"{_plural(len(records), 'group')}"
        )
    payload = await buffer.payload(found[0])
    if payload is None:
        raise DataError(f"group {found[0].group_id} was trained or dropped just now")
    return _view(decode(payload), found[0].record)


def _view(group: Group, record: StoredGroup) -> GroupView:
    return GroupView(
        group_id=group.group_id,
        question_id=group.question_id,
        worker_id=group.worker_id,
        record=record,
        trajectories=[_trajectory_view(trajectory) for trajectory in group.trajectories],
    )


def _trajectory_view(trajectory: Trajectory) -> TrajectoryView:
    turns = trajectory.turns
    return TrajectoryView(
        trajectory_id=trajectory.trajectory_id,
        num_tokens=len(trajectory.token_ids),
        num_prompt_tokens=turns[0].start if turns else 0,
        turns=[(turn.action, turn.num_generated, turn.num_observed) for turn in turns],
        oldest_version=int(trajectory.versions.min()),
        newest_version=int(trajectory.versions.max()),
        reward=trajectory.reward,
        turn_rewards=trajectory.turn_rewards,
        stop_reason=trajectory.stop_reason,
        scores=trajectory.scores,
        duration_s=trajectory.duration_s,
    )


def describe_group(group: GroupView) -> Iterator[str]:
    """The group in words, line by line."""
    record = group.record
    yield f"group {group.group_id}, question {group.question_id}, played by {group.worker_id}"
    yield (
        f"version {record.version}, newest token {record.newest}, arrival {record.arrival}, "
        f"{record.size:,} bytes, priority {record.priority:g}"
    )
    yield f"trained by {_plural(record.draws, 'step')}, returned {_plural(record.returns, 'time')}"
    for number, trajectory in enumerate(group.trajectories, start=1):
        yield ""
        yield from _describe_trajectory(number, trajectory)


def _describe_trajectory(number: int, trajectory: TrajectoryView) -> Iterator[str]:
    t = trajectory
    versions = f"version {t.oldest_version}"
    if t.newest_version != t.oldest_version:
        versions = f"versions {t.oldest_version} to {t.newest_version}"
    yield (
        f"trajectory {number}: reward {t.reward:g}, stopped by {t.stop_reason}, {versions}, "
        f"{t.num_tokens:,} tokens ({t.num_prompt_tokens:,} prompt), {t.duration_s:.1f} s"
    )
    rewards = t.turn_rewards or (None,) * len(t.turns)
    for turn, ((action, generated, observed), reward) in enumerate(
        zip(t.turns, rewards, strict=True), start=1
    ):
        earned = "" if reward is None else f", reward {reward:g}"
        yield f"  turn {turn}: {action}, {generated:,} generated, {observed:,} observed{earned}"
    if t.scores:
        yield "  " + ", ".join(f"{name} {value:g}" for name, value in sorted(t.scores.items()))


def _plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"
