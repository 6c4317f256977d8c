"""Deadlines of both stores, and why a caller had to wait: words that name whom it waits for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import msgspec

from leeway.replay.config import ReplayConfig
from leeway.replay.errors import LeaseExpired, SlotExpired
from leeway.replay.limiter import limiter_of
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import (
    Lease,
    RefusalReason,
    ShortageReason,
    Slot,
    VersionSource,
)

NO_ENGINE: Final = -(2**31)
"""Stands for the version of no engine: older than any bound allows, so admission is refused."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing could be admitted."""

    reason: RefusalReason
    version: int | None
    """Oldest live engine version, as the caller said; None: no engine lives."""
    learner_version: int
    next_version: int
    """Learner version of the next draw."""
    num_groups: int
    """Slots, buffered and leased groups."""
    num_slots: int
    num_bytes: int
    """Of buffered and leased groups."""
    num_held_back: int
    """Groups of the window that are not admitted, by an adaptive lookahead."""
    largest: int
    """Bytes of the largest group so far."""
    inserts: int
    samples: int
    outstanding: dict[int, int]
    """Slots and buffered groups by version at admission."""
    expires_in_s: float | None
    """Seconds to the nearest expiry of a slot or lease; None when nothing is held."""
    signal: str = "0-0"
    """Id of the last wake-up before this, where there are any."""


class Shortage(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing could be drawn."""

    version: int
    """Learner version the draw is for."""
    missing: int
    """Ready groups short of a step; under exact, of the whole window."""
    blocking_until: int | None
    """Groups being played, admitted up to this version, must come first; None: none must."""
    playing: dict[int, int]
    """Groups being played by version at admission."""
    awaited: list[str]
    """Some of the slots waited for, oldest first."""
    is_limited: bool
    """The limiter alone holds the draw back."""
    num_stored: int
    """Buffered and leased groups."""
    largest: int
    """Bytes of the largest group so far."""
    inserts: int
    samples: int
    expires_in_s: float | None
    signal: str = "0-0"

    @property
    def reason(self) -> ShortageReason:
        """In one word."""
        if self.is_limited:
            return "limiter"
        return "missing" if self.missing else "blocked"


class Wait:
    """The deadline of one blocking call. The first try is not counted as waiting."""

    def __init__(self, timeout_s: float) -> None:
        self._started_s = time.monotonic()
        self._timeout_s = timeout_s
        self._has_waited = False
        self._split_s: dict[str, float] = {}
        self._reason: str | None = None
        self._since_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._started_s

    @property
    def waited_s(self) -> float:
        """`elapsed_s`, or 0 when the first try succeeded."""
        return self.elapsed_s if self._has_waited else 0.0

    @property
    def is_over(self) -> bool:
        """The deadline has passed."""
        return self.elapsed_s >= self._timeout_s

    @property
    def left_s(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self._timeout_s - self.elapsed_s)

    def split_s(self) -> dict[str, float]:
        """The wait is over: its seconds by reason."""
        self._blame(None)
        return self._split_s

    def _blame(self, reason: str | None) -> None:
        now_s = self.elapsed_s
        if self._reason is not None:
            before_s = self._split_s.get(self._reason, 0.0)
            self._split_s[self._reason] = before_s + now_s - self._since_s
        self._reason, self._since_s = reason, now_s

    def next_s(self, expires_in_s: float | None, reason: str | None = None) -> float:
        """Seconds to sleep, for `reason`: until the deadline, or the nearest expiry if that is
        sooner."""
        self._has_waited = True
        self._blame(reason)
        left_s = self.left_s
        return left_s if expires_in_s is None else min(left_s, max(0.0, expires_in_s))


def added(*splits: Mapping[str, float]) -> dict[str, float]:
    """Waits one after the other: seconds by reason."""
    reasons = {reason for split in splits for reason in split}
    return {r: sum(split.get(r, 0.0) for split in splits) for r in sorted(reasons)}


async def current(version: PolicyVersion | VersionSource) -> PolicyVersion | None:
    """The version now: the source is asked, a fixed version stays."""
    return await version() if callable(version) else version


def slot_expired(slot: Slot, config: ReplayConfig) -> SlotExpired:
    """Why a group came too late."""
    return SlotExpired(
        f"slot {slot.slot_id} is no longer held: it was dropped, or slot_timeout_s = "
        f"{config.slot_timeout_s:g} s passed before its group was added"
    )


def lease_expired(lease: Lease, config: ReplayConfig) -> LeaseExpired:
    """Why a step came too late."""
    return LeaseExpired(
        f"lease {lease.lease_id} is no longer held and its groups went back to the buffer; a step "
        f"must end within lease_timeout_s = {config.lease_timeout_s:g} s of its draw"
    )


def describe_refusal(refusal: Refusal, config: ReplayConfig, timeout_s: float) -> str:
    """`no room for a group in 5 s (window): ...`"""
    r = refusal
    start = f"no room for a group in {timeout_s:.1f} s ({r.reason})"
    if r.reason == "paused":
        return f"{start}: admission is stopped; pause_admission(False) resumes it"
    if r.reason == "capacity":
        return (
            f"{start}: {r.num_groups} of max_groups {config.max_groups} groups exist; waiting for "
            "the learner to train some"
        )
    if r.reason == "bytes":
        return f"{start}: {_bytes_refusal(r, config)}"
    if r.reason == "limiter":
        limiter = limiter_of(config)
        return (
            f"{start}: {r.inserts} groups inserted and {r.num_slots} being played, {r.samples} "
            f'sampled; limiter "{config.limiter}" lets inserts x {limiter.samples_per_insert:g} be '
            f"at most {limiter.max_diff:g} ahead of samples; waiting for the learner to draw"
        )
    if r.reason == "lookahead":
        return (
            f'{start}: {by_version(r.outstanding)} are outstanding, and lookahead = "adaptive" '
            f"holds {r.num_held_back} of the window's groups back until the learner needs them; "
            "waiting for it to draw"
        )
    if r.version is None:
        return f"{start}: no engine lives; waiting for one to register"
    if config.staleness_policy == "exact":
        return f"{start}: {_exact_refusal(r, config)}"
    deadline = f"version {r.version + config.max_staleness} (max_staleness {config.max_staleness})"
    if r.reason == "engine-behind":
        return (
            f"{start}: the oldest engine is at version {r.version}, what it samples can be trained "
            f"until {deadline}, and the learner is at {r.learner_version}; waiting for the engines "
            "to receive newer weights"
        )
    return (
        f"{start}: the learner draws for version {r.next_version} next, {config.groups_per_step} "
        f"groups a step, and {by_version(r.outstanding)} are outstanding; one more from version "
        f"{r.version} could not be trained by {deadline}; waiting for the learner to step and the "
        "engines to follow"
    )


def _bytes_refusal(r: Refusal, config: ReplayConfig) -> str:
    assert config.max_bytes is not None
    step = r.largest * config.groups_per_step
    stored = (
        f"{r.num_bytes} bytes are stored and {r.num_slots} groups of up to {r.largest} bytes are "
        f"being played, max_bytes is {int(config.max_bytes)}"
    )
    if step > config.max_bytes:
        return f"{stored}; a step of such groups takes {step} bytes: raise max_bytes"
    return f"{stored}; waiting for the learner to train some"


def _exact_refusal(r: Refusal, config: ReplayConfig) -> str:
    if r.reason == "engine-behind":
        return (
            f"the oldest engine is at version {r.version} and the learner at {r.learner_version}, "
            "and exact staleness admits only while they are equal; waiting for the engines to "
            "receive the learner's weights and for the learner to end its step"
        )
    if r.next_version > r.learner_version:
        return (
            f"the learner trains at version {r.learner_version}, and exact staleness admits "
            "nothing until the weights of that step are in the engines; waiting for the learner"
        )
    return (
        f"exact staleness admits (max_staleness + 1) x groups_per_step = {config.window} groups, "
        f"and {by_version(r.outstanding)} are outstanding; waiting for the learner to step and the "
        "engines to follow"
    )


def describe_shortage(shortage: Shortage, config: ReplayConfig, timeout_s: float) -> str:
    """`no step of 16 groups for version 7 in 60 s: ...`"""
    s = shortage
    start = (
        f"no step of {config.groups_per_step} groups for version {s.version} in {timeout_s:.1f} s"
    )
    slots = f" (slots {', '.join(s.awaited)}{', ...' if sum(s.playing.values()) > 4 else ''})"
    is_exact = config.staleness_policy == "exact"
    if s.blocking_until is not None and not is_exact:
        awaited = {a: n for a, n in s.playing.items() if a <= s.blocking_until}
        return (
            f"{start}: {by_version(awaited)} are still being played and must be in this step to "
            f"stay within max_staleness {config.max_staleness}{slots}"
        )
    if s.is_limited:
        limiter = limiter_of(config)
        return (
            f'{start}: limiter "{config.limiter}" draws when {limiter.min_size} groups exist and '
            f"inserts x {limiter.samples_per_insert:g} stay {limiter.min_diff:g} ahead of samples; "
            f"{s.num_stored} exist, {s.inserts} were inserted, {s.samples} sampled; waiting for "
            "rollouts"
        )
    ready = f"{config.groups_per_step - s.missing} are ready"
    step_bytes = s.largest * config.groups_per_step
    if config.max_bytes is not None and step_bytes > config.max_bytes:
        return (
            f"{start}: {ready}, and a step of groups of up to {s.largest} bytes takes "
            f"{step_bytes}: raise max_bytes, which is {int(config.max_bytes)}"
        )
    if is_exact:
        ready = (
            f"exact staleness wants all {config.window} groups of the window ready, "
            f"{config.window - s.missing} are"
        )
    if not s.playing:
        return f"{start}: {ready} and none is being played; no rollout worker holds a slot"
    return f"{start}: {ready}, {by_version(s.playing)} are being played{slots}"


def by_version(counts: Mapping[int, int]) -> str:
    """{4: 1, 5: 3} -> `1 group from version 4, 3 groups from version 5`"""
    if not counts:
        return "0 groups"
    parts = (f"{n} group{'s' * (n != 1)} from version {a}" for a, n in sorted(counts.items()))
    return ", ".join(parts)
