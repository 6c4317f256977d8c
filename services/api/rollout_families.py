"""Metrics of rollout workers and of their searches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from leeway.services.api.families import (
    Point,
    Readings,
    counter,
    each,
    each_by,
    gauge,
    histogram,
    histogram_of,
    one,
)


def _in_flight(r: Readings) -> Iterator[Point]:
    for name, worker in r.members("rollout"):
        for stage, ages in sorted(worker.get("episodes_by_stage", {}).items()):
            for age, num in ages.items():
                yield Point((name, stage, age), num)


def _retriever(key: str) -> Callable[[Readings], Iterator[Point]]:
    return each("rollout", lambda w: w.get("retriever", {}).get(key))


ROLLOUTS = (
    gauge(
        "leeway_rollout_workers",
        "Rollout workers that are alive",
        one(lambda r: len(list(r.members("rollout")))),
    ),
    gauge(
        "leeway_rollout_groups_in_flight",
        "Groups being played",
        each("rollout", lambda w: w.get("num_groups_in_flight")),
        "worker",
    ),
    gauge(
        "leeway_rollout_episodes_in_flight",
        "Episodes being played, by where they are and how old",
        _in_flight,
        "worker",
        "stage",
        "age",
    ),
    gauge(
        "leeway_rollout_oldest_episode_seconds",
        "Age of the oldest episode being played, by where it is",
        each_by("rollout", lambda w: w.get("oldest_episode_s", {})),
        "worker",
        "stage",
    ),
    counter(
        "leeway_rollout_episodes_total",
        "Episodes finished, by why they ended",
        each_by("rollout", lambda w: w.get("episodes", {})),
        "worker",
        "stop_reason",
    ),
    counter(
        "leeway_rollout_groups_added_total",
        "Groups handed to the buffer",
        each("rollout", lambda w: w.get("num_groups_added")),
        "worker",
    ),
    counter(
        "leeway_rollout_groups_dropped_total",
        "Groups that did not reach the buffer, by reason",
        each_by("rollout", lambda w: w.get("dropped", {})),
        "worker",
        "reason",
    ),
    counter(
        "leeway_rollout_turns_total",
        "Turns of finished episodes",
        each("rollout", lambda w: w.get("num_turns")),
        "worker",
    ),
    counter(
        "leeway_rollout_tokens_total",
        "Tokens generated in finished episodes",
        each("rollout", lambda w: w.get("num_tokens")),
        "worker",
    ),
    histogram(
        "leeway_rollout_episode_seconds",
        "Duration of finished episodes",
        each("rollout", lambda w: histogram_of(w.get("episode_s"))),
        "worker",
    ),
    histogram(
        "leeway_rollout_episode_turns",
        "Turns of finished episodes",
        each("rollout", lambda w: histogram_of(w.get("episode_turns"))),
        "worker",
    ),
    histogram(
        "leeway_rollout_turn_seconds",
        "Until the policy had answered a turn",
        each("rollout", lambda w: histogram_of(w.get("turn_s"))),
        "worker",
    ),
    counter(
        "leeway_rollout_admission_wait_seconds_total",
        "Time with a free place and no slot for it",
        each("rollout", lambda w: w.get("wait_admission_s")),
        "worker",
    ),
    counter(
        "leeway_rollout_playing_seconds_total",
        "Time with at least one group being played",
        each("rollout", lambda w: w.get("playing_s")),
        "worker",
    ),
    gauge(
        "leeway_rollout_admission_wait_ratio",
        "Share of the last half minute that the worker waited for admission",
        each("rollout", lambda w: w.get("wait_share")),
        "worker",
    ),
    counter(
        "leeway_retriever_searches_total",
        "Searches, those of evaluations included",
        _retriever("num_searches"),
        "worker",
    ),
    counter(
        "leeway_retriever_failures_total",
        "Searches without passages within their deadline",
        _retriever("num_failed"),
        "worker",
    ),
    gauge(
        "leeway_retriever_searches_in_flight",
        "Searches that wait for passages",
        _retriever("num_in_flight"),
        "worker",
    ),
    gauge(
        "leeway_retriever_last_success_timestamp_seconds",
        "Unix time of the last search that found passages",
        _retriever("last_success_at"),
        "worker",
    ),
    histogram(
        "leeway_retriever_search_seconds",
        "Duration of searches, failed ones included",
        each("rollout", lambda w: histogram_of(w.get("retriever", {}).get("search_s"))),
        "worker",
    ),
)
