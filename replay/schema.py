"""What actors and learner agree on: the records of an episode, and their shapes.

Arrays are numpy, one-dimensional. `T` counts generated (trained) tokens of a trajectory, `L` all
its tokens (prompt, generated, observed), `K` its turns.

Records hold numbers, texts, arrays and each other, never in a circle, so the garbage collector need
not know of them: a step of 16 groups is hundreds, which would set off a collection in a draw.
"""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple, NewType

import msgspec
import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION: Final = 4
"""Raised with every change of the records below; a reader refuses any other number."""

PolicyVersion = NewType("PolicyVersion", int)
"""0 is the base model; version v leaves optimizer step v."""

GroupId = NewType("GroupId", str)

MAX_REWARD: Final = 1e18
"""Bound of a reward's size. Learners compute with float32, which ends at 3.4e38: it must bear the
square, which a critic's loss takes, else the advantage is infinite or silently 0."""

StopReason = Literal["answer", "turns", "tokens", "invalid"]
"""Why an episode ended: it answered, or ran out of turns or of tokens, or ended on an action that
could not be parsed with no turn left to correct it. Dropped episodes never become trajectories."""

Action = Literal["search", "answer", "invalid"]


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One completion and the observation that followed."""

    start: int
    """Index in `token_ids` of the turn's first generated token."""
    num_generated: int
    """Tokens the policy sampled; these are trained."""
    num_observed: int
    """Tokens appended after them (retrieved passages, corrections); never trained. 0 at the end."""
    action: Action


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """The record of one multi-turn episode."""

    trajectory_id: str
    token_ids: NDArray[np.int32]
    """[L] every token in order: prompt, then per turn its generated and its observed tokens."""
    turns: tuple[Turn, ...]
    """[K] in order; together with the prompt they cover `token_ids` without a gap."""
    logprobs: NDArray[np.float32]
    """[T] of each generated token under the engine and version that sampled it."""
    versions: NDArray[np.int32]
    """[T] policy version that sampled each generated token."""
    reward: float
    stop_reason: StopReason
    scores: dict[str, float]
    """Metrics by name, such as exact_match, num_searches, num_invalid, think_tokens."""
    duration_s: float
    """Wall time from the first request to the last observation."""
    turn_rewards: tuple[float, ...] | None = None
    """[K] what each turn earned; they sum to `reward`. None where only the whole was rewarded,
    which is then earned by the last turn."""

    @property
    def num_trained_tokens(self) -> int:
        """T, the number of generated tokens."""
        return len(self.logprobs)

    @property
    def oldest_version(self) -> PolicyVersion:
        """The oldest version among the trained tokens; staleness is measured from it."""
        return PolicyVersion(int(self.versions.min()))


class Group(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """The sibling trajectories of one question: the unit of replay."""

    group_id: GroupId
    question_id: str
    worker_id: str
    """The rollout worker that played it."""
    trajectories: tuple[Trajectory, ...]

    @property
    def oldest_version(self) -> PolicyVersion:
        """The oldest version among all trained tokens of the group."""
        return PolicyVersion(self.version_range[0])

    @property
    def version_range(self) -> tuple[int, int]:
        """The oldest and the newest version among all trained tokens of the group."""
        # Once for the group: numpy's calls cost more than its work here.
        versions = np.concatenate([t.versions for t in self.trajectories])
        return int(versions.min()), int(versions.max())

    @property
    def num_tokens(self) -> int:
        """All tokens of all trajectories; two of L = 100 and L = 60 make 160."""
        return sum(len(trajectory.token_ids) for trajectory in self.trajectories)


class Columns(NamedTuple):
    """What the generated tokens of a whole group carry, trajectory after trajectory.

    Made once where a group enters the buffer, which checks, dates and encodes it: a call of numpy
    costs more than the numbers of one trajectory.
    """

    logprobs_T: NDArray[np.float32]
    versions_T: NDArray[np.int32]
    oldest: int
    """Least and greatest of `versions_T`; 0 without a token."""
    newest: int


def columns_of(group: Group) -> Columns:
    """Two trajectories with versions [3, 3] and [4] -> [3, 3, 4], oldest 3, newest 4.

    Raises DataError, naming the trajectory, for an array that is not flat.
    """
    if not group.trajectories:
        return Columns(np.empty(0, np.float32), np.empty(0, np.int32), 0, 0)
    for trajectory in group.trajectories:
        if trajectory.logprobs.ndim != 1 or trajectory.versions.ndim != 1:
            raise _not_flat(group, trajectory)
    with np.errstate(over="ignore"):  # check_group says which one is too large for float32
        logprobs = np.concatenate([t.logprobs for t in group.trajectories], dtype=np.float32)
    versions = np.concatenate([t.versions for t in group.trajectories], dtype=np.int32)
    if not versions.size:
        return Columns(logprobs, versions, 0, 0)
    return Columns(logprobs, versions, int(versions.min()), int(versions.max()))


def _not_flat(group: Group, trajectory: Trajectory) -> Exception:
    from leeway.replay.errors import DataError

    shapes = f"{list(trajectory.logprobs.shape)} and {list(trajectory.versions.shape)}"
    return DataError(
        f"group {group.group_id}, trajectory {trajectory.trajectory_id}: logprobs and versions are "
        f"{shapes}; both must be [generated tokens]"
    )


def check_group(group: Group, columns: Columns | None = None) -> None:
    """Raise DataError unless lengths agree, turns cover the tokens, every number is finite, and no
    reward is larger than MAX_REWARD.

    Run where a group enters the buffer, so that a non-finite log-prob is caught with its
    trajectory still at hand. `columns` are those of the group, where the caller has them.
    """
    from leeway.replay.errors import DataError

    if not group.trajectories:
        raise DataError(f"group {group.group_id} holds no trajectory")
    are_sound = _are_numbers_sound(group.trajectories, columns or columns_of(group))
    for trajectory in group.trajectories:
        problem = _first_problem(trajectory, are_sound)
        if problem:
            raise DataError(
                f"group {group.group_id}, trajectory {trajectory.trajectory_id}: {problem}"
            )


def _are_numbers_sound(trajectories: tuple[Trajectory, ...], columns: Columns) -> bool:
    """Whether no trajectory has a bad log-prob, version or reward; False as well without a token.

    One look at all of them together.
    """
    return (
        columns.versions_T.size > 0
        and columns.oldest >= 0
        and bool(np.isfinite(columns.logprobs_T).all())
        and all(abs(trajectory.reward) <= MAX_REWARD for trajectory in trajectories)
    )


def _first_problem(trajectory: Trajectory, are_numbers_sound: bool) -> str | None:
    if not trajectory.turns:
        return "it has no turn"
    if problem := _first_gap(trajectory):
        return problem
    num_trained = sum([turn.num_generated for turn in trajectory.turns])
    if num_trained == 0:
        return "it has no generated token"
    for name, array in (("logprobs", trajectory.logprobs), ("versions", trajectory.versions)):
        if len(array) != num_trained:
            return f"{len(array)} {name} for {num_trained} generated tokens"
    return (None if are_numbers_sound else _first_bad_number(trajectory)) or _first_bad_turn_reward(
        trajectory
    )


def _first_gap(trajectory: Trajectory) -> str | None:
    position = trajectory.turns[0].start
    for k, turn in enumerate(trajectory.turns):
        if turn.num_generated < 0 or turn.num_observed < 0:
            return (
                f"turn {k} counts {turn.num_generated} generated and {turn.num_observed} observed "
                "tokens; neither may be negative"
            )
        if turn.start != position:
            return f"turn {k} starts at {turn.start}, the turn before it ends at {position}"
        position += turn.num_generated + turn.num_observed
    if position != len(trajectory.token_ids):
        return f"its turns end at {position} of {len(trajectory.token_ids)} tokens"
    return None


def _first_bad_number(trajectory: Trajectory) -> str | None:
    # As it is kept: float32 ends at 3.4e38.
    with np.errstate(over="ignore"):
        bad = np.flatnonzero(~np.isfinite(trajectory.logprobs.astype(np.float32)))
    if bad.size:
        turn = turn_of(trajectory, int(bad[0]))
        return f"turn {turn}: log-prob of generated token {bad[0]} is {trajectory.logprobs[bad[0]]}"
    if problem := _bad_reward(trajectory.reward):
        return problem
    if trajectory.versions.min() < 0:
        return f"a token carries policy version {trajectory.versions.min()}"
    return None


def _first_bad_turn_reward(trajectory: Trajectory) -> str | None:
    rewards = trajectory.turn_rewards
    if rewards is None:
        return None
    if len(rewards) != len(trajectory.turns):
        return f"{len(rewards)} turn rewards for {len(trajectory.turns)} turns"
    for k, reward in enumerate(rewards):
        if problem := _bad_reward(reward):
            return f"turn {k}: {problem}"
    if abs(sum(rewards) - trajectory.reward) > 1e-4:
        return f"its turn rewards sum to {sum(rewards):g}, its reward is {trajectory.reward:g}"
    return None


def _bad_reward(reward: float) -> str | None:
    if not math.isfinite(reward):
        return f"reward is {reward}"
    if abs(reward) > MAX_REWARD:
        return f"reward is {reward:g}, larger than the {MAX_REWARD:g} that training bears"
    return None


def turn_of(trajectory: Trajectory, token: int) -> int:
    """Index of the turn that holds generated token `token`; turns of 2 and 3: token 2 -> turn 1."""
    ends_K = np.cumsum([turn.num_generated for turn in trajectory.turns])
    return int(np.searchsorted(ends_K, token, side="right"))
