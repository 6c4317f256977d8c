"""What an agent outside of the run sends and gets: slots, and the groups that fill them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from leeway.replay.schema import SCHEMA_VERSION
from leeway.services.api.models import Answer

MAX_INT32 = 2**31 - 1
Token = Annotated[int, Field(ge=0, le=MAX_INT32)]
LogProb = Annotated[float, Field(ge=-1e4, le=1e-3, allow_inf_nan=False)]
Number = Annotated[float, Field(ge=-1e4, le=1e4, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[\x20-\x7e]+$")]
_IN_A_PATH = r"^[\x20-\x2d\x30-\x7e][\x20-\x2e\x30-\x7e]*$"
PathName = Annotated[str, Field(min_length=1, max_length=200, pattern=_IN_A_PATH)]
"""A name without a slash, and no dot first: it is read again at /v1/trajectories/NAME."""


class Sent(BaseModel):
    """Base of what is sent: unknown keys are refused, and "1" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class SlotRequest(Sent):
    """Ask for slots: permission for one group each."""

    num: int = Field(default=1, ge=1, le=64)
    """Most slots that are wanted."""
    wait_s: float = Field(default=0.0, ge=0, le=30)
    """How long to wait for the first."""


class SlotItem(Answer):
    """Permission for one group to exist until it is trained or dropped."""

    slot_id: str
    """Also the id of the group that fills it."""
    version: int
    """The group may hold no token of an older policy version."""
    ticket: str
    """Hand it back with the group."""
    expires_in_s: float


class Slots(Answer):
    """Granted slots."""

    items: list[SlotItem]
    schema_version: int
    """Of the groups that this API takes."""
    learner_version: int
    """The group may hold no token of a newer policy version than the learner has then."""
    group_size: int
    """Trajectories that a group must have."""
    max_trajectory_tokens: int


class SentTurn(Sent):
    """One completion and the observation that followed."""

    num_generated: int = Field(ge=0, le=MAX_INT32)
    """Tokens that the policy sampled; trained."""
    num_observed: int = Field(ge=0, le=MAX_INT32)
    """Tokens that came back behind them; never trained."""
    action: Literal["search", "answer", "invalid"]


class SentTrajectory(Sent):
    """One episode. L: all its tokens; T: the generated ones; K: its turns."""

    trajectory_id: PathName
    """Unique in the group; without a slash, and no dot first."""
    token_ids: list[Token] = Field(min_length=2)
    """[L] prompt, then of each turn the generated and the observed tokens."""
    num_prompt: int = Field(ge=1, le=MAX_INT32)
    """Tokens of the prompt."""
    turns: list[SentTurn] = Field(min_length=1, max_length=1024)
    """[K]"""
    logprobs: list[LogProb] = Field(min_length=1)
    """[T] of each generated token, under the policy version that sampled it."""
    versions: list[Token] = Field(min_length=1)
    """[T] policy version that sampled each generated token."""
    reward: Number
    stop_reason: Literal["answer", "turns", "tokens", "invalid"]
    scores: dict[str, Number] = Field(default_factory=dict, max_length=64)
    duration_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    turn_rewards: list[Number] | None = None
    """[K] what each turn earned; they sum to `reward`. Null: the whole was rewarded."""


class GroupSubmission(Sent):
    """The sibling trajectories of one question, for one slot."""

    schema_version: int = Field(default=SCHEMA_VERSION, ge=SCHEMA_VERSION, le=SCHEMA_VERSION)
    """The one that POST /v1/slots names."""
    ticket: str = Field(min_length=1, max_length=1000)
    """Of the slot."""
    question_id: Name
    worker_id: Name = "outside"
    """Who played it."""
    trajectories: list[SentTrajectory] = Field(min_length=1, max_length=1024)


class SlotReturn(Sent):
    """Give a slot back unfilled."""

    ticket: str = Field(min_length=1, max_length=1000)
    reason: Literal["outside", "outside-timeout", "outside-failed", "outside-cancelled"] = "outside"
    """Counted among the dropped groups, and a label of their metric."""


class GroupAnswer(Answer):
    """The group is in the buffer, or was and has been trained."""

    group_id: str
    state: Literal["added"]
    num_trajectories: int
    num_trained_tokens: int


class SlotReturned(Answer):
    """The slot is free."""

    slot_id: str
    state: Literal["dropped"]
