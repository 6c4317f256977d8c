"""A run at one moment, joined from the run board and the replay buffer.

It is the body of `GET /v1/status` and what the live table draws. The board's sections fill up while
a run starts: what may not be known yet is None.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from leeway.replay.chain import chain, seconds_by_side
from leeway.replay.store import ReplayStats
from leeway.services.api.models import (
    Engine,
    Eval,
    EventLoop,
    Learning,
    Replay,
    Run,
    Seconds,
    Staleness,
    Status,
    WaitLink,
    Waits,
    Watchdog,
)

Section = Mapping[str, Any]

SILENT_S: Final = 15.0
"""Engines and workers write every second, the watchdog and event loops every five; one that is
silent for longer is gone."""
WATCHDOG: Final = "watchdog"
"""Section of the run board; services/watch.py writes it."""


def build_snapshot(
    sections: Mapping[str, Section],
    stats: ReplayStats | None,
    *,
    last_event: str | None = None,
    now: float | None = None,
) -> Status:
    """Join the run board's sections and the buffer's numbers. Any section or key may be missing.

    run      {name, phase, started_at, num_steps, bound}
    learner  {step, version, metrics, idle_share, tokens_per_s, max_staleness_seen}
    rollout:WORKER_ID  {...}
    policy:ENGINE_ID   {version, pause_ms, transfer_ms, tokens_per_s}
    watchdog {waits, verdict, stages: [{name, idle_s, deadline_s}]}
    loop:PROCESS       {lag_s, pid}
    eval     {before, after, history: [...]}, each {step, scores: {exact_match, ...}, ...}
    """
    now = now or time.time()
    sections = gathered(sections, now)
    run, learner = sections.get("run", {}), sections.get("learner", {})
    metrics = _mapping(learner.get("metrics"))
    started_at = run.get("started_at")
    elapsed_s = max(0.0, now - started_at) if started_at else 0.0
    engines = _engines(sections.get("policy", {}))
    rates = [engine.tokens_per_s for engine in engines if engine.tokens_per_s is not None]
    return Status(
        run=Run(
            name=run.get("name", "run"),
            phase=run.get("phase", "starting"),
            elapsed_s=elapsed_s,
            step=learner.get("step", 0),
            num_steps=run.get("num_steps"),
            policy_version=learner.get("version", stats.learner_version if stats else None),
            last_event=last_event,
        ),
        engines=engines,
        generated_tokens_per_s=sum(rates) if rates else None,
        learning=_learning(metrics, learner),
        staleness=Staleness(
            mean=metrics.get("staleness_mean"),
            max=_whole(metrics.get("staleness_max")),
            max_seen=_whole(learner.get("max_staleness_seen", metrics.get("staleness_max"))),
            bound=run.get("bound"),
        ),
        replay=_replay(stats) if stats else None,
        waits=_waits(sections),
        watchdog=_watchdog(sections.get(WATCHDOG, {})),
        loops=_loops(sections.get("loop", {})),
        eval=_eval(sections.get("eval", {})),
    )


def gathered(sections: Mapping[str, Section], now: float) -> dict[str, Section]:
    """Members that write a section of their own, brought together under one name.

    {"policy:engine-1": {...}, "policy:engine-2": {...}} -> {"policy": {"engine-1": {...}, ...}}
    A member that has not written for SILENT_S is gone and left out, and so is the watchdog: unless
    it has ended this start of the run, and itself with it, by its verdict.
    """
    together: dict[str, dict[str, Any]] = {}
    started_at = sections.get("run", {}).get("started_at") or 0.0
    for name, section in sections.items():
        part, colon, member = name.partition(":")
        written_at = section.get("updated_at", now)
        if name == WATCHDOG:
            is_over = bool(section.get("verdict")) and written_at >= started_at
            is_gone = now - written_at > SILENT_S and not is_over
        else:
            is_gone = bool(colon) and now - written_at > SILENT_S
        if is_gone:
            continue
        if colon:
            together.setdefault(part, {})[member] = section
        else:
            together.setdefault(part, {}).update(section)
    return dict(together)


def _mapping(value: Any) -> Section:
    return value if isinstance(value, Mapping) else {}


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _members(section: Section) -> Iterable[tuple[str, Section]]:
    """The entries that are tables; the board adds plain ones such as updated_at."""
    return ((name, value) for name, value in sorted(section.items()) if isinstance(value, Mapping))


def _engines(section: Section) -> list[Engine]:
    return [
        Engine(
            engine_id=engine_id,
            version=engine.get("version"),
            pause_ms=engine.get("pause_ms"),
            transfer_ms=engine.get("transfer_ms"),
            tokens_per_s=engine.get("tokens_per_s"),
        )
        for engine_id, engine in _members(section)
    ]


def _learning(metrics: Section, learner: Section) -> Learning:
    return Learning(
        reward=metrics.get("reward_mean"),
        exact_match=metrics.get("score/exact_match"),
        entropy=metrics.get("entropy"),
        kl=metrics.get("kl_behaviour"),
        grad_norm=metrics.get("grad_norm"),
        clip_fraction=metrics.get("clip_fraction_tokens"),
        clip_bias_norm=metrics.get("ctn_norm"),
        tokens_per_s=learner.get("tokens_per_s"),
    )


def _replay(stats: ReplayStats) -> Replay:
    return Replay(
        num_slots=stats.num_slots,
        num_ready=stats.num_ready,
        num_leased=stats.num_leased,
        num_held_back=stats.num_held_back,
        num_bytes=stats.num_bytes,
        num_trained=stats.num_trained,
        num_dropped=sum(stats.dropped.values()),
        dropped=stats.dropped,
        dropped_turns=stats.dropped_turns,
        dropped_tokens=stats.dropped_tokens,
        seconds={
            side: Seconds.model_validate(seconds)
            for side, seconds in seconds_by_side(stats).items()
        },
        waits=[WaitLink.model_validate(link) for link in chain(stats)],
        admission_paused=stats.admission_paused,
    )


def _waits(sections: Mapping[str, Section]) -> Waits:
    """Shares of the last half minute or so, as learner and rollout workers report them.

    Workers that waited 20 % and 40 % of it: rollouts wait for room 30 %.
    """
    learner_share = sections.get("learner", {}).get("idle_share")
    workers = list(_members(sections.get("rollout", {})))
    shares = [s for _, w in workers if (s := w.get("wait_share")) is not None]
    rollout_share = sum(shares) / len(shares) if shares else None
    refusals = [reason for _, w in workers if (reason := w.get("last_refusal"))]
    return Waits(
        learner_for_data=learner_share,
        rollouts_for_room=rollout_share,
        sentence=_waits_sentence(learner_share, rollout_share),
        refusal=refusals[0] if refusals else None,
    )


def _waits_sentence(learner: float | None, rollouts: float | None) -> str:
    known = [
        (share, words)
        for share, words in (
            (learner, "learner waits for rollouts"),
            (rollouts, "rollouts wait for the learner"),
        )
        if share is not None
    ]
    if not known:
        return ""
    waiting = sorted((pair for pair in known if pair[0] >= 0.02), reverse=True)
    return ", ".join(f"{words} {share:.0%}".replace("%", " %") for share, words in waiting) or (
        "nobody waits"
    )


def _watchdog(section: Section) -> Watchdog | None:
    return Watchdog.model_validate(section) if "waits" in section else None


def _loops(section: Section) -> list[EventLoop]:
    return [
        EventLoop(process=name, lag_s=loop["lag_s"], pid=loop.get("pid"))
        for name, loop in _members(section)
        if "lag_s" in loop
    ]


def _eval(section: Section) -> Eval:
    """`after` is the last word; until it exists, the newest evaluation made meanwhile."""
    before = _mapping(section.get("before"))
    latest = next(reversed(evaluations({**section, "before": None})), {})
    return Eval(
        before=exact_match_of(before), latest=exact_match_of(latest), latest_step=latest.get("step")
    )


def evaluations(section: Section) -> list[Section]:
    """All that were made, in the order of their steps: before, meanwhile, after."""
    found = [section.get("before"), *(section.get("history") or []), section.get("after")]
    return [entry for entry in map(_mapping, found) if entry]


def exact_match_of(evaluation: Section) -> float | None:
    """Mean exact match of one evaluation, {"step", "scores": {"exact_match", ...}, ...}."""
    return _mapping(evaluation.get("scores")).get("exact_match")
