"""Configuration of the replay buffer."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from leeway.replay.limiter import deadlock
from leeway.replay.selection import Selector

StalenessPolicy = Literal["pace", "drop", "exact"]
"""How `max_staleness` is kept: by admitting only what can be trained in time, by dropping what is
too old, or by making every trained token that old."""


class FrozenModel(BaseModel):
    """Base of every configuration: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ReplayConfig(FrozenModel):
    """The buffer between rollouts and learner. Keys of the `[replay]` table."""

    url: str | None = None
    """Redis URL, such as redis://user:password@host:6379/0; also rediss:// (TLS), unix://,
    redis+sentinel:// and redis+cluster://. None starts an embedded server."""
    groups_per_step: int = Field(default=16, ge=1)
    """Groups the learner draws for one optimizer step."""
    max_staleness: int = Field(default=4, ge=0)
    """Largest allowed staleness of a trained token, in policy versions. 0 is on-policy."""
    staleness_policy: StalenessPolicy = "pace"
    """pace: only groups that can be trained within max_staleness are admitted, so none is wasted.
    drop: groups are admitted as long as there is room; those that grow too old are dropped and
    counted. exact, for experiments: after a ramp of max_staleness steps every trained token is
    exactly max_staleness versions old; nothing is generated while the learner trains."""
    lookahead: Literal["full", "adaptive"] | None = None
    """How far ahead of the learner groups are admitted. full: as far as max_staleness allows.
    adaptive: no farther than the learner has needed lately, so what it trains is younger where it
    is slower than the rollouts. None: adaptive under pace, unless there is a limiter or max_draws
    is above 1."""
    draw_by: Selector = "fifo"
    """Which groups are drawn first. fifo: oldest version, then first to arrive. lifo: last to
    arrive. freshest: newest version. uniform: any. prioritised: in proportion to the spread of the
    group's rewards, or to what update_priorities set. Under pace, groups that could not be trained
    later come first whatever this says."""
    evict_by: Selector = "fifo"
    """Under drop, which groups make room when max_groups or max_bytes is reached; prioritised:
    lowest priority first."""
    seed: int = Field(default=0, ge=0, lt=2**53)
    """Of uniform and prioritised."""
    limiter: Literal["none", "min-size", "sample-to-insert", "queue"] = "none"
    """Holds rollouts and learner together, as Reverb's of these names. min-size: a step is
    drawn where min_size groups exist. queue: at most queue_size groups wait. sample-to-insert:
    steps follow samples_per_insert within error_buffer. The version window holds besides."""
    min_size: int = Field(default=1, ge=1)
    """Groups that must exist for a draw, leased ones among them, for min-size and sample-to-insert;
    one step's groups at least."""
    samples_per_insert: float = Field(default=1.0, gt=0)
    """How often a group is to be trained on the average, for sample-to-insert."""
    error_buffer: float = Field(default=64.0, gt=0)
    """How far samples may be off samples_per_insert x inserts, to either side, for
    sample-to-insert."""
    queue_size: int = Field(default=64, ge=1)
    """Most groups that wait for the learner, for queue."""
    max_groups: int = Field(default=1024, ge=1)
    """Most groups that may exist at once: slots, buffered and leased together."""
    max_bytes: ByteSize | None = None
    """Most bytes of buffered and leased groups, such as 4294967296 or "4GiB"; None: no limit. A
    group being played counts as large as the largest so far."""
    num_shards: int = Field(default=1, ge=1)
    """Independent tables that a Redis Cluster may keep on several nodes. Each gets an equal part of
    a step and of every limit."""
    slot_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds a rollout worker may hold a slot before it is given to another."""
    lease_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds the learner may hold a draw before its groups go back to the buffer."""
    max_draws: int = Field(default=1, ge=1)
    """How many steps may train one group, as long as it is young enough."""
    max_returns: int = Field(default=3, ge=0)
    """How often a group may come back untrained from the learner before it is dropped."""

    @property
    def window(self) -> int:
        """Most groups the version window admits: groups_per_step 2, max_staleness 1 -> 4."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def reach(self) -> int:
        """Most groups that window and max_groups let be ahead of the learner."""
        return min(self.window, self.max_groups)

    @property
    def is_adaptive(self) -> bool:
        """Whether less than the window may be admitted."""
        return self._may_adapt and self.lookahead != "full"

    @property
    def _may_adapt(self) -> bool:
        """Whether nothing else decides how many groups there are."""
        return self.staleness_policy == "pace" and self.limiter == "none" and self.max_draws == 1

    def of_shard(self) -> Self:
        """What each shard keeps: 16 groups a step and 1024 in 4 shards -> 4 and 256."""
        n = self.num_shards
        part = {
            "num_shards": 1,
            "groups_per_step": self.groups_per_step // n,
            "max_groups": self.max_groups // n,
            "max_bytes": None if self.max_bytes is None else int(self.max_bytes) // n,
            "min_size": -(-self.min_size // n),
            "error_buffer": self.error_buffer / n,
            "queue_size": max(1, self.queue_size // n),
        }
        return type(self).model_validate(self.model_dump() | part)

    @model_validator(mode="after")
    def _check_that_shards_fit(self) -> Self:
        if self.groups_per_step % self.num_shards:
            raise ValueError(
                f"groups_per_step = {self.groups_per_step} must be a multiple of num_shards = "
                f"{self.num_shards}, since every shard gives an equal part of a step"
            )
        if self.num_shards > 1:
            try:
                self.of_shard()
            except ValueError as error:
                raise ValueError(f"each of num_shards = {self.num_shards}: {error}") from error
        return self

    @model_validator(mode="after")
    def _check_that_a_step_fits(self) -> Self:
        if self.max_groups < self.groups_per_step:
            raise ValueError(
                f"max_groups = {self.max_groups} must be at least groups_per_step = "
                f"{self.groups_per_step}, or no step could ever be drawn"
            )
        return self

    @model_validator(mode="after")
    def _check_that_an_exact_window_fits(self) -> Self:
        if self.staleness_policy == "exact" and self.max_groups < self.window:
            raise ValueError(
                f"max_groups = {self.max_groups} must be at least (max_staleness + 1) x "
                f"groups_per_step = {self.window} under staleness_policy = "
                '"exact", which draws only when all of them are ready'
            )
        return self

    @model_validator(mode="after")
    def _check_that_exact_is_alone(self) -> Self:
        if self.staleness_policy == "exact" and (self.draw_by != "fifo" or self.max_draws != 1):
            raise ValueError(
                'staleness_policy = "exact" trains each group once and the oldest first; it needs '
                f'draw_by = "fifo" and max_draws = 1, not "{self.draw_by}" and {self.max_draws}'
            )
        return self

    @model_validator(mode="after")
    def _check_that_lookahead_is_alone(self) -> Self:
        if self.lookahead == "adaptive" and not self._may_adapt:
            raise ValueError(
                'lookahead = "adaptive" admits as many groups as the learner needs, and needs '
                'staleness_policy = "pace", limiter = "none" and max_draws = 1, not '
                f'"{self.staleness_policy}", "{self.limiter}" and {self.max_draws}, which decide '
                "that themselves"
            )
        return self

    @model_validator(mode="after")
    def _check_that_nobody_waits_for_ever(self) -> Self:
        problem = deadlock(self)
        if problem:
            raise ValueError(problem)
        return self
