"""Configuration of the replay buffer."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

StalenessPolicy = Literal["pace", "exact"]
"""What `max_staleness` is: the most a trained token may have, or what every one has."""


class FrozenModel(BaseModel):
    """Base of every configuration: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ReplayConfig(FrozenModel):
    """The buffer between rollouts and learner. Keys of the `[replay]` table."""

    url: str | None = None
    """Redis URL, such as redis://user:password@host:6379/0. None starts an embedded server."""
    groups_per_step: int = Field(default=16, ge=1)
    """Groups the learner draws for one optimizer step."""
    max_staleness: int = Field(default=4, ge=0)
    """Largest allowed staleness of a trained token, in policy versions. 0 is on-policy."""
    staleness_policy: StalenessPolicy = "pace"
    """pace: staleness is at most max_staleness. exact, for experiments: after a ramp of
    max_staleness steps every trained token is exactly max_staleness versions old; nothing is
    generated while the learner trains."""
    max_groups: int = Field(default=1024, ge=1)
    """Most groups that may exist at once: slots, buffered and leased together."""
    slot_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds a rollout worker may hold a slot before it is given to another."""
    lease_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds the learner may hold a draw before its groups go back to the buffer."""
    max_draws: int = Field(default=4, ge=1)
    """How many times one group may be handed out; a group drawn more often is dropped."""

    @property
    def window(self) -> int:
        """Most groups the version window admits: groups_per_step 2, max_staleness 1 -> 4."""
        return (self.max_staleness + 1) * self.groups_per_step

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
