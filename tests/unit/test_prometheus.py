"""`GET /metrics`: every family from what the processes really write, and what promtool says."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from leeway.actors.counters import Counters, by_stage
from leeway.actors.search.measured_retriever import MeasuredRetriever
from leeway.actors.search.questions import StreamState
from leeway.learner.critic import CriticMetrics
from leeway.learner.metrics import DataMetrics, PolicyMetrics, StepMetrics
from leeway.learner.weights.publisher import Published
from leeway.replay.histogram import Histogram
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Held, ReplayStats, Waiting
from leeway.services.api.learning_families import LAST_STEP
from leeway.services.api.metrics import FAMILIES, exposition
from leeway.services.api.requests import UNMATCHED, MeasuredRequests, RequestCounters
from leeway.services.totals import Totals
from tests.tools.promtool import promtool

NOW = 1_000_000.0

STATS = ReplayStats(
    learner_version=PolicyVersion(9),
    num_slots=3,
    num_ready=2,
    num_leased=4,
    num_bytes=1000,
    admission_paused=False,
    num_admitted=40,
    num_added=37,
    num_drawn=28,
    num_trained=24,
    num_slots_expired=1,
    num_leases_expired=2,
    dropped={"retriever": 5, "timeout": 1},
    dropped_turns={"retriever": {1: 2, 4: 3}},
    outstanding={9: 4, 6: 5},
    wait_room_s=10.0,
    play_s=30.0,
    wait_data_s=20.0,
    train_s=5.0,
    waits=(Waiting("rollout", "limiter", 2.5, 3),),
    leases=(Held("l1", 9, 1.5, 60.0, 4),),
)


def worker_section() -> dict[str, Any]:
    """What a worker with one episode in flight puts on the board."""
    counters = Counters()
    counters.dropped["timeout"] = 2
    counters.episodes["answer"] = 7
    counters.num_groups_added = 5
    counters.num_tokens = 900
    counters.retriever.num_searches = 11
    counters.retriever.num_failed = 1
    counters.retriever.last_success_at = NOW
    counters.begin().enter("generating")
    for histogram in (counters.episode_s, counters.episode_turns, counters.turn_s):
        histogram.observe(2.0)
    counters.retriever.search_s.observe(0.02)
    snapshot = counters.snapshot(
        worker_id="worker-0",
        num_groups_in_flight=1,
        position=StreamState(seed=0, num_questions=1, position=0),
    )
    return {**msgspec.to_builtins(snapshot, str_keys=True), "wait_share": 0.25}


def step_line() -> dict[str, float]:
    """Every number that a step may have, 1 each."""
    names = {
        name
        for part in (StepMetrics, PolicyMetrics, DataMetrics, CriticMetrics)
        for name in part.__struct_fields__
    }
    flat = names - {"policy", "data", "critic", "scores", "staleness_histogram"}
    return {
        **dict.fromkeys(flat, 1.0),
        "score/exact_match": 0.5,
        "staleness_histogram/0": 3,
        "staleness_histogram/2": 5,
        "num_tokens_trained": 640,
        "num_trajectories": 8,
        "wait_s": 0.4,
        "seconds": 2.0,
    }


def published(pause_s: float = 0.02) -> Published:
    return Published(
        version=PolicyVersion(9),
        num_engines=2,
        num_bytes=100,
        transport="nccl",
        checksum="c",
        transfer_s=0.3,
        wire_s=0.2,
        pause_s=[pause_s, pause_s],
        copy_s=[0.01, 0.01],
        evicted={"engine-3": "late"},
    )


def totals() -> Totals:
    counted = Totals(None)
    counted.count_step(step_line())
    counted.count_publish(published())
    return counted


def sections() -> dict[str, dict[str, Any]]:
    line = step_line()
    return {
        "run": {
            "name": "demo",
            "num_steps": 60,
            "bound": 4,
            "started_at": 5.0,
            "objective": "ppo",
            "updated_at": NOW,
        },
        "learner": {"step": 9, "version": 9, "metrics": line, "idle_share": 0.1},
        "totals": totals().section(),
        "rollout:worker-0": {**worker_section(), "updated_at": NOW},
        "policy:engine-1": {
            "version": 8,
            "pause_ms": 12.0,
            "transfer_ms": 300.0,
            "num_tokens": 3000,
            "num_prompt_tokens": 9000,
            "num_cached_tokens": 7000,
            "num_discarded_tokens": 40,
            "num_requests": 50,
            "num_in_flight": 4,
            "updated_at": NOW,
        },
        "watchdog": {
            "waits": "nobody waits",
            "verdict": None,
            "stages": [{"name": "learner", "idle_s": 12.5, "deadline_s": 3600.0}],
            "updated_at": NOW,
        },
        "loop:serve": {"lag_s": 0.25, "pid": 7, "updated_at": NOW},
        "eval": {
            "before": {"step": 0, "scores": {"exact_match": 0.3}},
            "history": [{"step": 5, "scores": {"exact_match": 0.8}}],
        },
    }


def counted_requests() -> RequestCounters:
    requests = RequestCounters()
    requests.begin("GET", "/v1/status", 200, 0.004)
    return requests


def expose(
    board: dict[str, dict[str, Any]] | None = None,
    stats: ReplayStats | None = STATS,
    now: float = NOW,
) -> str:
    found = sections() if board is None else board
    text = exposition(found, stats, "training", now=now, requests=counted_requests())
    return text.decode()


def value(text: str, name: str, **labels: str) -> float:
    """Of the one series with these labels, `run` aside."""
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def test_a_run_that_trains_exposes_every_family():
    exposed = {family.name: family.type for family in text_string_to_metric_families(expose())}
    expected = {
        family.name.removesuffix("_total") if family.kind == "counter" else family.name: family.kind
        for family in FAMILIES
    }
    assert exposed == expected


def test_promtool_finds_no_fault():
    checked = promtool("check", "metrics", text=expose())
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_every_series_carries_the_run():
    families = text_string_to_metric_families(expose())
    assert {sample.labels.get("run") for f in families for sample in f.samples} == {"demo"}


def test_labels_are_those_of_the_table():
    labels = {family.name.removesuffix("_total"): set(family.labels) for family in FAMILIES}
    for family in text_string_to_metric_families(expose()):
        for sample in family.samples:
            assert set(sample.labels) - {"run", "le"} == labels[family.name], sample


def test_every_number_of_a_step_has_a_metric():
    exposed = {name for name in step_line() if "/" not in name} - {"wait_s", "version"}
    assert set(LAST_STEP) == exposed


def test_what_is_not_known_is_left_out():
    text = expose({}, None)
    assert "leeway_learner_reward_mean" not in text
    assert "leeway_replay_groups" not in text
    assert value(text, "leeway_run_info", phase="training") == 1


def test_a_silent_worker_is_gone():
    assert value(expose(), "leeway_rollout_workers") == 1
    late = expose(now=NOW + 16)
    assert value(late, "leeway_rollout_workers") == 0
    assert "leeway_rollout_turns_total{" not in late


def test_the_watchdog_is_told_by_stage_and_event_loops_by_process():
    text = expose()
    assert value(text, "leeway_watchdog_idle_seconds", stage="learner") == 12.5
    assert value(text, "leeway_watchdog_deadline_seconds", stage="learner") == 3600
    assert value(text, "leeway_watchdog_verdict") == 0
    assert value(text, "leeway_event_loop_lag_seconds", process="serve") == 0.25


def test_a_verdict_is_told_after_the_watchdog_has_ended():
    board = sections()
    board["watchdog"]["verdict"] = "no step ended for 3,601 s"
    assert value(expose(board, now=NOW + 999), "leeway_watchdog_verdict") == 1


def test_the_buffer_is_told_by_state_reason_and_staleness():
    text = expose()
    assert value(text, "leeway_replay_groups", state="leased") == 4
    assert value(text, "leeway_replay_groups_dropped_total", reason="retriever") == 5
    assert value(text, "leeway_replay_waiting", side="rollout", reason="limiter") == 3
    assert value(text, "leeway_replay_waiting_seconds_total", side="learner") == 20
    # Learner at 9, 4 groups from 9 and 5 from 6: staleness 0, and 3, which is at most 4.
    assert value(text, "leeway_replay_outstanding_groups", staleness="0") == 4
    assert value(text, "leeway_replay_outstanding_groups", staleness="4") == 5
    # Turns 1, 1, 4, 4, 4.
    bucket = "leeway_replay_dropped_trajectory_turns_bucket"
    assert value(text, bucket, reason="retriever", le="3.0") == 2
    assert value(text, "leeway_replay_dropped_trajectory_turns_sum", reason="retriever") == 14


def test_staleness_is_counted_per_trajectory():
    text = expose()
    assert value(text, "leeway_learner_staleness_versions_bucket", le="1.0") == 3
    assert value(text, "leeway_learner_staleness_versions_count") == 8
    assert value(text, "leeway_learner_staleness_versions_sum") == 10


def test_a_pause_is_counted_for_each_engine():
    text = expose()
    assert value(text, "leeway_publish_pause_seconds_count") == 2
    assert value(text, "leeway_publish_pause_seconds_bucket", le="0.01") == 0
    assert value(text, "leeway_publish_pause_seconds_bucket", le="0.025") == 2
    assert value(text, "leeway_publish_evictions_total") == 1
    assert value(text, "leeway_publish_bytes_total") == 200


def on_the_board(section: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(section))


def test_a_learner_that_starts_again_counts_on():
    resumed = Totals(on_the_board(totals().section()))
    resumed.count_step(step_line())
    resumed.count_publish(published(pause_s=7.0))
    text = expose({**sections(), "totals": resumed.section()})
    assert value(text, "leeway_learner_steps_total") == 2
    assert value(text, "leeway_learner_trained_tokens_total") == 1280
    assert value(text, "leeway_learner_step_seconds_count") == 2
    assert value(text, "leeway_publish_pause_seconds_bucket", le="+Inf") == 4
    assert value(text, "leeway_publish_pause_seconds_bucket", le="1.0") == 2


def test_a_worker_that_starts_again_counts_on():
    counters = Counters(on_the_board(worker_section()))
    counters.episodes["answer"] += 1
    counters.retriever.num_searches += 1
    counters.turn_s.observe(3.0)
    snapshot = counters.snapshot(
        worker_id="worker-0",
        num_groups_in_flight=0,
        position=StreamState(seed=0, num_questions=1, position=0),
    )
    assert snapshot.episodes["answer"] == 8
    assert snapshot.retriever.num_searches == 12
    assert (snapshot.turn_s.num, snapshot.turn_s.sum) == (2, 5.0)
    assert snapshot.num_episodes_in_flight == 0  # those of the process before are gone
    assert snapshot.num_groups_added == 5


def test_a_histogram_of_other_bounds_begins_anew():
    saved = on_the_board(Histogram(bounds=(1.0, 2.0), counts=[1, 1, 1], sum=6.0))
    assert Histogram.restored((1.0, 2.0), saved).num == 3
    assert Histogram.restored((1.0, 5.0), saved).num == 0


@given(st.lists(st.floats(-10, 1e6)), st.lists(st.floats(0.1, 1e5), min_size=1, unique=True))
def test_every_value_is_in_the_buckets_from_its_own_on(values: list[float], bounds: list[float]):
    histogram = Histogram(bounds=tuple(sorted(bounds)))
    for one in values:
        histogram.observe(one)
    cumulative = dict(histogram.cumulative())
    assert cumulative["+Inf"] == len(values)
    for bound in histogram.bounds:
        assert cumulative[str(float(bound))] == sum(one <= bound for one in values)


def test_episodes_are_told_by_stage_and_age():
    ages = [("generating", 3.0), ("generating", 70.0), ("searching", 9.9), ("searching", 10.0)]
    assert by_stage(ages) == {  # pyright: ignore[reportArgumentType]
        "generating": {"10s": 1, "5m": 1},
        "searching": {"10s": 1, "1m": 1},
    }


class FailingOnce:
    def __init__(self) -> None:
        self.num = 0

    async def search(self, query: str, top_k: int) -> list[Any]:
        from leeway.actors.failures import RetrievalError

        self.num += 1
        if self.num == 1:
            raise RetrievalError("no answer")
        return []

    async def close(self) -> None: ...


async def test_a_search_that_fails_is_counted_with_its_reason():
    from leeway.actors.failures import RetrievalError

    counters = Counters().retriever
    retriever = MeasuredRetriever(FailingOnce(), counters)
    with pytest.raises(RetrievalError):
        await retriever.search("who", 3)
    assert counters.last_success_at is None
    await retriever.search("who", 3)
    assert (counters.num_searches, counters.num_failed, counters.num_in_flight) == (2, 1, 0)
    assert counters.last_error == "no answer"
    assert counters.last_success_at is not None
    assert counters.search_s.num == 2


async def answer(counters: RequestCounters, route: str | None, *, breaks_off: bool = False) -> int:
    """One request through the middleware; returns how many answers were open meanwhile."""
    open_meanwhile = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal open_meanwhile
        if route is not None:
            scope["route"] = type("Route", (), {"path": route})
        await send({"type": "http.response.start", "status": 200})
        open_meanwhile = sum(counters.open.values())
        if breaks_off:
            raise ConnectionError

    async def send(message: Any) -> None: ...
    async def receive() -> Any: ...

    scope = {"type": "http", "method": "BREW", "path": "/any/1"}
    await MeasuredRequests(app, counters)(scope, receive, send)
    return open_meanwhile


async def test_a_request_is_counted_under_its_route_and_open_until_it_ends():
    counters = RequestCounters()
    assert await answer(counters, "/v1/events") == 1
    assert counters.answered == {("other", "/v1/events", "200"): 1}
    assert counters.open["/v1/events"] == 0
    assert counters.response_s["/v1/events"].num == 1


async def test_a_client_that_breaks_off_is_no_listener_any_longer():
    counters = RequestCounters()
    with pytest.raises(ConnectionError):
        await answer(counters, "/v1/events", breaks_off=True)
    assert counters.open["/v1/events"] == 0


async def test_an_error_that_nobody_caught_is_a_500():
    counters = RequestCounters()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError

    async def nothing(*_: Any) -> Any: ...

    with pytest.raises(ValueError):
        await MeasuredRequests(app, counters)({"type": "http", "method": "GET"}, nothing, nothing)
    assert counters.answered == {("GET", UNMATCHED, "500"): 1}
    assert counters.open[UNMATCHED] == 0


async def test_paths_that_are_no_route_make_one_series():
    counters = RequestCounters()
    await answer(counters, None)
    await answer(counters, None)
    assert counters.answered == {("other", UNMATCHED, "200"): 2}


def test_names_follow_prometheus():
    for family in FAMILIES:
        assert re.fullmatch(r"leeway(_[a-z0-9]+)+", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter")
        assert not family.name.endswith(("_ms", "_s", "_share", "_percent"))
