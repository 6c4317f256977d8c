"""Groups from outside: tickets that cannot be changed, and what is refused before the buffer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from leeway.actors.failures import EpisodeTimeout, FailureBudget, FailureBudgetExceeded
from leeway.replay.errors import DataError
from leeway.replay.schema import GroupId, PolicyVersion
from leeway.replay.store import Slot
from leeway.services.api.routes.submission import check_submitted, group_of
from leeway.services.api.submission_models import GroupSubmission, SlotReturn
from leeway.services.api.tickets import seal, unseal
from leeway.services.config import load

SLOT = Slot("a1b2", PolicyVersion(3), 1)
CONFIG = load(None, ["rollout.group_size=2"])


def trajectory(name: str, **changed: Any) -> dict[str, Any]:
    return {
        "trajectory_id": name,
        "token_ids": [5, 6, 7, 8, 9],
        "num_prompt": 2,
        "turns": [
            {"num_generated": 1, "num_observed": 1, "action": "search"},
            {"num_generated": 1, "num_observed": 0, "action": "answer"},
        ],
        "logprobs": [-0.5, -0.25],
        "versions": [3, 4],
        "reward": 1.0,
        "stop_reason": "answer",
        **changed,
    }


def sent(*trajectories: dict[str, Any], **more: Any) -> GroupSubmission:
    body = {"ticket": "t", "question_id": "q", "trajectories": list(trajectories), **more}
    return GroupSubmission.model_validate(json.loads(json.dumps(body)))


def test_a_ticket_gives_back_the_slot_it_was_made_from():
    assert unseal(seal(SLOT, b"secret"), b"secret") == SLOT


@pytest.mark.parametrize("ticket", ["", "x", "é", "QUJD" * 20, seal(SLOT, b"another run")])
def test_a_ticket_of_nobody_is_refused(ticket: str):
    with pytest.raises(DataError, match="not granted by this run"):
        unseal(ticket, b"secret")


def test_a_ticket_with_an_older_version_in_it_is_refused():
    older = seal(Slot("a1b2", PolicyVersion(1), 1), b"guess")
    with pytest.raises(DataError):
        unseal(older, b"secret")


def test_turns_begin_behind_the_prompt_and_each_other():
    group = group_of(sent(trajectory("t0"), trajectory("t1")), GroupId("a1b2"))
    assert [turn.start for turn in group.trajectories[0].turns] == [2, 4]
    check_submitted(group, CONFIG, learner_version=4)
    assert group.version_range == (3, 4)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"logprobs": [-0.5]}, "1 logprobs for 2 generated tokens"),
        ({"num_prompt": 1}, "its turns end at 4 of 5 tokens"),
        ({"versions": [3, 9]}, "a token of version 9; the learner is at 4"),
        ({"trajectory_id": "t1"}, "the same trajectory_id"),
        ({"token_ids": [5, 6, 7, 8, 2**31 - 1]}, "the tokenizer of this run has"),
        ({"turn_rewards": [0.5]}, "1 turn rewards for 2 turns"),
    ],
)
def test_what_could_not_be_trained_is_refused(changed: dict[str, Any], words: str):
    group = group_of(sent(trajectory("t0", **changed), trajectory("t1")), GroupId("a1b2"))
    with pytest.raises(DataError, match=words):
        check_submitted(group, CONFIG, learner_version=4)


def test_a_group_of_another_size_is_refused():
    group = group_of(sent(trajectory("t0")), GroupId("a1b2"))
    with pytest.raises(DataError, match="a group of this run has 2"):
        check_submitted(group, CONFIG, learner_version=4)


def test_a_trajectory_longer_than_the_run_allows_is_refused():
    long = trajectory("t0", token_ids=[5] * 2003, num_prompt=2000)
    group = group_of(sent(long, trajectory("t1")), GroupId("a1b2"))
    with pytest.raises(DataError, match="2003 tokens in a trajectory; at most 1024 fit"):
        check_submitted(group, CONFIG, learner_version=4)


@pytest.mark.parametrize(
    "changed",
    [
        {"logprobs": [float("nan"), 0.0]},
        {"logprobs": [float("-inf"), 0.0]},
        {"logprobs": [0.5, 0.0]},
        {"reward": float("inf")},
        {"reward": 1e300},
        {"versions": [-1, 0]},
        {"token_ids": [5, 6, 7, 8, 2**40]},
        {"turns": []},
        {"trajectory_id": "a/b"},
        {"trajectory_id": ".."},
        {"unknown": 1},
    ],
)
def test_a_number_that_would_break_a_step_is_no_number_of_the_schema(changed: dict[str, Any]):
    with pytest.raises(ValidationError):
        sent(trajectory("t0", **changed))


@pytest.mark.parametrize("reason", ["anything", "", "timeout"])
def test_a_slot_is_given_back_for_a_reason_of_a_small_set(reason: str):
    assert SlotReturn(ticket="t", reason="outside-failed").reason == "outside-failed"
    with pytest.raises(ValidationError):
        SlotReturn.model_validate({"ticket": "t", "reason": reason})


def test_another_schema_version_is_refused():
    with pytest.raises(ValidationError):
        sent(trajectory("t0"), schema_version=2)


def test_a_changed_share_of_failures_holds_from_the_next_one_on():
    budget = FailureBudget(1.0, window=4)
    budget.record_failure(EpisodeTimeout("late"))
    budget.allow(0.25)
    with pytest.raises(FailureBudgetExceeded):
        budget.record_failure(EpisodeTimeout("late"))
