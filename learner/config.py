"""Configuration of the learner. Keys of the `[learner]` table."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from leeway.learner.objective.kinds import Advantage, Correction, Ctn, CtnTarget, Old, Reduce
from leeway.replay.config import FrozenModel


class LearnerConfig(FrozenModel):
    """What is optimised, and how."""

    objective: str = "so-grpo"
    """A preset, such as so-grpo or grpo; docs/objectives.md lists them."""
    learning_rate: float = Field(default=5e-5, gt=0)
    """Step size of AdamW: the highest, if it falls again."""
    warmup_steps: int = Field(default=2, ge=0)
    """Steps over which the learning rate rises linearly."""
    learning_rate_decay: Literal["none", "linear", "cosine"] = "none"
    """How the learning rate falls from the end of the warm-up to nothing behind the last of
    num_steps. A run that is resumed with more steps goes on at the rate of the longer run. The
    critic's rate stays."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient is scaled down to this norm before clipping-triggered normalization."""
    num_steps: int = Field(default=60, ge=1)
    """Steps of the run; step v makes policy version v."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps within one step, each over its share of the batch's trajectories."""
    micro_batch_tokens: int = Field(default=16384, ge=256)
    """Tokens of one forward pass: whole trajectories, packed without padding. A longer trajectory
    makes a pass of its own."""
    ratio: Literal["token", "turn", "turn-arithmetic", "sequence"] | None = None
    """How log-ratios become one importance ratio; None takes the preset's."""
    advantage: Advantage | None = None
    """How rewards become advantages; None takes the preset's."""
    reduce: Reduce | None = None
    """What the loss is a mean over; None takes the preset's."""
    whiten: bool | None = None
    """Shift and scale advantages to mean 0 and standard deviation 1 over the batch; None takes the
    preset's, which is false."""
    eps_low: float | None = Field(default=None, gt=0, lt=1)
    """Lower clip distance; None takes the preset's."""
    eps_high: float | None = Field(default=None, gt=0)
    """Upper clip distance; None takes the preset's."""
    dual_clip: float | None = Field(default=None, gt=1)
    """A negative advantage costs at most this many times itself; None leaves the bound out."""
    old: Old | None = None
    """Policy that ratios are taken against: `behaviour` sampled the token, `proximal` is this
    learner's at the start of the step. None takes the preset's."""
    correction: Correction | None = None
    """What is done with the weight exp(proximal - behaviour), outside the clip: truncate it, mask
    the tokens where it is far from 1, or none. None takes the preset's."""
    max_correction: float | None = Field(default=None, gt=1)
    """Upper bound of that weight; `mask` keeps tokens between one over it and it. None takes 2."""
    ctn: Ctn | None = None
    """Clipping-triggered normalization: none, gradient or penalty; None takes the preset's."""
    ctn_target: CtnTarget | None = None
    """What the gradient form divides: the gradient, which Adam forgets as far as it is constant, or
    the learning rate. None takes gradient."""
    ctn_c: float | None = Field(default=None, gt=0)
    """c in g / max(1, ||C|| / c); None takes 1."""
    ctn_raw: bool | None = None
    """Divide by ||C|| itself, also where it is below c; None takes false."""
    measure_ctn: bool | None = None
    """Measure ||C|| also where the objective clips without being normalised by it, at the cost of
    that pass; None takes false."""
    ctn_strength: float | None = Field(default=None, gt=0)
    """lambda of the penalty form: loss + lambda * clip fraction * KL; None takes 1."""
    gamma: float | None = Field(default=None, gt=0, le=1)
    """Discount per trained token (gae) or per turn (gae-turn); None takes 1."""
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    """Lambda of generalised advantage estimation; None takes 1."""
    critic_learning_rate: float | None = Field(default=None, gt=0)
    """Step size of the critic's AdamW; None takes ten times learning_rate."""
    critic_warmup_steps: int | None = Field(default=None, ge=0)
    """First steps, in which the critic learns and the policy stands still; None takes 0."""
    critic_epochs: int | None = Field(default=None, ge=1)
    """How often the critic goes over each batch; None takes 1."""
    value_clip: float | None = Field(default=None, gt=0)
    """How far a value may move from the one at the start of the step before its loss is clipped;
    None takes 0.2. Only with critic_epochs of at least 2: the first starts from that value."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of forward and backward. With bfloat16 the network computes with rounded weights;
    the weights that are trained, summed gradients and optimizer state are float32 always."""
    activation_checkpointing: bool = False
    """Keep only the input of each block, and compute the rest again in the backward pass: a
    fraction of the memory of a micro-batch, for a third more arithmetic."""
    compile: bool = False
    """Compile the blocks with torch.compile: fewer and larger kernels, which pays on a GPU from
    about a billion parameters on. The first steps take a minute longer."""
    reshard: bool = True
    """With several ranks: free a block's whole weights between forward and backward pass and gather
    them again. False gathers once, and keeps all whole weights in memory during a pass."""
    num_processes: int = Field(default=1, ge=1)
    """Learner ranks started by torchrun on this machine."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of one rank."""
    checkpoint_every: int = Field(default=20, ge=1)
    """Steps between checkpoints; one is always written at the end and on SIGTERM."""
    draw_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds to wait for a batch before the run is given up with the reason."""
    publish_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds an engine may take to receive and confirm a version before it is evicted."""
    transport: Literal["auto", "direct", "collective"] = "auto"
    """How a version reaches the engines. direct: the learner copies it into their memory, in which
    they take no part; for engines of its own machine that receive beside the weights in use.
    collective: a broadcast, by NCCL or gloo. auto: direct where all are on GPUs of this machine.
    What cannot be done directly is broadcast, and the log says so."""
