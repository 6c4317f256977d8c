"""When a group may be admitted, and when a draw may go ahead: pure arithmetic.

A group admitted at version `a` has the deadline `a + max_staleness`: the last learner version that
may train it. A learner at version `v` trains `B = groups_per_step` groups at v, B more at v + 1,
and so on, so a set of groups can be trained in time exactly when, for every d >= v,

    number of groups with deadline <= d   <=   (d - v + 1) * B

Counts are by version at admission, as in ReplayStats.outstanding. Groups at the learner are left
out of the counts and in `v` instead: with one lease in hand, the next draw is for the version after
it.

That is the policy "pace". "exact" makes every group max_staleness versions old when it is trained:
admission only at the version the next draw is for, and a draw only when the whole window is ready.
With B=2 and max_staleness=1 the draws are

    at 0: 4 groups from 0 are ready, 2 are drawn, 0 old     (the ramp: max_staleness steps)
    at 1: 2 from 0, 2 from 1; the 2 from 0 are drawn, 1 old
    at 2: 2 from 1, 2 from 2; the 2 from 1 are drawn, 1 old, and so on

"drop" admits without a window, since what grows too old is dropped: only an engine so old that all
it samples is too old at once is refused.

lua/rule.lua is the same arithmetic; tests/integration/test_replay_lua_rule.py compares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from leeway.replay.config import StalenessPolicy


class DrawPlan(msgspec.Struct, frozen=True):
    """Whether a draw may go ahead, else what it waits for."""

    missing: int
    """Ready groups short of a full step; under exact, of the whole window."""
    blocking: dict[int, int]
    """Groups still being played that must be in this step, by version at admission. Under exact
    all that are being played: none may see the version that this step makes."""
    num_forced: int = 0
    """How many of the earliest deadlines must be in this step, so that the rest can be trained in
    time. Whoever draws in another order takes these first."""

    @property
    def is_ready(self) -> bool:
        """The draw may go ahead."""
        return not self.missing and not self.blocking


def is_engine_behind(
    version: int, learner_version: int, max_staleness: int, policy: StalenessPolicy = "pace"
) -> bool:
    """Whether nothing may be admitted at engine version `version`, whatever the room.

    learner at 5, max_staleness=1: version 3 is behind, 4 is not. Under exact 4 is, and so is 6:
    that weights are out and their step is not acknowledged.
    """
    if policy == "exact":
        return version != learner_version
    return version + max_staleness < learner_version


def admissible(
    outstanding: Mapping[int, int],
    version: int,
    learner_version: int,
    max_staleness: int,
    groups_per_step: int,
    policy: StalenessPolicy = "pace",
) -> int | float:
    """How many more groups may be admitted at `version`, at least 0.

    learner at 5, B=2, max_staleness=1, nothing outstanding, engines at 5 -> deadline 6,
    (6-5+1)*2 = 4. With {5: 3} outstanding -> 1. Engines at 4 -> deadline 5, (5-5+1)*2 = 2 by then,
    and 4 - 3 = 1 by version 6 -> 1. Engines at 3 -> deadline 4 is past -> 0.

    Under exact only at the version of the next draw, so with a lease in hand nothing: learner at
    5, engines at 5 -> 4 as above; engines at 4, or at 5 with the next draw for 6 -> 0.
    """
    if is_engine_behind(version, learner_version, max_staleness, policy):
        return 0
    if policy == "drop":
        return math.inf
    deadline = version + max_staleness
    checkpoints = {deadline} | {a + max_staleness for a in outstanding}
    room = min(
        (d - learner_version + 1) * groups_per_step - _due(outstanding, d - max_staleness)
        for d in checkpoints
        if d >= deadline
    )
    return max(0, room)


def drawable(
    ready: Mapping[int, int],
    playing: Mapping[int, int],
    learner_version: int,
    max_staleness: int,
    groups_per_step: int,
    policy: StalenessPolicy = "pace",
    num_again: int = 0,
) -> DrawPlan:
    """Whether the `groups_per_step` ready groups of earliest deadline may be drawn now.

    They may when all others can still be trained from the next version on. Otherwise the plan names
    the groups being played that must come first.

    learner at 5, B=2, max_staleness=1, ready {5: 2}, playing {4: 1}: the one at 4 has deadline 5,
    so it must be in this step -> blocking {4: 1}. Ready {5: 2}, playing {5: 2}: both can wait for
    the step at 6 -> may be drawn. Ready {5: 1} -> missing 1.

    Waiting is asked for only where it would help, that is where a group drawn now could have waited
    instead. Groups too many to be trained in time (after limits were lowered) do not stop a draw.

    `num_again` groups were trained before and may be drawn again: they fill a step up, and nobody
    owes them one. Under drop only the number counts.

    Under exact all (1 + 1) * 2 = 4 groups must be ready and none may be played: ready {4: 2, 5: 1},
    playing {5: 1} -> missing 1, blocking {5: 1}.
    """
    usable = {a: n for a, n in ready.items() if a + max_staleness >= learner_version}
    num_ready = sum(usable.values()) + num_again
    if policy == "exact":
        window = (max_staleness + 1) * groups_per_step
        return DrawPlan(max(0, window - num_ready), dict(playing), groups_per_step)
    if num_ready < groups_per_step:
        return DrawPlan(groups_per_step - num_ready, {})
    if policy == "drop":
        return DrawPlan(0, {})
    awaited = {a: n for a, n in playing.items() if a + max_staleness >= learner_version}
    num_forced = 0
    for last in sorted({*usable, *awaited}):
        due_ready, due_playing = _due(usable, last), _due(awaited, last)
        num_drawn = min(groups_per_step, due_ready)
        later_steps = (last + max_staleness - learner_version) * groups_per_step
        is_late = due_ready - num_drawn + due_playing > later_steps
        if is_late and due_playing and num_drawn < groups_per_step:
            return DrawPlan(0, {a: n for a, n in awaited.items() if a <= last})
        num_forced = max(num_forced, min(num_drawn, due_ready + due_playing - later_steps))
    return DrawPlan(0, {}, num_forced)


def _due(counts: Mapping[int, int], last_version: int) -> int:
    """Groups admitted at `last_version` or before it."""
    return sum(n for version, n in counts.items() if version <= last_version)
