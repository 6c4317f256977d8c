"""Who waits for whom, as data: the seconds of each side, and the chain of waits now.

    rollout  --window-->  learner  --missing-->  rollout (slot a1b2, version 4, for 31 s)

A watchdog reads it: a chain that ends at somebody who works is a delay, one that ends at nobody is
a standstill.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from leeway.replay.store import Held, RefusalReason, ReplayStats, ShortageReason, Waiting

Side = Literal["rollout", "learner"]

AWAITED: Final[dict[RefusalReason | ShortageReason, Literal["learner", "engines", "operator"]]] = {
    "window": "learner",
    "lookahead": "learner",
    "capacity": "learner",
    "bytes": "learner",
    "limiter": "learner",
    "engine-behind": "engines",
    "paused": "operator",
}
"""Whom a rollout worker waits for, by what it was told."""


class Seconds(msgspec.Struct, frozen=True):
    """What one side has done with its time, summed over its callers."""

    waiting_s: float
    """Rollout: for room. Learner: for data."""
    working_s: float
    """Rollout: playing, from a slot to its group. Learner: training, from a draw to its end."""

    @property
    def waiting_share(self) -> float:
        """Of both, 0 while nothing is known."""
        total = self.waiting_s + self.working_s
        return self.waiting_s / total if total else 0.0


class WaitLink(msgspec.Struct, frozen=True):
    """One side that waits now."""

    waiter: Side
    reason: RefusalReason | ShortageReason
    num_waiting: int
    since_s: float
    """Of the one that waits longest."""
    awaited: Literal["rollout", "learner", "engines", "operator", "nobody"]
    """nobody: the other side waits too, and holds nothing that could move on."""
    held: Held | None = None
    """The slot or lease longest held by whom it waits for."""


def seconds_by_side(stats: ReplayStats) -> dict[Side, Seconds]:
    """Waiting and working of both sides, since the buffer began."""
    return {
        "rollout": Seconds(stats.wait_room_s, stats.play_s),
        "learner": Seconds(stats.wait_data_s, stats.train_s),
    }


def chain(stats: ReplayStats) -> list[WaitLink]:
    """Every side and reason that somebody waits for now, longest first."""
    waits: dict[tuple[Side, RefusalReason | ShortageReason], list[Waiting]] = {}
    for wait in stats.waits:
        waits.setdefault((wait.side, wait.reason), []).append(wait)
    links = [_link(side, reason, found, stats) for (side, reason), found in sorted(waits.items())]
    return sorted(links, key=lambda link: -link.since_s)


def _link(
    side: Side, reason: RefusalReason | ShortageReason, waits: list[Waiting], stats: ReplayStats
) -> WaitLink:
    since_s = max(wait.since_s for wait in waits)
    awaited = "rollout" if side == "learner" else AWAITED[reason]
    held = stats.slots if awaited == "rollout" else stats.leases if awaited == "learner" else ()
    longest = max(held, key=lambda h: h.since_s, default=None)
    # Somebody who holds something works; else who waits for the first side waits for nobody.
    other = {"rollout": "rollout", "learner": "learner"}.get(awaited)
    is_stuck = longest is None and any(wait.side == other for wait in stats.waits)
    num_waiting = sum(wait.num for wait in waits)
    return WaitLink(side, reason, num_waiting, since_s, "nobody" if is_stuck else awaited, longest)
