"""Padded rows become packed tokens, and what cannot be packed is refused by name."""

from collections.abc import Sequence

import pytest
import torch

from leeway.learner.objective.loss import Tokens
from leeway.learner.objective.packing import check_tokens, pack
from leeway.learner.objective.ratio import Segments
from leeway.replay.errors import DataError

TURNS_BL = torch.tensor([[0, 0, -1, 1], [-1, 0, 1, 1]])


def test_rows_are_packed_and_adjacent_turns_stay_two() -> None:
    segments, index_T = pack(TURNS_BL, TURNS_BL >= 0)
    assert segments.turn_of_T.tolist() == [0, 0, 1, 2, 3, 3]
    assert segments.trajectory_of_T.tolist() == [0, 0, 0, 1, 1, 1]
    assert (segments.num_turns, segments.num_trajectories) == (4, 2)
    assert index_T.tolist() == [0, 1, 3, 5, 6, 7]


def test_a_row_without_trained_tokens_keeps_its_number() -> None:
    turns_BL = torch.tensor([[-1, -1], [-1, 0]])
    segments, _ = pack(turns_BL, turns_BL >= 0)
    assert (segments.trajectory_of_T.tolist(), segments.num_trajectories) == ([1], 2)


@pytest.mark.parametrize(
    ("turns", "trained", "sentence"),
    [
        ([[0, 1, 0]], [[1, 1, 1]], "trajectory 0, position 2: turn id 0 stands behind a later"),
        ([[0, 1], [0, 1]], [[1, 1], [1, 0]], "trajectory 1, position 1: turn id 1 marks an untr"),
        ([[0, -1]], [[1, 1]], "trajectory 0, position 1: turn id -1 is no turn"),
        ([[-1, -1]], [[0, 0]], "no trained token"),
        ([[0, 0, 0]], [[1, 1]], r"turn ids are \[1, 3\] and the mask \[1, 2\]"),
    ],
)
def test_turn_ids_that_make_no_sense_are_refused(
    turns: list[list[int]], trained: list[list[int]], sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        pack(torch.tensor(turns), torch.tensor(trained))


def tokens(
    turns: Sequence[int] = (0, 1, 2, 3),
    trajectories: Sequence[int] = (0, 0, 1, 1),
    **changes: torch.Tensor,
) -> Tokens:
    """Turns of [[1 token, 1 token], [1 token, 1 token]], of which there are 4 and 2."""
    segments = Segments(torch.tensor(turns), torch.tensor(trajectories), 4, 2)
    columns = {"old_T": torch.zeros(4), "a_T": torch.ones(4), "weight_T": torch.ones(4)}
    return Tokens(**(columns | changes), segments=segments)


def test_sound_tokens_pass() -> None:
    check_tokens(torch.zeros(4), tokens())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("old_T", "old log-prob"),
        ("a_T", "advantage"),
        ("weight_T", "weight"),
        ("correction_T", "correction"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_naming_trajectory_and_turn(
    name: str, said: str
) -> None:
    bad = tokens(**{name: torch.tensor([0.0, 0.0, 0.0, torch.nan])})
    with pytest.raises(DataError, match=f"trajectory 1, turn 1: {said} is nan"):
        check_tokens(torch.zeros(4), bad)


def test_lengths_that_disagree_are_refused_naming_where_the_shortest_ends() -> None:
    with pytest.raises(
        DataError, match=r"disagree behind trajectory 0, turn 1: log-prob 2, old log-prob 4"
    ):
        check_tokens(torch.zeros(2), tokens())
    with pytest.raises(
        DataError, match=r"disagree behind trajectory 1, turn 0: .* trajectory 4, correction 3"
    ):
        check_tokens(torch.zeros(4), tokens(correction_T=torch.ones(3)))
    with pytest.raises(DataError, match=r"lengths disagree: log-prob 0, old"):
        check_tokens(torch.zeros(0), tokens())


@pytest.mark.parametrize(
    ("turns", "trajectories", "sentence"),
    [
        ([0, 1, 3, 2], [0, 0, 1, 1], "token 3: turn 2 stands behind turn 3; their numbers"),
        ([0, 1, 2, 3], [1, 1, 0, 0], "token 2: trajectory 0 stands behind trajectory 1; their"),
        ([0, 1, 2, 4], [0, 0, 1, 1], "token 3: turn 4 is none of the 4 that are counted from 0"),
        ([-1, 1, 2, 3], [0, 0, 1, 1], "token 0: turn -1 is none of the 4"),
        ([0, 1, 2, 3], [0, 0, 1, 2], "token 3: trajectory 2 is none of the 2"),
        ([0, 1, 1, 2], [0, 0, 1, 1], "turn 1 has tokens of trajectories 0 and 1; turns are"),
    ],
)
def test_segments_out_of_order_or_beyond_their_number_are_refused(
    turns: list[int], trajectories: list[int], sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        check_tokens(torch.zeros(4), tokens(turns, trajectories))


def test_lengths_are_compared_before_the_order() -> None:
    with pytest.raises(DataError, match="lengths disagree behind trajectory 1, turn 0"):
        check_tokens(torch.zeros(4), tokens([3, 2, 1], [0, 0, 1, 1]))
