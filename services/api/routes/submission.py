"""Trajectories from outside: an agent asks for slots, plays, and hands its groups over.

They pass the same admission, window and checks as those of the run's own workers, and some more:
their sender may be mistaken about the tokenizer, and nothing that it sends may end the run.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Annotated, Final

import numpy as np
from fastapi import APIRouter, HTTPException

from leeway.actors.config import model_dir
from leeway.actors.tokens import Tokens
from leeway.replay.bounds import check_fills
from leeway.replay.errors import DataError, WaitTimeout
from leeway.replay.schema import SCHEMA_VERSION, Group, GroupId, Trajectory, Turn, check_group
from leeway.replay.store import Slot
from leeway.services.api.examples import example, sent
from leeway.services.api.problems import documented, validating
from leeway.services.api.reader import answer_deadline
from leeway.services.api.served import Served
from leeway.services.api.submission_models import (
    GroupAnswer,
    GroupSubmission,
    SentTrajectory,
    SlotItem,
    SlotRequest,
    SlotReturn,
    SlotReturned,
    Slots,
)
from leeway.services.api.tickets import seal, unseal
from leeway.services.config import RunConfig

SHORTEST_WAIT_S: Final = 0.05
"""An admission is tried once at least."""


def submission_router(served: Served) -> APIRouter:
    """`/v1/slots` and `/v1/groups`."""
    router = APIRouter(prefix="/v1", tags=["submission"])

    @router.post("/slots", responses={**example("slots"), **documented(409)})
    async def slots(body: Annotated[SlotRequest, sent("slots")]) -> Slots:
        """Ask for slots. Each is permission for one group; it ends when it expires. 409 says which
        bound holds admission back.
        """
        look = await served.reader.look()
        if look.phase != "training":
            raise HTTPException(409, f"the run is in phase {look.phase}; groups enter in training")
        wait_s = max(SHORTEST_WAIT_S, body.wait_s)
        try:
            async with answer_deadline(wait_s):
                granted = await served.replay.admit(body.num, served.oldest_version, wait_s)
        except WaitTimeout as refusal:
            raise HTTPException(409, str(refusal), {"Retry-After": "1"}) from None
        timeout_s = served.config.replay.slot_timeout_s
        return Slots(
            items=[
                SlotItem(
                    slot_id=slot.slot_id,
                    version=slot.version,
                    ticket=seal(slot, served.secret),
                    expires_in_s=timeout_s,
                )
                for slot in granted
            ],
            schema_version=SCHEMA_VERSION,
            learner_version=look.stats.learner_version,
            group_size=served.config.rollout.group_size,
            max_trajectory_tokens=max_tokens_of(served.config),
        )

    @router.post("/slots/return", responses={**example("returned"), **documented(409)})
    async def give_back(body: Annotated[SlotReturn, sent("returned")]) -> SlotReturned:
        """Give a slot back unfilled, so that another may have it before it expires."""
        slot = _slot_of(body.ticket, served)
        async with answer_deadline():
            await served.replay.drop(slot, body.reason)
        return SlotReturned(slot_id=slot.slot_id, state="dropped")

    @router.post("/groups", responses={**example("group"), **documented(409)})
    async def groups(body: Annotated[GroupSubmission, sent("group")]) -> GroupAnswer:
        """Fill a slot. Sent again, for an hour, it changes nothing and gets the same answer. 409:
        the slot has expired; ask for another.
        """
        slot = _slot_of(body.ticket, served)
        look = await served.reader.look(max_age_s=0)
        # Loaded out here: that it cannot be is no fault of the request.
        await asyncio.to_thread(_vocabulary, str(model_dir(served.config.model)))
        with validating():
            group = group_of(body, GroupId(slot.slot_id))
            check_submitted(group, served.config, look.stats.learner_version)
            check_fills(slot, group, served.config.replay)
        async with answer_deadline():
            await served.replay.add(slot, group)
        return GroupAnswer(
            group_id=group.group_id,
            state="added",
            num_trajectories=len(group.trajectories),
            num_trained_tokens=sum(t.num_trained_tokens for t in group.trajectories),
        )

    return router


def _slot_of(ticket: str, served: Served) -> Slot:
    with validating():
        return unseal(ticket, served.secret)


def max_tokens_of(config: RunConfig) -> int:
    """Most tokens of a trajectory of this run."""
    return config.search.max_trajectory_tokens or config.policy.max_model_len


def group_of(sent: GroupSubmission, group_id: GroupId) -> Group:
    """The group as the buffer holds it."""
    return Group(
        group_id=group_id,
        question_id=sent.question_id,
        worker_id=sent.worker_id,
        trajectories=tuple(_trajectory_of(one) for one in sent.trajectories),
    )


def _trajectory_of(sent: SentTrajectory) -> Trajectory:
    turns: list[Turn] = []
    start = sent.num_prompt
    for turn in sent.turns:
        turns.append(Turn(start, turn.num_generated, turn.num_observed, turn.action))
        start += turn.num_generated + turn.num_observed
    return Trajectory(
        trajectory_id=sent.trajectory_id,
        token_ids=np.array(sent.token_ids, np.int32),
        turns=tuple(turns),
        logprobs=np.array(sent.logprobs, np.float32),
        versions=np.array(sent.versions, np.int32),
        reward=sent.reward,
        stop_reason=sent.stop_reason,
        scores=dict(sent.scores),
        duration_s=sent.duration_s,
        turn_rewards=None if sent.turn_rewards is None else tuple(sent.turn_rewards),
    )


def check_submitted(group: Group, config: RunConfig, learner_version: int) -> None:
    """Raise DataError for a group that the run could not train. The lower end of the window is the
    slot's, which the buffer checks.
    """
    check_group(group)
    wanted = config.rollout.group_size
    if len(group.trajectories) != wanted:
        raise DataError(
            f"{len(group.trajectories)} trajectories; a group of this run has {wanted} "
            "(rollout.group_size)"
        )
    if len({t.trajectory_id for t in group.trajectories}) != wanted:
        raise DataError("two trajectories have the same trajectory_id; give each its own")
    longest = max(len(t.token_ids) for t in group.trajectories)
    if longest > max_tokens_of(config):
        raise DataError(f"{longest} tokens in a trajectory; at most {max_tokens_of(config)} fit")
    newest = group.version_range[1]
    if newest > learner_version:
        raise DataError(
            f"a token of version {newest}; the learner is at {learner_version}, so no engine has it"
        )
    highest = max(int(t.token_ids.max()) for t in group.trajectories)
    num_known = _vocabulary(str(model_dir(config.model)))
    if highest >= num_known:
        raise DataError(f"token {highest}; the tokenizer of this run has {num_known}")


@lru_cache(4)
def _vocabulary(folder: str) -> int:
    """Tokens of a tokenizer."""
    return Tokens.load(folder).vocab_size
