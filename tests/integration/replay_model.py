"""The model of test_replay_machine.py with limits: what may come in, what may be drawn, and what
other limits after a restart change."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from leeway.replay.config import ReplayConfig
from tests.chaos.replay_ledger import Model

ROUNDING = 1e-9


class Bounds(NamedTuple):
    """Reverb's numbers of a limiter, written down apart from limiter.py."""

    min_size: int
    ratio: float
    min_diff: float
    max_diff: float

    @classmethod
    def of(cls, c: ReplayConfig) -> Bounds:
        least = max(c.min_size, c.groups_per_step)
        middle = c.samples_per_insert * c.min_size
        return {
            "none": cls(0, 1.0, -inf, inf),
            "min-size": cls(least, 1.0, -inf, inf),
            "queue": cls(c.groups_per_step, 1.0, 0.0, c.queue_size),
            "sample-to-insert": cls(
                least, c.samples_per_insert, middle - c.error_buffer, middle + c.error_buffer
            ),
        }[c.limiter]


@dataclass
class LimitedModel(Model):
    """Inserts, samples, and the bounds of admission and draw."""

    inserts: int = 0
    """Groups added, less those that were lost before anyone sampled them."""
    samples: int = 0
    """Groups drawn, less those that came back."""
    most_draws: int = 1
    """Largest max_draws there was."""

    def go_by(self, config: ReplayConfig) -> int:
        """A learner resumes with other limits; how many groups and slots that drops."""
        if Bounds.of(config) != Bounds.of(self.config):
            # Another limiter begins with what is here.
            self.samples = sum(len(held.ids) for held in self.leases.values())
            untrained = sum(self.groups[i].draws == 0 for i in self.free())
            self.inserts = untrained + self.samples
        self.config = config
        self.most_draws = max(self.most_draws, config.max_draws)
        for group_id in [i for i in self.free() if self.groups[i].draws >= config.max_draws]:
            del self.groups[group_id]
        return self.restore(self.learner)

    def forget(self, ids: list[str], reason: str) -> None:
        # What the policy itself lets go still counts as inserted.
        is_policy = reason == "evicted" or (
            reason == "overdue" and self.config.staleness_policy == "drop"
        )
        if not is_policy:
            self.inserts -= sum(self.groups[group_id].draws == 0 for group_id in ids)
        super().forget(ids, reason)

    def return_lease(self, lease_id: str) -> None:
        ids = self.leases[lease_id].ids
        self.samples -= len(ids)
        super().return_lease(lease_id)
        for group_id in ids:
            if group_id in self.groups and self.groups[group_id].draws >= self.config.max_draws:
                del self.groups[group_id]

    def drop_mixed(self) -> None:
        """Under exact a group of several versions, added under another policy, goes when its turn
        comes; others move up."""
        while True:
            # Groups stand in the order of their arrival, and sorting keeps it.
            first = sorted(self.free(), key=lambda i: self.groups[i].version)
            first = first[: self.config.groups_per_step]
            mixed = [i for i in first if self.groups[i].newest != self.groups[i].version]
            if not mixed:
                return
            self.forget(mixed, "mixed-versions")

    def may_insert(self, n: int) -> bool:
        """insert n iff size + n <= min_size or diff(inserts + n) <= max_diff, promised ones
        included: queue of 4, 3 inserted, 0 sampled -> 1 may, 2 may not."""
        bounds = Bounds.of(self.config)
        size = len(self.slots) + len(self.groups)
        diff = (self.inserts + len(self.slots) + n) * bounds.ratio - self.samples
        return size + n <= bounds.min_size or diff <= bounds.max_diff + ROUNDING

    def may_sample(self) -> bool:
        """sample n iff size >= min_size and diff(samples + n) >= min_diff."""
        bounds = Bounds.of(self.config)
        diff = self.inserts * bounds.ratio - self.samples - self.config.groups_per_step
        return len(self.groups) >= bounds.min_size and diff >= bounds.min_diff - ROUNDING

    def may_refuse(self, words: str, version: int) -> bool:
        """Whether the bound that a refusal of one more group at `version` names holds it back."""
        found = re.search(r"\(([a-z-]+)\)", words)
        assert found, words
        c, reason = self.config, found[1]
        if reason == "engine-behind":
            is_exact = c.staleness_policy == "exact"
            return version != self.learner if is_exact else version + c.max_staleness < self.learner
        if reason == "capacity":
            is_dropping = c.staleness_policy == "drop"
            may_go = [i for i in self.free() if is_dropping or self.groups[i].draws]
            return len(self.slots) + len(self.groups) - len(may_go) >= c.max_groups
        if reason == "window":
            if c.staleness_policy == "drop":  # no window, but the next draw must not be too late
                return version + c.max_staleness < self.next_version
            is_early = c.staleness_policy == "exact" and version != self.next_version
            return is_early or self.window_room(version) <= 0
        if reason == "limiter":
            return not self.may_insert(1)
        # Neither the largest group ever nor what the learner has needed lately is modelled.
        return c.max_bytes is not None if reason == "bytes" else c.is_adaptive

    def window_room(self, version: int) -> int:
        """Groups that may still be admitted at `version`; see store.py."""
        c = self.config
        outstanding = [self.groups[i].version for i in self.free() if self.groups[i].draws == 0]
        outstanding += [held.slot.version for held in self.slots.values()]
        return min(
            (last + c.max_staleness - self.next_version + 1) * c.groups_per_step
            - sum(a <= last for a in outstanding)
            for last in {version, *(a for a in outstanding if a > version)}
        )
