"""Bodies of the REST answers: the base, the status, probes and errors. The other resources are in
resources.py.

`Status` is also what `leeway train` and `leeway status` draw; snapshot.py builds it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """Base of every body: read from attributes; docstrings become descriptions in openapi.json."""

    model_config = ConfigDict(
        from_attributes=True,
        use_attribute_docstrings=True,
        # What has a default is there all the same.
        json_schema_serialization_defaults_required=True,
    )


class Health(Answer):
    """What a probe is told."""

    status: Literal["ok", "not-ready"] = "ok"
    reasons: list[str] = []
    """Why it is not ready; empty with `ok`."""


class Run(Answer):
    """Where the run stands."""

    name: str = "run"
    phase: str = "starting"
    """What the run is doing: starting, evaluating, training, and so on."""
    elapsed_s: float = 0.0
    """Seconds since the run started."""
    step: int = 0
    """Optimizer steps done."""
    num_steps: int | None = None
    """Optimizer steps of the whole run; null until the learner said so."""
    policy_version: int | None = None
    """Newest policy version the learner made."""
    last_event: str | None = None


class Engine(Answer):
    """One engine."""

    engine_id: str
    version: int | None = None
    """Policy version it samples from."""
    pause_ms: float | None = None
    """Milliseconds for which its last publish stopped generation."""
    transfer_ms: float | None = None
    """Milliseconds its last publish took to arrive, while it generated."""
    tokens_per_s: float | None = None


class Learning(Answer):
    """The last optimizer step; null before the first."""

    reward: float | None = None
    exact_match: float | None = None
    entropy: float | None = None
    kl: float | None = None
    """KL (k3) to the policies that sampled the tokens."""
    grad_norm: float | None = None
    clip_fraction: float | None = None
    """Share of trained tokens that were clipped."""
    clip_bias_norm: float | None = None
    """||C||, the norm of what the clip removed from the gradient."""
    tokens_per_s: float | None = None
    """Tokens trained per second."""


class Staleness(Answer):
    """Staleness of the last batch, in policy versions."""

    mean: float | None = None
    max: int | None = None
    max_seen: int | None = None
    """Largest of the whole run."""
    bound: int | None = None
    """replay.max_staleness."""


class Seconds(Answer):
    """What one side has done with its time."""

    waiting_s: float
    """Rollouts: for room. Learner: for data."""
    working_s: float
    """Rollouts: playing. Learner: training."""


class Held(Answer):
    """A slot or a lease."""

    id: str
    version: int
    since_s: float
    expires_in_s: float
    num_groups: int


class WaitLink(Answer):
    """One side that waits now."""

    waiter: str
    """rollout or learner."""
    reason: str
    num_waiting: int
    since_s: float
    """Of the one that waits longest."""
    awaited: str
    """rollout, learner, engines, operator, or nobody: a standstill."""
    held: Held | None
    """The slot or lease that whom it waits for has held longest."""


class Replay(Answer):
    """The buffer, in groups."""

    num_slots: int
    """Groups being played."""
    num_ready: int
    num_leased: int
    num_held_back: int
    """Groups of the version window that an adaptive lookahead does not admit."""
    num_bytes: int
    """Bytes of buffered and leased groups as stored."""
    num_trained: int
    num_dropped: int
    dropped: dict[str, int]
    """Dropped groups by reason."""
    dropped_turns: dict[str, dict[int, int]]
    """Their trajectories by reason and number of turns."""
    dropped_tokens: dict[str, dict[int, int]]
    """The same by length: at most so many tokens, powers of two."""
    admission_paused: bool
    seconds: dict[str, Seconds]
    """Waiting and working of "rollout" and "learner", summed over their callers."""
    waits: list[WaitLink]
    """Who waits now, for whom and why; the longest first."""


class Waits(Answer):
    """Who waits for whom, as shares of the last half minute or so."""

    learner_for_data: float | None = None
    rollouts_for_room: float | None = None
    """Mean over rollout workers."""
    sentence: str = ""
    """`learner waits for rollouts 41 %`; empty while nothing is known."""
    refusal: str | None = None
    """Why the last request for slots came back empty."""


class Stage(Answer):
    """A stage of the run that should make progress now."""

    name: str
    """start, evaluation, rollouts or learner."""
    idle_s: float
    """Seconds since its last progress."""
    deadline_s: float
    """Past so many seconds without progress the run ends."""


class Watchdog(Answer):
    """What the watchdog of the run saw when it last looked; it does every five seconds."""

    waits: str
    """Who waits for whom, in one sentence; `nobody waits` where none does."""
    verdict: str | None = None
    """Why it ends the run; null while it goes on."""
    stages: list[Stage] = []


class EventLoop(Answer):
    """How late the event loop of one process wakes: one that is held up answers nobody."""

    process: str
    lag_s: float
    """Longest of the last minute, in seconds. The learner computes its steps in its loop."""
    pid: int | None = None


class Eval(Answer):
    """Held-out exact match."""

    before: float | None = None
    latest: float | None = None
    latest_step: int | None = None
    """Optimizer step after which `latest` was measured."""


class Status(Answer):
    """A run at one moment."""

    run: Run = Run()
    engines: list[Engine] = []
    generated_tokens_per_s: float | None = None
    """Tokens generated per second, over all engines."""
    learning: Learning = Learning()
    staleness: Staleness = Staleness()
    replay: Replay | None = None
    """Null while Redis has not answered yet."""
    waits: Waits = Waits()
    watchdog: Watchdog | None = None
    """Null until one has looked, and when it has not for fifteen seconds without a verdict."""
    loops: list[EventLoop] = []
    """Of the processes that live, by name."""
    eval: Eval = Eval()
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the run, without secrets."""


class Problem(Answer):
    """An error, as RFC 9457 application/problem+json."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    """What went wrong and what to do."""
