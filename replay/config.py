"""Configuration of the replay buffer."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


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
    max_groups: int = Field(default=1024, ge=1)
    """Most groups that may exist at once: slots, buffered and leased together."""
    slot_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds a rollout worker may hold a slot before it is given to another."""
    lease_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds the learner may hold a draw before its groups go back to the buffer."""
    max_draws: int = Field(default=4, ge=1)
    """How many times one group may be handed out; a group drawn more often is dropped."""

    @model_validator(mode="after")
    def _check_that_a_step_fits(self) -> Self:
        if self.max_groups < self.groups_per_step:
            raise ValueError(
                f"max_groups = {self.max_groups} must be at least groups_per_step = "
                f"{self.groups_per_step}, or no step could ever be drawn"
            )
        return self
