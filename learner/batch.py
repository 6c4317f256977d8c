"""A batch of groups as flat arrays over trained tokens, and its split into minibatches,
micro-batches and ranks.

Letters: `T` trained tokens of the whole batch, `K` turns, `B` trajectories, `L` tokens of one
trajectory. Every rank holds the whole batch: denominators, advantages and metrics are those of the
batch, and only the forward and backward passes are divided.

Turn ids come from the rollout's turns, never from a mask: two adjacent turns with no observation
between them stay two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leeway.learner.objective.advantage import has_equal_rewards
from leeway.learner.objective.ratio import Segments
from leeway.replay.errors import DataError
from leeway.replay.schema import Group, Trajectory, check_group, turn_of


@dataclass(frozen=True)
class PackedBatch:
    """Groups, packed. Built by `build_batch`; tensors are on the CPU."""

    groups: tuple[Group, ...]
    """Where the numbers came from."""
    trajectories: tuple[Trajectory, ...]
    """[B] in the order of the groups."""
    segments: Segments
    """Turn and trajectory of each trained token."""
    behaviour_T: Tensor
    """[T] log-prob under the engine and version that sampled the token."""
    position_T: Tensor
    """[T] int64 index of each trained token in its trajectory's `token_ids`."""
    version_T: Tensor
    """[T] int64 policy version that sampled each trained token."""
    offset_B1: NDArray[np.int64]
    """[B + 1] trained tokens of trajectory i are offset[i] up to offset[i + 1]."""
    reward_B: Tensor
    """[B] float64."""
    group_of_B: Tensor
    """[B] int64, group of each trajectory."""
    turn_reward_K: Tensor
    """[K] float64, what each turn earned; the whole reward in the last one where a trajectory names
    none. 0 for turns without trained tokens."""
    has_turn_rewards: bool
    """Whether every trajectory names its turns' rewards."""
    turn_index_K: Tensor
    """[K] int64, place of each turn in its trajectory, from 0."""
    trajectory_of_K: Tensor
    """[K] int64."""
    num_zero_variance_groups: int
    """Groups whose rewards are all equal."""

    @property
    def num_tokens(self) -> int:
        """T, the trained tokens."""
        return int(self.offset_B1[-1])

    def spans(self, trajectories: Sequence[int]) -> list[NDArray[np.int64]]:
        """Indices of the trained tokens of some trajectories, one array each."""
        return [np.arange(self.offset_B1[b], self.offset_B1[b + 1]) for b in trajectories]

    def lengths(self, trajectories: Iterable[int] | None = None) -> dict[int, int]:
        """Tokens that a forward pass of each trajectory must read: all before its last trained
        token."""
        chosen = range(len(self.trajectories)) if trajectories is None else trajectories
        return {b: int(self.position_T[self.offset_B1[b + 1] - 1]) for b in chosen}


@dataclass(frozen=True)
class MicroBatch:
    """Some whole trajectories in one row, one behind the other. `P` tokens, `R` trajectories, `S`
    trained tokens."""

    id_P: Tensor
    """[P] int64 token ids."""
    position_P: Tensor
    """[P] int64 place of each in its trajectory, from 0."""
    starts_R1: Tensor
    """[R + 1] int32: trajectory r stands at starts[r] up to starts[r + 1]."""
    predictor_S: Tensor
    """[S] int64 index into P of the token that predicts each trained one."""
    target_S: Tensor
    """[S] int64 id of each trained token."""
    token_S: Tensor
    """[S] int64 index of each trained token in the batch."""
    longest: int
    """Tokens of the longest trajectory."""
    sizes: tuple[int, ...]
    """[R] trained tokens of each; they sum to S."""

    @property
    def num_tokens(self) -> int:
        """P."""
        return len(self.id_P)

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device, sent in one piece."""
        if device == self.id_P.device:
            return self
        parts = [self.id_P, self.position_P, self.predictor_S, self.target_S, self.token_S]
        whole = torch.cat([*parts, self.starts_R1.long()])
        if device.type == "cuda":
            whole = whole.pin_memory()
        sent = whole.to(device, non_blocking=True)
        sizes = [*map(len, parts), len(self.starts_R1)]
        ids, positions, predictors, targets, tokens, starts = sent.split(sizes)
        return MicroBatch(
            ids, positions, starts.int(), predictors, targets, tokens, self.longest, self.sizes
        )


def build_batch(groups: Sequence[Group]) -> PackedBatch:
    """Pack groups for one step.

    Raises DataError naming group, trajectory and turn for a number that is not finite or lengths
    that disagree, and for a batch without trajectories.
    """
    if not groups:
        raise DataError("the batch is empty; draw at least one group")
    for group in groups:
        _check(group)
    trajectories = tuple(t for group in groups for t in group.trajectories)
    group_of_B = torch.tensor([g for g, group in enumerate(groups) for _ in group.trajectories])
    reward_B = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    equal_G = has_equal_rewards(reward_B, group_of_B, len(groups))
    sizes = [t.num_trained_tokens for t in trajectories]
    num_turns = [len(t.turns) for t in trajectories]
    return PackedBatch(
        groups=tuple(groups),
        trajectories=trajectories,
        segments=_segments(trajectories),
        behaviour_T=_concatenate([t.logprobs for t in trajectories], np.float32),
        position_T=_concatenate([_positions(t) for t in trajectories], np.int64),
        version_T=_concatenate([t.versions for t in trajectories], np.int64),
        offset_B1=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        reward_B=reward_B,
        group_of_B=group_of_B,
        turn_reward_K=torch.tensor(
            [r for t in trajectories for r in _turn_rewards(t)], dtype=torch.float64
        ),
        has_turn_rewards=all(t.turn_rewards is not None for t in trajectories),
        turn_index_K=torch.tensor([k for n in num_turns for k in range(n)]),
        trajectory_of_K=torch.repeat_interleave(torch.tensor(num_turns)),
        num_zero_variance_groups=int(equal_G.sum()),
    )


def check_ids(batch: PackedBatch, vocabulary: int) -> None:
    """Raise DataError, naming trajectory and turn, unless each token is one of the model's: a GPU
    that looks up another one ends its whole process.

    `vocabulary` is the number of the model's tokens.
    """
    for trajectory in batch.trajectories:
        ids = trajectory.token_ids
        if ids.min() >= 0 and ids.max() < vocabulary:
            continue
        position = int(np.flatnonzero((ids < 0) | (ids >= vocabulary))[0])
        begun = sum(turn.start <= position for turn in trajectory.turns)
        where = f"turn {begun - 1}" if begun else "prompt"
        raise DataError(
            f"trajectory {trajectory.trajectory_id}, {where}: token {ids[position]} at position "
            f"{position} is none of the model's {vocabulary}; were these groups sampled from "
            "another model?"
        )


def turn_and_trajectory(batch: PackedBatch, token: int) -> str:
    """Where trained token `token` of the batch stands, in words for an error message."""
    b = int(batch.segments.trajectory_of_T[token])
    trajectory = batch.trajectories[b]
    turn = turn_of(trajectory, token - int(batch.offset_B1[b]))
    return f"trajectory {trajectory.trajectory_id}, turn {turn}"


def _check(group: Group) -> None:
    for trajectory in group.trajectories:
        where = f"group {group.group_id}, trajectory {trajectory.trajectory_id}"
        if trajectory.turns and trajectory.turns[0].start < 1:
            raise DataError(f"{where}, turn 0: no prompt token stands before it to predict from")
    check_group(group)


def _turn_rewards(trajectory: Trajectory) -> Sequence[float]:
    """Turns of 2, 1 and 0 tokens: reward 1 for the whole is [0, 1, 0].

    What a turn without trained tokens earned, no token could be credited with: it goes to the turn
    before it. Named rewards [0.5, 0, 0.25] are [0.5, 0.25, 0].
    """
    named = trajectory.turn_rewards
    if named is None:
        named = [0.0] * (len(trajectory.turns) - 1) + [trajectory.reward]
    rewards = [0.0] * len(named)
    trained = [k for k, turn in enumerate(trajectory.turns) if turn.num_generated]
    for k, reward in enumerate(named):
        rewards[max((t for t in trained if t <= k), default=trained[0])] += reward
    return rewards


def _positions(trajectory: Trajectory) -> NDArray[np.int64]:
    return np.concatenate(
        [np.arange(turn.start, turn.start + turn.num_generated) for turn in trajectory.turns]
    )


def _segments(trajectories: Sequence[Trajectory]) -> Segments:
    turn_sizes_K = np.array([turn.num_generated for t in trajectories for turn in t.turns])
    sizes_B = np.array([t.num_trained_tokens for t in trajectories])
    return Segments(
        torch.from_numpy(np.repeat(np.arange(len(turn_sizes_K)), turn_sizes_K)),
        torch.from_numpy(np.repeat(np.arange(len(sizes_B)), sizes_B)),
        len(turn_sizes_K),
        len(sizes_B),
    )


def _concatenate(arrays: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype))


def split(
    lengths: Mapping[int, int], micro_batch_tokens: int, num_ranks: int = 1
) -> list[list[list[int]]]:
    """Trajectory numbers by rank and micro-batch: `split(...)[rank][i]` are those of one pass.

    As few micro-batches as hold at most `micro_batch_tokens` tokens each (a longer trajectory
    stands alone), equally many on every rank, and as equal as they get: longest first, each goes to
    the micro-batch with the fewest tokens so far. Those that ranks run at the same time are
    neighbours in size. Some are empty where trajectories are few.

    `lengths` are the tokens to read of each trajectory.

    lengths {0: 4, 1: 9, 2: 5, 3: 8}, 13 tokens -> [[[1, 0], [3, 2]]]; on 2 ranks
    rank 0: [[1, 0]], rank 1: [[3, 2]]
    """
    order = sorted(lengths, key=lambda b: (-lengths[b], b))
    num_tokens = sum(min(length, micro_batch_tokens) for length in lengths.values())
    count = max(1, -(-num_tokens // (micro_batch_tokens * num_ranks)))
    while True:
        parts = _spread(order, lengths, count * num_ranks)
        if all(len(p) == 1 or sum(lengths[b] for b in p) <= micro_batch_tokens for p in parts if p):
            break
        count += 1
    parts.sort(key=lambda part: -sum(lengths[b] for b in part))
    # Back and forth, so that the first rank does not get the largest of every round.
    rounds = [parts[i : i + num_ranks] for i in range(0, len(parts), num_ranks)]
    return [
        [round_[rank if i % 2 == 0 else num_ranks - 1 - rank] for i, round_ in enumerate(rounds)]
        for rank in range(num_ranks)
    ]


def _spread(order: Sequence[int], lengths: Mapping[int, int], count: int) -> list[list[int]]:
    """`count` parts; each trajectory in turn goes to the one with the fewest tokens."""
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, part) for part in range(count)]
    for b in order:
        load, part = heappop(loads)
        parts[part].append(b)
        heappush(loads, (load + lengths[b], part))
    return parts


def collate(
    batch: PackedBatch, rows: Sequence[int], wanted_T: NDArray[np.bool_] | None = None
) -> MicroBatch:
    """The micro-batch of some trajectories.

    `wanted_T` keeps only those of their trained tokens; what stands behind the last one is not
    read.
    """
    spans = batch.spans(rows)
    if wanted_T is not None:
        spans = [span[wanted_T[span]] for span in spans]
    position_T = batch.position_T.numpy()
    positions = [position_T[span] for span in spans]
    lengths = [int(of_row[-1]) for of_row in positions]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = [batch.trajectories[b].token_ids for b in rows]
    return MicroBatch(
        _concatenate([i[:length] for i, length in zip(ids, lengths, strict=True)], np.int64),
        _concatenate([np.arange(length) for length in lengths], np.int64),
        torch.from_numpy(starts.astype(np.int32)),
        _concatenate([s + p - 1 for s, p in zip(starts, positions, strict=False)], np.int64),
        _concatenate([i[p] for i, p in zip(ids, positions, strict=True)], np.int64),
        _concatenate(spans, np.int64),
        max(lengths),
        tuple(len(span) for span in spans),
    )


def nothing() -> MicroBatch:
    """A micro-batch without trained tokens, whose gradient is 0: one token, because a network
    cannot read none."""
    none = torch.zeros(0, dtype=torch.int64)
    one = torch.zeros(1, dtype=torch.int64)
    starts_R1 = torch.tensor([0, 1], dtype=torch.int32)
    return MicroBatch(one, one, starts_R1, none, none, none, 1, (0,))
