"""Rate limiters between rollouts and learner, as Reverb defines them: pure arithmetic.

`diff = inserts * samples_per_insert - samples` says how far the learner is behind.

    insert n   freely until `min_size` groups exist, then iff  diff(inserts + n) <= max_diff
    sample n   iff size >= min_size and  diff(samples + n) >= min_diff

    limiter             samples_per_insert   min_diff               max_diff
    none                1                    -inf                   inf
    min-size            1                    -inf                   inf
    queue               1                    0                      queue_size
    sample-to-insert    as configured        r min_size - buffer    r min_size + buffer

A sample is a whole step here, so fewer than `groups_per_step` groups can never be sampled and are
inserted freely, whatever `min_size`. Groups that are lost before they were sampled are taken out of
`inserts`: nobody will ever sample them. Evicted ones stay in. Those of a lease that comes back are
taken out of `samples`. For the same reason `size` counts leased groups until they are acknowledged,
where Reverb's table forgets an item as its last sample is taken. lua/rule.lua is the same
arithmetic.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from leeway.replay.config import ReplayConfig

ROUNDING = 1e-9
"""A ratio such as 0.1 is not exact, so an insert that lands on the bound may be off by this."""


class Limiter(NamedTuple):
    """The four numbers of a limiter."""

    min_size: int
    samples_per_insert: float
    min_diff: float
    max_diff: float

    def room(self, size: int, inserts: int, samples: int) -> int | float:
        """How many groups may be inserted now; `size` and `inserts` count promised ones too.

        queue of 4: 3 inserted, 0 sampled -> 1.   ratio 2, max_diff 10: 3 inserted, 2 sampled -> 3
        """
        free = max(0, self.min_size - size)
        if math.isinf(self.max_diff):
            return math.inf
        bound = (self.max_diff + samples) / self.samples_per_insert - inserts
        return max(free, math.floor(bound + ROUNDING))

    def may_sample(self, n: int, size: int, inserts: int, samples: int) -> bool:
        """Whether a step of `n` groups may be sampled."""
        diff = inserts * self.samples_per_insert - samples - n
        return size >= self.min_size and diff >= self.min_diff - ROUNDING


def limiter_of(config: ReplayConfig) -> Limiter:
    """The configured limiter's numbers."""
    min_size = max(config.min_size, config.groups_per_step)
    if config.limiter == "queue":
        return Limiter(config.groups_per_step, 1.0, 0.0, float(config.queue_size))
    if config.limiter == "sample-to-insert":
        ratio = config.samples_per_insert
        offset = ratio * config.min_size
        return Limiter(min_size, ratio, offset - config.error_buffer, offset + config.error_buffer)
    if config.limiter == "none":
        min_size = 0
    return Limiter(min_size, 1.0, -math.inf, math.inf)


def deadlock(config: ReplayConfig) -> str | None:
    """Why rollouts and learner could wait for each other for ever, with the numbers; None if not.

    Let D be the diff after some step. Nobody moves where D + ratio > max_diff (no insert) and
    D - groups_per_step < min_diff (no step), so the window between must hold both. And what a step
    waits for must be allowed to exist: by max_groups, and by the version window.
    """
    limiter, step = limiter_of(config), config.groups_per_step
    ratio = limiter.samples_per_insert
    width = limiter.max_diff - limiter.min_diff
    least = max(2 * max(1.0, ratio), step + ratio)
    if config.limiter == "sample-to-insert" and width < least:
        return (
            f"error_buffer = {config.error_buffer:g} leaves a window of {width:g} between inserts "
            f"and samples, and must be at least {least / 2:g}: a step takes groups_per_step = "
            f"{step} samples, a group brings samples_per_insert = {ratio:g}"
        )
    if config.limiter == "queue" and config.queue_size < step:
        return (
            f"queue_size = {config.queue_size} must be at least groups_per_step = {step}, or no "
            "step could ever be drawn"
        )
    if config.staleness_policy == "exact" and limiter.max_diff < config.window:
        return (
            f'limiter = "{config.limiter}" lets {limiter.max_diff:g} groups wait, and '
            f'staleness_policy = "exact" draws only when (max_staleness + 1) x groups_per_step = '
            f"{config.window} do"
        )
    if ratio > config.max_draws:
        return (
            f"samples_per_insert = {ratio:g} wants every group trained that often, and max_draws = "
            f"{config.max_draws} allows fewer"
        )
    if config.staleness_policy != "drop" and ratio < 1:
        return (
            f"samples_per_insert = {ratio:g} leaves groups untrained, and staleness_policy = "
            f'"{config.staleness_policy}" trains each at least once; use "drop", or a ratio of 1'
        )
    return _cannot_exist(config, limiter)


def _cannot_exist(config: ReplayConfig, limiter: Limiter) -> str | None:
    """Whether the groups that a step waits for are more than may exist."""
    # So many inserts that nobody has sampled let a step be drawn.
    needed = limiter.min_size
    if not math.isinf(limiter.min_diff):
        inserts = (limiter.min_diff + config.groups_per_step) / limiter.samples_per_insert
        needed = max(needed, math.ceil(inserts - ROUNDING))
    what = f'limiter = "{config.limiter}" with min_size = {config.min_size}'
    if needed > config.max_groups:
        return (
            f"{what} draws only when {needed} groups exist, and max_groups = {config.max_groups} "
            "allows fewer"
        )
    if config.staleness_policy != "drop" and needed > config.window:
        return (
            f"{what} draws only when {needed} groups exist, and the version window of "
            f"(max_staleness + 1) x groups_per_step = {config.window} admits fewer"
        )
    return None
