"""RunConfig: the whole of a run, read from one TOML file, and every check that spans two parts.

Reading it imports nothing heavy (no torch, ray, vllm, transformers).
"""

from __future__ import annotations

from pydantic import Field

from leeway.actors.config import DataConfig, PolicyConfig, RolloutConfig, SearchConfig
from leeway.learner.config import LearnerConfig
from leeway.replay.config import FrozenModel, ReplayConfig


class EvalConfig(FrozenModel):
    """Held-out evaluation. Keys of the `[eval]` table."""

    num_questions: int = Field(default=200, ge=0)
    """Held-out questions played greedily before and after training; 0 plays none."""
    every_steps: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations while training goes on; 0 means only before and after."""


class ApiConfig(FrozenModel):
    """REST. Keys of the `[api]` table."""

    host: str = "127.0.0.1"
    """Address the API listens on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the API; 0 takes a free one."""


class RunConfig(FrozenModel):
    """One run. Keys at the top of the file, and a table for each part."""

    name: str = Field(default="run", pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_-]{0,62}$")
    """Name of the run; the run directory and the Redis keys carry it."""
    directory: str = "runs"
    """Folder that receives the run directory."""
    model: str = "bundled"
    """Hugging Face model directory to start from; or `bundled`."""
    seed: int = 0
    """Seed of sampling, question order and optimizer."""
    policy: PolicyConfig = PolicyConfig()
    search: SearchConfig = SearchConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    api: ApiConfig = ApiConfig()
