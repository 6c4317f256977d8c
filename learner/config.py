"""Configuration of the learner. Keys of the `[learner]` table."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from leeway.replay.config import FrozenModel


class LearnerConfig(FrozenModel):
    """What is optimised, and how."""

    objective: str = "so-grpo"
    """A preset of leeway.learner.objective.presets, such as so-grpo or grpo."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Step size of AdamW, constant after the warm-up."""
    warmup_steps: int = Field(default=2, ge=0)
    """Optimizer steps over which the learning rate rises linearly."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient is scaled down to this norm before clipping-triggered normalization."""
    num_steps: int = Field(default=60, ge=1)
    """Optimizer steps of the run; step v makes policy version v."""
    micro_batch_tokens: int = Field(default=16384, ge=256)
    """Padded tokens of one forward pass."""
    ratio: Literal["token", "turn", "turn-arithmetic", "sequence"] | None = None
    """How log-ratios become one importance ratio; None takes the preset's."""
    reduce: Literal["token", "trajectory", "turn"] | None = None
    """What the loss is a mean over; None takes the preset's."""
    eps_low: float | None = Field(default=None, gt=0, lt=1)
    """Lower clip distance; None takes the preset's."""
    eps_high: float | None = Field(default=None, gt=0)
    """Upper clip distance; None takes the preset's."""
    dual_clip: float | None = Field(default=None, gt=1)
    """A negative advantage costs at most this many times itself; None leaves the bound out."""
    ctn_c: float = Field(default=1.0, gt=0)
    """c in g / max(1, ||C|| / c)."""
    ctn_raw: bool = False
    """Divide by ||C|| itself, also where it is below c."""
    ctn_strength: float = Field(default=1.0, gt=0)
    """lambda of the penalty form: loss + lambda * clip fraction * KL."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of forward and backward; weights and optimizer state are float32 always."""
    num_processes: int = Field(default=1, ge=1)
    """Learner ranks started by torchrun on this machine."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of one rank."""
    checkpoint_every: int = Field(default=20, ge=1)
    """Optimizer steps between checkpoints; one is always written at the end and on SIGTERM."""
    draw_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds to wait for a batch before the run is given up with the reason."""
    publish_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds an engine may take to receive and confirm a version before it is evicted."""
