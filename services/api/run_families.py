"""Metrics of the run, its watchdog, its engines and publishes, and of the API itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from leeway.services.api.families import (
    Point,
    Readings,
    counter,
    distribution,
    each,
    gauge,
    histogram,
    one,
    total,
)
from leeway.services.snapshot import WATCHDOG, exact_match_of

# ---- the run


def _info(r: Readings) -> list[Point]:
    run = r.section("run")
    return [Point((r.phase or "starting", str(run.get("objective", ""))), 1)]


def _evaluations(r: Readings) -> Iterator[Point]:
    found = r.section("eval")
    history = found.get("history") or []
    latest = found.get("after") or (history[-1] if history else None)
    for name, entry in (("before", found.get("before")), ("latest", latest)):
        if isinstance(entry, Mapping):
            yield Point((name,), exact_match_of(entry))


RUN = (
    gauge("leeway_run_info", "1, labelled", _info, "phase", "objective"),
    gauge(
        "leeway_run_start_time_seconds",
        "Unix time at which the run, or its resumption, started",
        one(lambda r: r.section("run").get("started_at")),
    ),
    gauge(
        "leeway_run_target_steps",
        "Optimizer steps of the whole run",
        one(lambda r: r.section("run").get("num_steps")),
    ),
    gauge(
        "leeway_eval_exact_match_ratio",
        "Exact match on held-out questions, before training and latest",
        _evaluations,
        "evaluation",
    ),
)

# ---- who looks after it


def _stages(key: str) -> Callable[[Readings], Iterator[Point]]:
    def read(r: Readings) -> Iterator[Point]:
        for stage in r.section(WATCHDOG).get("stages", ()):
            yield Point((stage["name"],), stage[key])

    return read


def _verdict(r: Readings) -> list[Point]:
    found = r.section(WATCHDOG)
    return [Point((), 1 if found.get("verdict") else 0)] if found else []


WATCH = (
    gauge(
        "leeway_watchdog_idle_seconds",
        "Time since the last progress of a stage that should make some now",
        _stages("idle_s"),
        "stage",
    ),
    gauge(
        "leeway_watchdog_deadline_seconds",
        "Time without progress of a stage after which the run ends",
        _stages("deadline_s"),
        "stage",
    ),
    gauge(
        "leeway_watchdog_verdict",
        "1 once the watchdog has ended the run, whose status says why",
        _verdict,
    ),
    gauge(
        "leeway_event_loop_lag_seconds",
        "How late the event loop of a process woke, longest of the last minute",
        each("loop", lambda loop: loop.get("lag_s")),
        "process",
    ),
)

# ---- engines and publishing


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _last_publish(name: str) -> Callable[[Readings], list[Point]]:
    return one(lambda r: (r.section("totals").get("last_publish") or {}).get(name))


ENGINES = (
    gauge(
        "leeway_engines", "Engines that are alive", one(lambda r: len(list(r.members("policy"))))
    ),
    gauge(
        "leeway_engine_version",
        "Policy version the engine samples from",
        each("policy", lambda e: e.get("version")),
        "engine",
    ),
    counter(
        "leeway_engine_tokens_total",
        "Tokens generated since the engine started",
        each("policy", lambda e: e.get("num_tokens")),
        "engine",
    ),
    counter(
        "leeway_engine_prompt_tokens_total",
        "Tokens of prompts since the engine started",
        each("policy", lambda e: e.get("num_prompt_tokens")),
        "engine",
    ),
    counter(
        "leeway_engine_cached_prompt_tokens_total",
        "Of these, tokens whose keys and values stood already, under the same version",
        each("policy", lambda e: e.get("num_cached_tokens")),
        "engine",
    ),
    counter(
        "leeway_engine_discarded_tokens_total",
        "Tokens sampled and thrown away because weights changed about a turn's first one",
        each("policy", lambda e: e.get("num_discarded_tokens")),
        "engine",
    ),
    counter(
        "leeway_engine_requests_total",
        "Turns answered since the engine started",
        each("policy", lambda e: e.get("num_requests")),
        "engine",
    ),
    gauge(
        "leeway_engine_requests_in_flight",
        "Turns being sampled or queued",
        each("policy", lambda e: e.get("num_in_flight")),
        "engine",
    ),
    gauge(
        "leeway_engine_last_pause_seconds",
        "How long the engine's last publish stopped generation",
        each("policy", lambda e: _seconds(e.get("pause_ms"))),
        "engine",
    ),
    gauge(
        "leeway_engine_last_transfer_seconds",
        "How long the engine's last publish took to arrive",
        each("policy", lambda e: _seconds(e.get("transfer_ms"))),
        "engine",
    ),
    counter("leeway_publishes_total", "Publishes confirmed", total("publishes")),
    counter(
        "leeway_publish_evictions_total",
        "Engines left out of a publish: late, dead, or with another checksum",
        total("evictions"),
    ),
    counter("leeway_publish_bytes_total", "Weights taken in by engines", total("bytes")),
    histogram(
        "leeway_publish_transfer_seconds",
        "From the announcement until the slowest engine held the weights",
        distribution("transfer_s"),
    ),
    histogram(
        "leeway_publish_pause_seconds",
        "Per engine and publish, time in which nothing was generated",
        distribution("pause_s"),
    ),
    gauge(
        "leeway_publish_last_version",
        "Policy version that was published and confirmed last",
        _last_publish("version"),
    ),
    gauge(
        "leeway_publish_last_engines",
        "Engines that took it, checksum compared",
        _last_publish("num_engines"),
    ),
    gauge(
        "leeway_publish_last_timestamp_seconds",
        "Unix time at which it was confirmed",
        _last_publish("at"),
    ),
)


# ---- the API itself


def _answered(r: Readings) -> list[Point]:
    return (
        [] if r.requests is None else [Point(k, n) for k, n in sorted(r.requests.answered.items())]
    )


def _open(r: Readings) -> list[Point]:
    if r.requests is None:
        return []
    return [Point((route,), num) for route, num in sorted(r.requests.open.items())]


def _response_s(r: Readings) -> list[Point]:
    if r.requests is None:
        return []
    return [Point((route,), h) for route, h in sorted(r.requests.response_s.items())]


API = (
    counter(
        "leeway_api_requests_total",
        "Requests answered since the API started",
        _answered,
        "method",
        "route",
        "status",
    ),
    gauge(
        "leeway_api_open_responses",
        "Answers being sent; of the events these are its listeners",
        _open,
        "route",
    ),
    histogram(
        "leeway_api_response_seconds", "From a request until its answer began", _response_s, "route"
    ),
)
