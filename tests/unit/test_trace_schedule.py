"""A recording played again on a made-up clock: who is trained when, worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.replay.config import ReplayConfig
from leeway.replay.schema import Group, GroupId, Trajectory, Turn
from leeway.services.experiments.trace_schedule import (
    Schedule,
    balanced_step_s,
    outcome,
    schedule,
)


def group(number: int, seconds: float, turns: int = 1, reward: float = 0.0) -> Group:
    """One trajectory of `turns` turns of ten generated tokens behind a prompt of ten."""
    trajectory = Trajectory(
        trajectory_id=f"{number}-0",
        token_ids=np.zeros(10 + 10 * turns, np.int32),
        turns=tuple(
            Turn(start=10 + 10 * k, num_generated=10, num_observed=0, action="search")
            for k in range(turns)
        ),
        logprobs=np.zeros(10 * turns, np.float32),
        versions=np.full(10 * turns, 7, np.int32),
        reward=reward,
        stop_reason="answer",
        scores={},
        duration_s=seconds,
    )
    return Group(
        group_id=GroupId(f"g{number}"), question_id="q", worker_id="w", trajectories=(trajectory,)
    )


def play(groups: list[Group], policy: str, **options: float) -> Schedule:
    at_once = int(options.pop("at_once", 2))
    step_s = options.pop("step_s", 1.0)
    max_steps = int(options.pop("max_steps", 100))
    config = ReplayConfig(**{"groups_per_step": 1, "max_staleness": 1, **options})  # type: ignore[arg-type]
    return schedule(
        groups,
        config,
        policy,  # type: ignore[arg-type]
        num_at_once=at_once,
        step_s=step_s,
        max_steps=max_steps,
    )


def ages(found: Schedule) -> list[int]:
    return [step.lease.version - step.lease.groups[0].oldest_version for step in found.steps]


def test_a_group_that_takes_three_steps_is_dropped_under_drop_and_trained_under_pace():
    # Two at once, a step takes half a second and one group. Group 0 takes 3 s, the others 1 s:
    # under drop the learner is at version 2 when group 0, of version 0, ends; only 1 is allowed.
    groups = [group(0, 3.0, turns=3), *(group(n, 1.0) for n in range(1, 5))]
    dropped = play(groups, "drop", step_s=0.5)
    assert dropped.dropped == [0]
    assert dropped.trained == [1, 2, 3, 4]
    paced = play(groups, "pace", step_s=0.5)
    assert paced.dropped == []
    assert sorted(paced.trained) == [0, 1, 2, 3, 4]
    assert max(ages(paced)) <= 1


def test_an_adaptive_lookahead_goes_with_pace_alone():
    groups = [group(number, 1.0) for number in range(6)]
    for policy in ("pace", "drop"):
        assert play(groups, policy, lookahead="adaptive").steps  # type: ignore[arg-type]


def test_pace_waits_for_the_long_group_rather_than_leave_it_behind():
    groups = [group(0, 3.0), *(group(n, 1.0) for n in range(1, 6))]
    # Two steps may pass with group 0 of version 0; the second must be its own, at 3 s.
    assert play(groups, "pace").trained[:2] == [1, 0]


def test_on_policy_trains_each_group_at_the_version_it_began():
    found = play([group(n, 1.0) for n in range(4)], "pace", max_staleness=0)
    assert ages(found) == [0, 0, 0, 0]
    # Each is played for 1 s and trained for 1 s, one behind the other.
    assert found.clock_s == 8.0


def test_exact_makes_every_group_exactly_as_old_behind_the_ramp():
    found = play([group(n, 1.0) for n in range(8)], "exact", max_staleness=2)
    assert ages(found)[:4] == [0, 1, 2, 2]


def test_steps_end_at_their_number_and_what_is_left_is_neither_trained_nor_dropped():
    found = play([group(n, 1.0) for n in range(10)], "pace", max_steps=3)
    assert (len(found.steps), found.dropped, found.num_left) == (3, [], 7)


def test_fewer_groups_than_a_step_are_left_over():
    found = play([group(n, 1.0) for n in range(7)], "pace", groups_per_step=3, at_once=3)
    assert (len(found.steps), found.num_left) == (2, 1)


def test_the_clock_makes_rollouts_and_learner_equally_fast():
    groups = [group(0, 1.0), group(1, 3.0)]
    # Mean 2 s, 8 at once: 4 groups a second; 4 groups a step.
    assert balanced_step_s(groups, 4, 8) == 1.0


def test_the_versions_are_those_of_the_clock_and_not_of_the_recording():
    found = play([group(n, 1.0) for n in range(3)], "pace")
    versions = {
        int(v) for s in found.steps for g in s.lease.groups for v in g.trajectories[0].versions
    }
    assert 7 not in versions and min(versions) == 0


def test_the_bias_is_the_share_that_was_trained_by_turns_and_by_length():
    groups = [group(0, 3.0, turns=3, reward=1.0), *(group(n, 1.0) for n in range(1, 5))]
    found = outcome(groups, play(groups, "drop", step_s=0.5))
    by_turns = {b.value: (b.num, b.kept, b.reward) for b in found.bias if b.by == "turns"}
    assert by_turns == {1: (4, 1.0, 0.0), 3: (1, 0.0, 1.0)}
    # One turn makes 20 tokens, three make 40: at most 32 and at most 64.
    by_tokens = {b.value: (b.num, b.kept) for b in found.bias if b.by == "tokens"}
    assert by_tokens == {32: (4, 1.0), 64: (1, 0.0)}
    assert (found.reward_trained, found.reward_dropped, found.turns_trained) == (0.0, 1.0, 1.0)
    assert (found.num_trained, found.num_dropped, found.num_left) == (4, 1, 0)


def test_a_recording_of_which_nothing_is_trained_has_no_means():
    found = outcome([group(0, 1.0)], play([group(0, 1.0)], "pace", groups_per_step=2))
    assert (found.num_steps, found.reward_trained, found.staleness_max) == (0, None, None)


@settings(deadline=None, max_examples=60)
@given(
    seconds=st.lists(st.floats(0.1, 20.0), min_size=1, max_size=30),
    policy=st.sampled_from(["pace", "drop", "exact"]),
    bound=st.integers(0, 4),
    step=st.integers(1, 4),
    at_once=st.integers(1, 8),
)
def test_nothing_is_trained_twice_lost_or_too_old(
    seconds: list[float], policy: str, bound: int, step: int, at_once: int
):
    groups = [group(n, s) for n, s in enumerate(seconds)]
    found = play(groups, policy, max_staleness=bound, groups_per_step=step, at_once=at_once)
    trained = found.trained
    assert len(trained) == len(set(trained))
    assert not set(trained) & set(found.dropped)
    assert len(trained) + len(found.dropped) + found.num_left == len(groups)
    assert all(0 <= age <= bound for age in ages(found))
    assert policy == "drop" or not found.dropped


@pytest.mark.parametrize("policy", ["pace", "drop"])
def test_the_same_recording_gives_the_same_schedule(policy: str):
    groups = [group(n, 1.0 + n % 3) for n in range(12)]
    first, second = play(groups, policy), play(groups, policy)
    assert first.trained == second.trained and first.clock_s == second.clock_s
