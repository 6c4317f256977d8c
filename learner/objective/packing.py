"""From padded rows to packed tokens, with every check that a packed batch must pass.

For data that does not come from the rollout: a trainer of one's own, tests, benches. Letters: `B`
trajectories, `L` padded positions, `T` trained tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leeway.learner.objective.loss import Tokens
from leeway.learner.objective.ratio import Segments
from leeway.replay.errors import DataError


def pack(turn_of_BL: Tensor, is_trained_BL: Tensor) -> tuple[Segments, Tensor]:
    """Segments, and index [T] of each trained token in a flattened [B, L] tensor.

    `turn_of_BL` holds each trained token's turn, counted within its row and never falling, and -1
    everywhere else. Turns keep their ids' order; a trajectory without trained tokens keeps its
    number. Raises DataError naming trajectory and turn.

    turns [[0, 0, -1, 1], [-1, 0, 1, 1]], all but -1 trained: turn_of_T [0, 0, 1, 2, 3, 3],
    trajectory_of_T [0, 0, 0, 1, 1, 1], index [0, 1, 3, 5, 6, 7].
    """
    if turn_of_BL.shape != is_trained_BL.shape or turn_of_BL.dim() != 2:
        raise DataError(
            f"turn ids are {list(turn_of_BL.shape)} and the mask {list(is_trained_BL.shape)}; "
            "both must be [trajectories, positions]"
        )
    is_trained_BL = is_trained_BL.bool()
    _refuse(turn_of_BL, (turn_of_BL >= 0) & ~is_trained_BL, "marks an untrained token")
    _refuse(turn_of_BL, (turn_of_BL < 0) & is_trained_BL, "is no turn of a trained token")
    if not is_trained_BL.any():
        raise DataError("the batch holds no trained token; nothing can be learned from it")
    # The highest id so far, so that untrained positions between turns do not count as a fall.
    highest_BL = turn_of_BL.cummax(dim=1).values
    _refuse(turn_of_BL, is_trained_BL & (turn_of_BL < highest_BL), "stands behind a later turn")
    index_T = is_trained_BL.flatten().nonzero().squeeze(-1)
    trajectory_of_T = index_T // turn_of_BL.shape[1]
    key_T = torch.stack([trajectory_of_T, turn_of_BL.flatten()[index_T]])
    turns, turn_of_T = key_T.unique(dim=1, return_inverse=True)
    return Segments(turn_of_T, trajectory_of_T, turns.shape[1], len(turn_of_BL)), index_T


def _refuse(turn_of_BL: Tensor, is_bad_BL: Tensor, what: str) -> None:
    bad = is_bad_BL.nonzero()
    if len(bad):
        b, position = bad[0].tolist()
        raise DataError(
            f"trajectory {b}, position {position}: turn id {int(turn_of_BL[b, position])} {what}"
        )


def check_tokens(lp_T: Tensor, tokens: Tokens) -> None:
    """Raise DataError unless lengths agree, turns and trajectories stand in order and within their
    number, and all is finite; it names trajectory and turn where there is one."""
    segments = tokens.segments
    columns = {
        "log-prob": lp_T,
        "old log-prob": tokens.old_T,
        "advantage": tokens.a_T,
        "weight": tokens.weight_T,
        "turn": segments.turn_of_T,
        "trajectory": segments.trajectory_of_T,
    }
    if tokens.correction_T is not None:
        columns["correction"] = tokens.correction_T
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} {length}" for name, length in lengths.items())
        known = min(lengths.values()) - 1
        end = f" behind {_place(segments, known)}" if known >= 0 else ""
        raise DataError(f"lengths disagree{end}: {said}")
    if len(lp_T) == 0:
        raise DataError("the batch holds no trained token; nothing can be learned from it")
    _check_order(segments)
    for name, column in columns.items():
        bad = (~torch.isfinite(column)).nonzero()
        if len(bad):
            t = int(bad[0])
            raise DataError(f"{_place(segments, t)}: {name} is {column[t].item()}")


def _check_order(segments: Segments) -> None:
    """Advantages and turn means are of neighbours, so a segment must not go on behind another."""
    turn_of_T, trajectory_of_T = segments.turn_of_T, segments.trajectory_of_T
    for name, of_T, number in (
        ("trajectory", trajectory_of_T, segments.num_trajectories),
        ("turn", turn_of_T, segments.num_turns),
    ):
        for t in ((of_T < 0) | (of_T >= number)).nonzero()[:1, 0].tolist():
            raise DataError(
                f"token {t}: {name} {int(of_T[t])} is none of the {number} that are counted from 0"
            )
        for t in (of_T[1:] < of_T[:-1]).nonzero()[:1, 0].tolist():
            raise DataError(
                f"token {t + 1}: {name} {int(of_T[t + 1])} stands behind {name} {int(of_T[t])}; "
                "their numbers must not fall"
            )
    is_shared_T = (turn_of_T[1:] == turn_of_T[:-1]) & (trajectory_of_T[1:] != trajectory_of_T[:-1])
    for t in is_shared_T.nonzero()[:1, 0].tolist():
        raise DataError(
            f"turn {int(turn_of_T[t])} has tokens of trajectories {int(trajectory_of_T[t])} and "
            f"{int(trajectory_of_T[t + 1])}; turns are numbered over the whole batch"
        )


def _place(segments: Segments, t: int) -> str:
    """Trajectory and turn of a token; turns count from 0 within their trajectory."""
    trajectory = segments.trajectory_of_T[t]
    # Up to this token: behind it the two may differ in length.
    first = segments.turn_of_T[: t + 1][segments.trajectory_of_T[: t + 1] == trajectory].min()
    return f"trajectory {int(trajectory)}, turn {int(segments.turn_of_T[t] - first)}"
