"""Keys of the `[supervision]` table: when processes are started again, and when a run is stuck."""

from __future__ import annotations

from pydantic import Field

from leeway.replay.config import FrozenModel


class SupervisionConfig(FrozenModel):
    """Processes that end, and stages that make no progress. Keys of the `[supervision]` table."""

    max_restarts: int = Field(default=3, ge=0)
    """How often `leeway train` starts each of its processes (Redis, API, serve, learner) again
    within `restart_window_s`; one that ends once more ends the run. 0 starts none again."""
    restart_window_s: float = Field(default=600.0, gt=0)
    """Restarts longer ago than this no longer count, in seconds."""
    start_deadline_s: float = Field(default=3600.0, gt=0)
    """How long engines, retriever and workers may take to start before the watchdog ends the run,
    in seconds."""
    evaluation_deadline_s: float = Field(default=1800.0, gt=0)
    """How long an evaluation may generate no token, in seconds."""
    rollout_deadline_s: float = Field(default=1800.0, gt=0)
    """How long no group may come while training goes on and the buffer has room, in seconds."""
    step_deadline_s: float = Field(default=3600.0, gt=0)
    """How long no optimizer step may end while training goes on, in seconds."""
    silence_deadline_s: float = Field(default=600.0, gt=0)
    """How long the learner of `leeway train` may give no sign of life, in seconds; then it is
    killed and started again. It gives one between two steps and every few seconds of a wait. Where
    its steps take long, four times the longest silence so far."""
