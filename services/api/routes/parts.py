"""The parts of the run, one resource each: rollouts, policy, replay, learner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter

from leeway.replay.chain import chain, seconds_by_side
from leeway.services.api import parameters, resources
from leeway.services.api.examples import example
from leeway.services.api.models import Held
from leeway.services.api.reader import Look, answer_deadline
from leeway.services.api.served import Served
from leeway.services.snapshot import Section, evaluations, exact_match_of

_PARTS = {"rollout": "rollouts", "learner": "the learner"}


def parts_router(served: Served) -> APIRouter:
    """`/v1/rollouts`, `/v1/policy`, `/v1/replay`, `/v1/learner` and its steps."""
    router = APIRouter(prefix="/v1", tags=["parts"])

    @router.get("/rollouts", responses=example("rollouts"))
    async def rollouts() -> resources.Rollouts:
        """Workers, what they play, how episodes ended, and what failed."""
        return rollouts_of(await served.reader.look())

    @router.get("/policy", responses=example("policy"))
    async def policy() -> resources.Policy:
        """Versions live in each engine, and the last publishes."""
        look = await served.reader.look()
        async with answer_deadline():
            publishes = await served.board.publishes()
        return policy_of(look, publishes)

    @router.get("/replay", responses=example("replay"))
    async def replay() -> resources.ReplayDetail:
        """The buffer: what it holds, who waits for whom, what was dropped."""
        limits = served.config.replay.model_dump(mode="json", exclude={"url"})
        return replay_of(await served.reader.look(), limits)

    @router.get("/learner", responses=example("learner"))
    async def learner() -> resources.LearnerDetail:
        """The learner after its last step."""
        return learner_of(await served.reader.look())

    @router.get("/learner/steps", responses=example("steps"))
    async def steps(
        cursor: Annotated[int, parameters.cursor(40, ge=0, le=10**9)] = 0,
        limit: Annotated[int, parameters.limit(1000)] = 100,
    ) -> resources.Page[dict[str, Any]]:
        """One record per optimizer step behind step `cursor`, in order: the line of metrics.jsonl.
        The newest 4096 are kept. Who has read to the end reads on later with the last step.
        """
        async with answer_deadline():
            found = await served.board.steps(cursor, limit + 1)
        items = found[:limit]
        following = str(items[-1]["step"]) if len(found) > limit else None
        return resources.Page(items=items, next=following)

    return router


# ---- rollouts


def rollouts_of(look: Look) -> resources.Rollouts:
    """The workers that are alive, together and each."""
    workers = [_worker(name, section) for name, section in look.each("rollout")]
    return resources.Rollouts(
        num_workers=len(workers),
        num_groups_in_flight=sum(worker.num_groups_in_flight for worker in workers),
        num_episodes_in_flight=sum(worker.num_episodes_in_flight for worker in workers),
        episodes_by_stage=_added_by_stage(worker.episodes_by_stage for worker in workers),
        stop_reasons=_added(worker.stop_reasons for worker in workers),
        failures=_added(worker.failures for worker in workers),
        retriever=_health(worker.retriever for worker in workers),
        workers=workers,
    )


def _worker(name: str, section: Section) -> resources.Worker:
    return resources.Worker(
        worker_id=name,
        num_groups_in_flight=section.get("num_groups_in_flight", 0),
        num_episodes_in_flight=section.get("num_episodes_in_flight", 0),
        episodes_by_stage=section.get("episodes_by_stage", {}),
        oldest_episode_s=section.get("oldest_episode_s", {}),
        stop_reasons=section.get("episodes", {}),
        failures=section.get("dropped", {}),
        num_groups_added=section.get("num_groups_added", 0),
        num_turns=section.get("num_turns", 0),
        num_tokens=section.get("num_tokens", 0),
        wait_share=section.get("wait_share"),
        last_refusal=section.get("last_refusal"),
        retriever=_retriever(section.get("retriever")),
        settings_revision=section.get("settings_revision", 0),
    )


def _retriever(section: Section | None) -> resources.RetrieverHealth | None:
    if not section:
        return None
    seconds = section.get("search_s", {})
    counted = sum(seconds.get("counts", ()))
    return resources.RetrieverHealth(
        num_searches=section.get("num_searches", 0),
        num_failed=section.get("num_failed", 0),
        num_in_flight=section.get("num_in_flight", 0),
        mean_s=seconds.get("sum", 0.0) / counted if counted else None,
        last_error=section.get("last_error"),
        last_success_at=section.get("last_success_at"),
    )


def _health(found: Iterable[resources.RetrieverHealth | None]) -> Any:
    known = [one for one in found if one is not None and one.num_searches]
    if not known:
        return "unknown"
    return "failing" if any(one.last_error for one in known) else "healthy"


def _added(tables: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """{"answer": 2}, {"answer": 1, "turns": 4} -> {"answer": 3, "turns": 4}"""
    total: Counter[str] = Counter()
    for table in tables:
        total.update(table)
    return dict(sorted(total.items()))


def _added_by_stage(tables: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    found = list(tables)
    stages = sorted({stage for table in found for stage in table})
    return {stage: _added(table.get(stage, {}) for table in found) for stage in stages}


# ---- policy


def policy_of(look: Look, publishes: Sequence[Mapping[str, Any]]) -> resources.Policy:
    """Engines with versions, and the last publishes."""
    newest = look.stats.learner_version
    engines = [_engine(name, section, newest) for name, section in look.each("policy")]
    live = Counter(str(engine.version) for engine in engines if engine.version is not None)
    return resources.Policy(
        learner_version=newest,
        live_versions=dict(sorted(live.items())),
        engines=engines,
        publishes=[resources.PublishRecord.model_validate(dict(p)) for p in publishes],
    )


def _engine(name: str, section: Section, newest: int) -> resources.EngineDetail:
    version = section.get("version")
    return resources.EngineDetail(
        engine_id=name,
        version=version,
        num_behind=None if version is None else newest - version,
        **{
            key: section.get(key)
            for key in (
                "pause_ms",
                "transfer_ms",
                "tokens_per_s",
                "num_tokens",
                "num_prompt_tokens",
                "num_cached_tokens",
                "num_discarded_tokens",
                "num_requests",
                "num_in_flight",
            )
        },
    )


# ---- replay


def replay_of(look: Look, limits: Mapping[str, Any]) -> resources.ReplayDetail:
    """The buffer in full."""
    stats = look.stats
    histogram = look.section("totals").get("histograms", {}).get("staleness", {})
    bounds, counts = histogram.get("bounds", []), histogram.get("counts", [])
    assert look.snapshot.replay is not None, "a look holds the buffer's numbers"
    return resources.ReplayDetail(
        **dict(look.snapshot.replay),
        size=stats.num_ready + stats.num_leased,
        learner_version=stats.learner_version,
        limiter=limiter_sentence(look),
        limits=dict(limits),
        wait_split={
            side: resources.WaitSplit(
                waiting_s=seconds.waiting_s,
                working_s=seconds.working_s,
                waiting_share=seconds.waiting_share,
            )
            for side, seconds in seconds_by_side(stats).items()
        },
        staleness_histogram={int(b): n for b, n in zip(bounds, counts, strict=False)},
        staleness_over=sum(counts[len(bounds) :]),
        outstanding=stats.outstanding,
        slots=[Held.model_validate(held) for held in stats.slots],
        leases=[Held.model_validate(held) for held in stats.leases],
        **{
            name: getattr(stats, name)
            for name in (
                "num_admitted",
                "num_added",
                "num_drawn",
                "num_slots_expired",
                "num_leases_expired",
            )
        },
    )


def limiter_sentence(look: Look) -> str:
    """`rollouts wait for the learner (window); ...`, or that nobody is held back."""
    if look.stats.admission_paused:
        return "admission is paused; POST /v1/control/resume opens it"
    links = chain(look.stats)
    if not links:
        return "nobody is held back"
    return "; ".join(
        f"{_PARTS[link.waiter]} wait{'s' if link.waiter == 'learner' else ''} for "
        f"{_PARTS.get(link.awaited, link.awaited)} ({link.reason}), for {link.since_s:.0f} s now"
        for link in links
    )


# ---- learner


def learner_of(look: Look) -> resources.LearnerDetail:
    """The learner's section, and what the status says of it."""
    section, run = look.section("learner"), look.snapshot.run
    metrics = {
        str(name): float(value)
        for name, value in section.get("metrics", {}).items()
        if isinstance(value, int | float)
    }
    return resources.LearnerDetail(
        step=run.step,
        num_steps=run.num_steps,
        version=run.policy_version,
        objective=look.section("run").get("objective"),
        idle_share=section.get("idle_share"),
        learning=look.snapshot.learning,
        staleness=look.snapshot.staleness,
        eval=resources.EvalDetail(
            **dict(look.snapshot.eval),
            history=[
                resources.Evaluation(step=entry["step"], exact_match=score)
                for entry in evaluations(look.section("eval"))
                if (score := exact_match_of(entry)) is not None
            ],
        ),
        metrics=metrics,
        updated_at=section.get("updated_at"),
        settings_revision=section.get("settings_revision", 0),
    )
