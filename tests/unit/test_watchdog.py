"""Which stage is stuck, after how long, and the sentence that says who waits for whom."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from leeway.replay.config import ReplayConfig
from leeway.replay.errors import StoreUnavailable
from leeway.replay.loop_lag import LoopLag
from leeway.replay.store import Held, ReplayStats, Waiting
from leeway.services import watch
from leeway.services.config import load
from leeway.services.supervision_config import SupervisionConfig
from leeway.services.watch import Standstill, Watchdog
from leeway.services.watchdog import Look, Stage, Stages, verdict

LIMITS = SupervisionConfig(
    start_deadline_s=100, evaluation_deadline_s=50, rollout_deadline_s=60, step_deadline_s=90
)
REPLAY = ReplayConfig(groups_per_step=16)
ALIVE = {"policy:engine-1": {"updated_at": 1000.0, "num_tokens": 5}}


def stats(**changes: Any) -> ReplayStats:
    nothing = dict.fromkeys(
        (
            *("learner_version", "num_slots", "num_ready", "num_leased", "num_bytes"),
            *("num_admitted", "num_added", "num_drawn", "num_trained"),
            *("num_slots_expired", "num_leases_expired", "wait_room_s", "wait_data_s"),
        ),
        0,
    )
    return ReplayStats(
        **{**nothing, "admission_paused": False, "dropped": {}, "outstanding": {}, **changes}
    )


def look(now: float, phase: str = "training", step: int = 0, **changes: Any) -> Look:
    sections = changes.pop("sections", {})
    known = {**ALIVE, "learner": {"step": step}, **sections}
    return Look(now, 1000.0, phase, known, stats(**changes))


def idle(stages: list[Stage]) -> dict[str, float]:
    return {stage.name: stage.idle_s for stage in stages}


def test_a_stage_is_idle_since_its_last_progress_and_overdue_past_its_deadline():
    stages = Stages(LIMITS)
    stages.see(look(0))
    assert idle(stages.see(look(40, num_added=1))) == {"learner": 40, "rollouts": 0}
    found = stages.see(look(95, num_added=1))
    assert idle(found) == {"learner": 95, "rollouts": 55}
    assert [stage.is_overdue for stage in found] == [True, False]
    assert idle(stages.see(look(96, step=1, num_added=1))) == {"learner": 0, "rollouts": 56}


def test_rollouts_that_the_buffer_refuses_are_not_overdue():
    stages = Stages(LIMITS)
    refused = (Waiting("rollout", "window", 30.0),)
    stages.see(look(0))
    assert idle(stages.see(look(80, waits=refused))) == {"learner": 80}
    assert idle(stages.see(look(81))) == {"learner": 81, "rollouts": 0}


def test_a_pause_stops_every_clock():
    stages = Stages(LIMITS)
    stages.see(look(0))
    assert stages.see(look(500, admission_paused=True)) == []
    assert idle(stages.see(look(501))) == {"learner": 0, "rollouts": 0}


def test_each_phase_has_its_stage():
    assert idle(Stages(LIMITS).see(look(0, "starting"))) == {"start": 0}
    assert idle(Stages(LIMITS).see(look(0, "evaluating-before"))) == {"evaluation": 0}
    assert idle(Stages(LIMITS).see(look(0, "evaluating-after"))) == {"evaluation": 0}
    assert Stages(LIMITS).see(look(0, "done")) == []


def test_an_evaluation_goes_on_while_engines_generate():
    stages = Stages(LIMITS)
    stages.see(look(0, "evaluating-after"))
    more = {"policy:engine-1": {"updated_at": 1000.0, "num_tokens": 6}}
    assert idle(stages.see(look(49, "evaluating-after", sections=more))) == {"evaluation": 0}
    (stage,) = stages.see(look(100, "evaluating-after", sections=more))
    assert (stage.idle_s, stage.is_overdue) == (51, True)


def waits(**changes: Any) -> str:
    stages = Stages(LIMITS)
    stages.see(look(0))
    return stages.waits(look(10, **changes), REPLAY)


def test_the_chain_of_waits_is_one_sentence():
    both = (Waiting("learner", "missing", 9.0), Waiting("rollout", "bytes", 5.0))
    assert waits(waits=both, num_ready=4, num_slots=3, num_leases_expired=9) == (
        "learner waits for 12 groups; replay refuses slots: byte budget full; "
        "9 leases expired by learner 0"
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "nobody waits"),
        (
            {"waits": (Waiting("learner", "missing", 9.0),), "num_ready": 15},
            "learner waits for 1 group, and none is being played",
        ),
        (
            {
                "waits": (Waiting("learner", "blocked", 9.0),),
                "slots": (Held("a1b2c3d4e5", 3, 31.0, 60.0),),
                "num_slots": 1,
            },
            "learner waits for groups that must be in this step (slot a1b2c3d4, held for 31 s)",
        ),
        (
            {"leases": (Held("x", 3, 700.0, 60.0, 16),)},
            "learner 0 has held 16 groups for 700 s",
        ),
        ({"num_slots_expired": 1}, "1 slot expired by rollout workers"),
        (
            {"sections": {"rollout:worker-0": {"updated_at": 300.0}}},
            "worker-0 has been silent for 700 s",
        ),
        (
            {"sections": {"loop:serve": {"updated_at": 999.0, "lag_s": 12.0}}},
            "the event loop of serve was held up for 12.0 s",
        ),
        ({"sections": {"loop:learner": {"updated_at": 999.0, "lag_s": 12.0}}}, "nobody waits"),
        ({"sections": {"policy:engine-1": {"updated_at": 900.0}}}, "no engine lives"),
    ],
)
def test_who_waits_for_what(changes: dict[str, Any], sentence: str):
    assert waits(**changes) == sentence


def test_what_had_expired_before_the_last_step_is_not_told_again():
    stages = Stages(LIMITS)
    stages.see(look(0, num_leases_expired=9))
    assert stages.waits(look(1, num_leases_expired=9), REPLAY) == "nobody waits"
    assert stages.waits(look(1, num_leases_expired=10), REPLAY) == ("1 lease expired by learner 0")


def test_the_verdict_names_stage_time_setting_and_chain():
    assert verdict(Stage("learner", 3601.2, 3600.0), "nobody waits") == (
        "no step ended for 3,601 s (supervision.step_deadline_s = 3600): nobody waits"
    )


def test_the_lag_of_a_loop_is_the_longest_of_the_last_minute():
    lag = LoopLag()
    for now, seconds in ((0.0, 5.0), (30.0, 0.5), (50.0, -0.1)):
        lag.note(now, seconds)
    assert lag.longest_s == 5.0
    lag.note(61.0, 0.0)
    assert lag.longest_s == 0.5


class Board:
    """A run board that stands still, and what was put on it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.section: dict[str, Any] = {}
        self.faults: list[Exception] = []

    async def get_all(self) -> dict[str, dict[str, Any]]:
        if self.faults:
            raise self.faults.pop(0)
        return {"learner": {"step": 7}}

    async def phase(self) -> str:
        return "training"

    async def put(self, name: str, section: dict[str, Any]) -> None:
        assert name == "watchdog"
        self.section = section

    async def append_event(self, kind: str, text: str) -> None:
        self.events.append((kind, text))


class Replay:
    async def stats(self) -> ReplayStats:
        return stats(waits=(Waiting("learner", "missing", 9.0),), num_slots=1)


async def ended(board: Board, bundle: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sentence with which the watchdog ends a run that stands still."""
    monkeypatch.setattr(watch, "LOOK_S", 0.02)
    config = load(None, ["supervision.step_deadline_s=0.1", "replay.groups_per_step=8"])
    dog = Watchdog(board, Replay(), config, bundle)  # type: ignore[arg-type]
    with pytest.raises(Standstill) as caught:
        await asyncio.wait_for(dog.keep(), 60)
    return str(caught.value)


async def test_a_run_that_stands_still_ends_with_the_sentence_an_event_and_evidence(
    monkeypatch: pytest.MonkeyPatch,
):
    board = Board()
    board.faults.append(StoreUnavailable("away for a moment"))

    async def bundle(found: str) -> str:
        assert found == board.section["verdict"]
        return "the evidence is in x.tar.gz"

    sentence = await ended(board, bundle, monkeypatch)
    found = board.section["verdict"]
    assert found.startswith("no step ended for 0 s (supervision.step_deadline_s = 0.1): learner")
    assert "learner waits for 8 groups" in found
    assert sentence == f"{found}; the evidence is in x.tar.gz"
    assert board.events == [("watchdog", found)]
    assert board.section["stages"][0].keys() == {"name", "idle_s", "deadline_s"}


async def test_it_ends_with_its_sentence_also_where_no_evidence_can_be_collected(
    monkeypatch: pytest.MonkeyPatch,
):
    async def bundle(found: str) -> str:
        raise OSError("the disk is full")

    sentence = await ended(Board(), bundle, monkeypatch)
    assert sentence.endswith("no evidence could be collected (OSError('the disk is full'))")
