"""Snapshots: what is joined from the board, what is drawn, what is said in one line."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from leeway.replay.schema import PolicyVersion
from leeway.replay.store import ReplayStats
from leeway.services import observability
from leeway.services.api.models import Run, Status
from leeway.services.observability import Display, progress_line, render
from leeway.services.snapshot import build_snapshot


def stats() -> ReplayStats:
    return ReplayStats(
        learner_version=PolicyVersion(3),
        num_slots=16,
        num_ready=9,
        num_leased=16,
        num_bytes=10,
        admission_paused=False,
        num_admitted=1,
        num_added=1,
        num_drawn=1,
        num_trained=1,
        num_slots_expired=0,
        num_leases_expired=0,
        dropped={"retriever": 2},
        outstanding={3: 1},
        wait_room_s=0.0,
        wait_data_s=0.0,
    )


FULL: dict[str, dict[str, Any]] = {
    "run": {"name": "demo", "phase": "training", "started_at": 100, "num_steps": 60, "bound": 4},
    "learner": {
        "step": 23,
        "version": 23,
        "idle_share": 0.41,
        "tokens_per_s": 5123.4,
        "metrics": {
            "reward_mean": 0.62,
            "score/exact_match": 0.64,
            "staleness_mean": 1.31,
            "staleness_max": 3,
            "clip_fraction_tokens": 0.021,
            "ctn_norm": 0.0213,
        },
    },
    "rollout": {"worker-1": {"num_tokens": 4}, "worker-2": {}, "updated_at": 3.0},  # type: ignore[dict-item]
    "policy": {
        "engine-1": {"version": 23, "pause_ms": 12.3, "transfer_ms": 41, "tokens_per_s": 3000},
        "engine-2": {"version": 22, "tokens_per_s": 12},
        "updated_at": 3.0,  # type: ignore[dict-item]
    },
    "eval": {
        "before": {"step": 0, "scores": {"exact_match": 0.31}},
        "history": [{"step": 20, "scores": {"exact_match": 0.7}}],
    },
}


def text_of(snapshot: Status, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(snapshot))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_nothing_known_is_a_snapshot_all_the_same():
    snapshot = build_snapshot({}, None)
    assert snapshot == Status()
    assert "policy version –" in text_of(snapshot)


def test_generated_tokens_are_summed_over_engines():
    assert build_snapshot(FULL, None).generated_tokens_per_s == 3012


def test_rollouts_wait_as_long_as_their_workers_do_on_average():
    sections = {"rollout:w-0": {"wait_share": 0.2}, "rollout:w-1": {"wait_share": 0.4}}
    assert build_snapshot(sections, None).waits.rollouts_for_room == pytest.approx(0.3)


def test_a_member_that_has_been_silent_for_a_while_is_left_out():
    sections = {
        "policy:old": {"version": 3, "updated_at": 100.0},
        "policy:new": {"version": 5, "updated_at": 190.0},
    }
    engines = build_snapshot(sections, None, now=200.0).engines
    assert [engine.engine_id for engine in engines] == ["new"]


def test_who_waits_is_said_longest_first_and_short_waits_are_not():
    sections = {"learner": {"idle_share": 0.41}, "rollout:w-0": {"wait_share": 0.03}}
    assert build_snapshot(sections, None).waits.sentence == (
        "learner waits for rollouts 41 %, rollouts wait for the learner 3 %"
    )
    assert build_snapshot({"learner": {"idle_share": 0.01}}, None).waits.sentence == "nobody waits"


def test_the_last_evaluation_counts_and_after_comes_last():
    assert build_snapshot(FULL, None).eval.latest == 0.7
    done = {**FULL, "eval": {**FULL["eval"], "after": {"step": 60, "scores": {"exact_match": 0.8}}}}
    latest = build_snapshot(done, None).eval
    assert (latest.latest, latest.latest_step) == (0.8, 60)


def test_an_evaluation_of_no_question_is_no_number():
    assert build_snapshot({"eval": {"before": None, "after": None}}, None).eval.latest is None


def test_the_table_shows_the_numbers_at_100_columns():
    snapshot = build_snapshot(FULL, stats(), now=321.0, last_event="checkpoint 20 written")
    shown = text_of(snapshot)
    assert max(len(line) for line in shown.splitlines()) == 100
    for words in ("step 23 of 60", "0.310 → 0.700", "3 of 4", "2.1 %", "0.0213", "16 / 9"):
        assert words in shown
    for words in ("5,123", "3,012", "12.3 ms", "checkpoint 20 written", "03:41"):
        assert words in shown
    assert "…" not in shown


def test_a_name_that_looks_like_markup_is_text():
    assert "[bold]x" in text_of(Status(run=Run(name="r", last_event="[bold]x")))


def test_a_plain_line_holds_only_what_is_known():
    assert progress_line(Status()) == "00:00 starting step 0/-"
    line = progress_line(build_snapshot(FULL, None, now=321.0))
    assert line.startswith("03:41 training step 23/60 reward 0.620 exact_match 0.640 held_out 0.7")


def test_without_a_terminal_a_step_is_one_line(monkeypatch: pytest.MonkeyPatch):
    out, clock = io.StringIO(), [0.0]
    monkeypatch.setattr(observability.time, "monotonic", lambda: clock[0])
    with Display(Console(file=out, width=40)) as display:
        for step, seconds in ((1, 0.0), (1, 1.0), (2, 2.0), (2, 11.9), (2, 12.0)):
            clock[0] = seconds
            display.update(Status(run=Run(phase="training", step=step)))
    lines = out.getvalue().splitlines()
    assert lines == [f"00:00 training step {step}/-" for step in (1, 2, 2)]


WATCHED: dict[str, dict[str, Any]] = {
    "run": {"started_at": 100.0},
    "watchdog": {
        "waits": "learner waits for 12 groups",
        "verdict": None,
        "stages": [{"name": "learner", "idle_s": 901.0, "deadline_s": 3600.0}],
        "updated_at": 1000.0,
    },
    "loop:serve": {"lag_s": 1.204, "pid": 7, "updated_at": 1000.0},
    "loop:learner": {"lag_s": 9.0, "pid": 8, "updated_at": 1000.0},
    "loop:api": {"lag_s": 0.1, "pid": 9, "updated_at": 900.0},
}
VERDICT = {**WATCHED["watchdog"], "verdict": "no step ended for 3,601 s"}


def test_what_the_watchdog_saw_last_is_part_of_the_status():
    seen = build_snapshot(WATCHED, None, now=1010.0).watchdog
    assert seen is not None
    assert (seen.waits, seen.verdict) == ("learner waits for 12 groups", None)
    assert [(stage.name, stage.idle_s) for stage in seen.stages] == [("learner", 901.0)]


def test_a_watchdog_that_has_not_looked_for_a_while_says_nothing():
    assert build_snapshot(WATCHED, None, now=1020.0).watchdog is None


@pytest.mark.parametrize(("started_at", "is_told"), [(100.0, True), (1001.0, False)])
def test_a_verdict_outlives_the_watchdog_but_not_the_next_start(started_at: float, is_told: bool):
    sections = {**WATCHED, "run": {"started_at": started_at}, "watchdog": VERDICT}
    seen = build_snapshot(sections, None, now=5000.0).watchdog
    assert (seen is not None) == is_told
    assert seen is None or seen.verdict == VERDICT["verdict"]


def test_event_loops_of_processes_that_live_are_told_by_name():
    loops = build_snapshot(WATCHED, None, now=1010.0).loops
    assert [(loop.process, loop.lag_s, loop.pid) for loop in loops] == [
        ("learner", 9.0, 8),
        ("serve", 1.204, 7),
    ]


def test_the_table_says_who_waits_now_what_stands_still_and_which_loop_is_late():
    shown = text_of(build_snapshot(WATCHED, None, now=1010.0))
    assert "learner waits for 12 groups" in shown
    assert "learner: no progress for 901 s; the run ends at 3,600 s" in shown
    # That of the learner is late by a step each time.
    assert "event loops woke late in the last minute: serve 1.20 s " in shown


def test_a_stage_that_has_used_up_little_of_its_deadline_is_not_told():
    stage = {"name": "learner", "idle_s": 899.0, "deadline_s": 3600.0}
    sections = {**WATCHED, "watchdog": {**WATCHED["watchdog"], "stages": [stage]}}
    assert "no progress" not in text_of(build_snapshot(sections, None, now=1010.0))


def test_the_table_and_a_plain_line_say_why_the_watchdog_ended_the_run():
    snapshot = build_snapshot({**WATCHED, "watchdog": VERDICT}, None, now=1010.0)
    assert "no step ended for 3,601 s" in text_of(snapshot)
    assert progress_line(snapshot).endswith("ended by the watchdog: no step ended for 3,601 s")
