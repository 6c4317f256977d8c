"""Packing groups, refusing what cannot be trained, and splitting a batch."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leeway.learner.batch import build_batch, check_ids, collate, split
from leeway.learner.metrics import data_metrics, staleness
from leeway.learner.objective.presets import PRESETS
from leeway.learner.update import build_update
from leeway.replay.errors import DataError
from leeway.replay.schema import Group, GroupId, Trajectory, Turn


def trajectory(
    name: str = "t",
    sizes: tuple[tuple[int, int], ...] = ((2, 3), (1, 0)),
    prompt: int = 4,
    reward: float = 1.0,
    version: int = 0,
) -> Trajectory:
    """Turns of (generated, observed) tokens behind a prompt; ids count up from 1."""
    turns, position = [], prompt
    for generated, observed in sizes:
        turns.append(Turn(position, generated, observed, "search" if observed else "answer"))
        position += generated + observed
    num_trained = sum(generated for generated, _ in sizes)
    return Trajectory(
        trajectory_id=name,
        token_ids=np.arange(1, position + 1, dtype=np.int32),
        turns=tuple(turns),
        logprobs=np.full(num_trained, -1.0, np.float32),
        versions=np.full(num_trained, version, np.int32),
        reward=reward,
        stop_reason="answer",
        scores={"exact_match": reward},
        duration_s=1.0,
    )


def group(*trajectories: Trajectory, name: str = "g") -> Group:
    return Group(group_id=GroupId(name), question_id="q", worker_id="w", trajectories=trajectories)


def test_tokens_are_flat_and_turns_come_from_the_rollout() -> None:
    # The second trajectory's turns are adjacent: no mask could tell them apart.
    batch = build_batch([group(trajectory("a"), trajectory("b", ((1, 0), (2, 0)), reward=0.0))])
    assert batch.segments.turn_of_T.tolist() == [0, 0, 1, 2, 3, 3]
    assert batch.segments.trajectory_of_T.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.position_T.tolist() == [4, 5, 9, 4, 5, 6]
    tokens = build_update(batch, PRESETS["so-grpo"], version=0).tokens
    assert tokens.a_T.tolist() == pytest.approx([0.70711] * 3 + [-0.70711] * 3, abs=1e-4)
    assert tokens.weight_T.tolist() == pytest.approx([1 / 6] * 6)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        build_batch([])


def test_a_log_prob_that_is_not_finite_is_refused_naming_trajectory_and_turn() -> None:
    bad = trajectory("a")
    bad.logprobs[2] = np.nan
    with pytest.raises(DataError, match=r"group g, trajectory a: turn 1: log-prob of .* 2 is nan"):
        build_batch([group(bad)])


def test_a_log_prob_beyond_float32_is_refused_as_one_that_is_not_finite() -> None:
    bad = msgspec.structs.replace(trajectory("a"), logprobs=np.array([-1.0, -1.0, -1e39]))
    with pytest.raises(DataError, match="trajectory a: turn 1: log-prob of generated token 2 is"):
        build_batch([group(bad)])


def test_columns_that_are_not_flat_are_refused_naming_the_trajectory() -> None:
    bad = msgspec.structs.replace(trajectory("a"), logprobs=np.full((3, 1), -1.0, np.float32))
    with pytest.raises(DataError, match=r"group g, trajectory a: .* are \[3, 1\] and \[3\]; both"):
        build_batch([group(trajectory("b"), bad)])


@pytest.mark.parametrize(
    ("position", "token", "sentence"),
    [
        (0, 11, "trajectory a, prompt: token 11 at position 0 is none of the model's 11"),
        (4, -1, "trajectory a, turn 0: token -1 at position 4"),
        (8, 50_000, "trajectory a, turn 0: token 50000 at position 8"),
        (9, 11, "trajectory a, turn 1: token 11 at position 9"),
    ],
)
def test_a_token_that_the_model_does_not_know_is_refused_naming_trajectory_and_turn(
    position: int, token: int, sentence: str
) -> None:
    bad = trajectory("a")
    check_ids(build_batch([group(bad)]), vocabulary=11)
    bad.token_ids[position] = token
    with pytest.raises(DataError, match=sentence):
        check_ids(build_batch([group(trajectory("b"), bad)]), vocabulary=11)


def test_a_reward_that_is_not_finite_is_refused_naming_the_trajectory() -> None:
    with pytest.raises(DataError, match="trajectory a: reward is inf"):
        build_batch([group(trajectory("a", reward=float("inf")))])


@pytest.mark.parametrize("reward", [1e19, -1e39, 1e200])
def test_a_reward_that_float32_does_not_bear_is_refused_naming_trajectory_and_turn(
    reward: float,
) -> None:
    with pytest.raises(DataError, match=r"trajectory a: reward is .* larger than the 1e\+18"):
        build_batch([group(trajectory("a", reward=reward), trajectory("b"))])
    of_turns = msgspec.structs.replace(trajectory("a"), turn_rewards=(1.0 - reward, reward))
    with pytest.raises(DataError, match=r"trajectory a: turn 0: reward is .* larger than"):
        build_batch([group(of_turns)])


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        # The first stands at 4 to 6 and has observed 6 to 9; 10 tokens in all.
        (Turn(10, 1, 0, "answer"), "turn 1 starts at 10, the turn before it ends at 9"),
        (Turn(8, 1, 1, "answer"), "turn 1 starts at 8, the turn before it ends at 9"),
        (Turn(2, 1, 0, "answer"), "turn 1 starts at 2, the turn before it ends at 9"),
        (Turn(9, 1, 4, "answer"), "its turns end at 14 of 10 tokens"),
        (Turn(9, -1, 2, "answer"), "turn 1 counts -1 generated and 2 observed tokens; neither"),
        (Turn(9, 1, -3, "answer"), "turn 1 counts 1 generated and -3 observed tokens; neither"),
    ],
    ids=["gap", "overlap", "backwards", "beyond the end", "generated", "observed"],
)
def test_turns_that_do_not_cover_the_tokens_in_order_are_refused(
    second: Turn, sentence: str
) -> None:
    good = trajectory("a")
    bad = msgspec.structs.replace(good, turns=(good.turns[0], second))
    with pytest.raises(DataError, match=f"group g, trajectory a: {sentence}"):
        build_batch([group(bad)])


def test_a_turn_without_a_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="turn 0: no prompt"):
        build_batch([group(trajectory("a", prompt=0))])


def test_groups_of_equal_rewards_are_counted() -> None:
    groups = [
        group(trajectory(), trajectory(), name="equal"),
        group(trajectory(), trajectory(reward=0.0), name="mixed"),
    ]
    assert build_batch(groups).num_zero_variance_groups == 1


def test_staleness_is_learner_version_minus_oldest_trained_version() -> None:
    first, second = trajectory("a", version=9), trajectory("b", version=9)
    first.versions[1] = 8
    batch = build_batch([group(first, second)])
    assert staleness(batch, 10).tolist() == [2, 1]
    metrics = data_metrics(batch, 10)
    assert (metrics.staleness_mean, metrics.staleness_max) == (1.5, 2)
    assert metrics.staleness_histogram == {1: 1, 2: 1}


def lengths(*wanted: int) -> Group:
    """One trajectory per number, of which a forward pass reads that many tokens."""
    return group(*(trajectory(f"t{n}", ((1, 0),), prompt=n) for n in wanted))


def test_split_makes_few_equal_micro_batches_and_keeps_the_budget() -> None:
    batch = build_batch([lengths(4, 9, 5, 8)])
    assert split(batch.lengths(), 13) == [[[1, 0], [3, 2]]]
    assert split(batch.lengths(), 13, num_ranks=2) == [[[1, 0]], [[3, 2]]]
    # 26 tokens would fit twice 13, but not the 12 that are allowed.
    assert split(batch.lengths(), 12) == [[[1], [2, 0], [3]]]
    assert split(batch.lengths(), 26) == [[[1, 3, 2, 0]]]


def test_every_rank_has_the_same_number_of_micro_batches() -> None:
    batch = build_batch([lengths(9, 9, 9)])
    assert split(batch.lengths(), 9, num_ranks=2) == [[[0], []], [[1], [2]]]


def test_a_trajectory_longer_than_the_budget_stands_alone() -> None:
    batch = build_batch([lengths(30, 4, 5)])
    assert split(batch.lengths(), 10) == [[[0], [2, 1]]]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 60), st.integers(1, 4))
def test_a_split_holds_each_trajectory_once_within_the_budget_on_equal_ranks(
    sizes: list[int], budget: int, num_ranks: int
) -> None:
    plan = split(dict(enumerate(sizes)), budget, num_ranks)
    assert sorted(b for rank in plan for rows in rank for b in rows) == list(range(len(sizes)))
    assert len(plan) == num_ranks and len({len(rank) for rank in plan}) == 1
    loads = [[sum(sizes[b] for b in rows) for rows in rank] for rank in plan]
    pairs = [(load, rows) for r, p in zip(loads, plan, strict=True) for load, rows in zip(r, p)]  # noqa: B905
    assert all(load <= budget or len(rows) == 1 for load, rows in pairs)
    # No micro-batch could take the smallest of another and be the smaller one still.
    assert max(load - min((sizes[b] for b in rows), default=0) for load, rows in pairs) <= min(
        load for load, _ in pairs
    )


def test_a_micro_batch_reads_nothing_behind_its_last_trained_token() -> None:
    # 4 prompt, 2 generated, 3 observed, 1 generated, 7 observed: 9 tokens predict the last one.
    batch = build_batch([group(trajectory("a", ((2, 3), (1, 7))))])
    micro_batch = collate(batch, [0])
    assert micro_batch.id_P.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert micro_batch.predictor_S.tolist() == [3, 4, 8]
    assert micro_batch.target_S.tolist() == [5, 6, 10]


def test_trajectories_stand_one_behind_the_other_without_padding() -> None:
    batch = build_batch([group(trajectory("a"), trajectory("b", ((1, 0),), prompt=2))])
    micro_batch = collate(batch, [1, 0])
    assert micro_batch.id_P.tolist() == [1, 2, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert micro_batch.position_P.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert micro_batch.starts_R1.tolist() == [0, 2, 11]
    assert micro_batch.predictor_S.tolist() == [1, 5, 6, 10]
    assert micro_batch.target_S.tolist() == [3, 5, 6, 10]
    assert micro_batch.token_S.tolist() == [3, 0, 1, 2]
    assert (micro_batch.longest, micro_batch.sizes) == (9, (1, 3))


def test_a_micro_batch_of_wanted_tokens_is_cut_behind_the_last_one() -> None:
    batch = build_batch([group(trajectory("a"), trajectory("b"))])
    wanted_T = np.array([False, True, False, True, False, False])
    micro_batch = collate(batch, [0, 1], wanted_T)
    assert micro_batch.id_P.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4]
    assert micro_batch.token_S.tolist() == [1, 3]
    assert micro_batch.predictor_S.tolist() == [4, 8]


def test_a_micro_batch_travels_in_one_piece_and_arrives_as_it_was() -> None:
    batch = build_batch([group(trajectory("a"), trajectory("b"))])
    micro_batch = collate(batch, [0, 1])
    arrived = micro_batch.to(torch.device("meta"))
    assert arrived.starts_R1.dtype == torch.int32
    for name in ("id_P", "position_P", "starts_R1", "predictor_S", "target_S", "token_S"):
        assert getattr(arrived, name).shape == getattr(micro_batch, name).shape
