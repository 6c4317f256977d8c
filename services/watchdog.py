"""Which stage of a run makes no progress, for how long, and who waits for whom, in one sentence.

    start        phase starting                       progress: the phase moves on
    evaluation   phases evaluating-before, -after     progress: engines generate
    rollouts     phase training                       progress: groups come
    learner      phase training                       progress: steps end

Rollouts that the buffer refuses wait for the learner, and a pause waits for its operator: their
clocks stand still meanwhile. So a stage that is over its deadline is one that should work and does
not, and the run is stuck. This file computes; watch.py looks, and acts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from leeway.replay.chain import WaitLink, chain
from leeway.replay.config import ReplayConfig
from leeway.replay.store import RefusalReason, ReplayStats
from leeway.services.snapshot import SILENT_S
from leeway.services.supervision_config import SupervisionConfig

StageName = Literal["start", "evaluation", "rollouts", "learner"]

KEYS: Final[dict[StageName, str]] = {
    "start": "start_deadline_s",
    "evaluation": "evaluation_deadline_s",
    "rollouts": "rollout_deadline_s",
    "learner": "step_deadline_s",
}
"""The setting of each stage's deadline, in the table `supervision`."""
LACK: Final[dict[StageName, str]] = {
    "start": "the engines did not start",
    "evaluation": "the evaluation generated nothing",
    "rollouts": "no group came",
    "learner": "no step ended",
}
REFUSALS: Final[dict[RefusalReason, str]] = {
    "window": "version window full",
    "lookahead": "as far ahead as the learner needs",
    "capacity": "max_groups reached",
    "bytes": "byte budget full",
    "limiter": "limiter",
    "engine-behind": "engines behind the learner",
    "paused": "admission is paused",
}
BLOCKED_S: Final = 1.0
"""An event loop that wakes so late is worth a word."""

Sections = Mapping[str, Mapping[str, Any]]


class Look(NamedTuple):
    """A run at one moment."""

    now: float
    """On a clock that never goes back, in seconds."""
    unix: float
    """Unix time of the same moment: members stamp their sections with it."""
    phase: str
    sections: Sections
    stats: ReplayStats


class Stage(msgspec.Struct, frozen=True):
    """One stage that should make progress now."""

    name: StageName
    idle_s: float
    """Since its last progress, in seconds."""
    deadline_s: float

    @property
    def is_overdue(self) -> bool:
        """Whether it is over its deadline."""
        return self.idle_s > self.deadline_s


class _Progress(NamedTuple):
    """What a stage had done, and when it had last done something."""

    mark: object
    since: float


class Stages:
    """Of one run, fed with looks at it."""

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self._progress: dict[StageName, _Progress] = {}
        self._expired: dict[str, int] = {}
        """Leases and slots that had expired when a step last ended."""

    def see(self, look: Look) -> list[Stage]:
        """Every stage whose turn it is, with the time since it last made progress."""
        marks = _marks(look)
        self._progress = {name: known for name, known in self._progress.items() if name in marks}
        for name, mark in marks.items():
            known = self._progress.get(name)
            if known is None or known.mark != mark:
                self._progress[name] = _Progress(mark, look.now)
                if name == "learner":
                    self._expired = _expired(look.stats)
        return [
            Stage(name, look.now - self._progress[name].since, getattr(self._config, KEYS[name]))
            for name in marks
        ]

    def waits(self, look: Look, config: ReplayConfig) -> str:
        """Who waits for whom now, in one sentence; "nobody waits" where none does.

        learner waits for 12 groups; replay refuses slots: byte budget full; 9 leases expired by
        learner 0
        """
        return "; ".join(_clauses(look, config, self._expired)) or "nobody waits"


def verdict(stage: Stage, waits: str) -> str:
    """`no step ended for 3,601 s (supervision.step_deadline_s = 3600): learner waits for ...`"""
    return (
        f"{LACK[stage.name]} for {stage.idle_s:,.0f} s "
        f"(supervision.{KEYS[stage.name]} = {stage.deadline_s:g}): {waits}"
    )


def _marks(look: Look) -> dict[StageName, object]:
    """The stages whose turn it is, and how far each has come; in another place means progress."""
    if look.phase == "starting":
        return {"start": look.phase}
    if look.phase.startswith("evaluating"):
        return {"evaluation": (look.phase, _num_tokens(look.sections))}
    if look.phase != "training" or look.stats.admission_paused:
        return {}
    marks: dict[StageName, object] = {"learner": look.sections.get("learner", {}).get("step", 0)}
    if not any(wait.side == "rollout" for wait in look.stats.waits):
        marks["rollouts"] = look.stats.num_added
    return marks


def _num_tokens(sections: Sections) -> list[tuple[str, int]]:
    engines = (name for name in sections if name.startswith("policy:"))
    return [(name, sections[name].get("num_tokens", 0)) for name in sorted(engines)]


def _clauses(look: Look, config: ReplayConfig, expired: Mapping[str, int]) -> Iterator[str]:
    links = chain(look.stats)
    for link in sorted(links, key=lambda link: link.waiter != "learner"):
        yield (
            _learner_words(link, look.stats, config)
            if link.waiter == "learner"
            else (
                f"replay refuses slots: {REFUSALS[link.reason]}"  # pyright: ignore[reportArgumentType]
            )
        )
    for lease in look.stats.leases if not any(link.waiter == "learner" for link in links) else ():
        yield f"learner 0 has held {lease.num_groups} groups for {lease.since_s:,.0f} s"
    for what, who in (("leases", "learner 0"), ("slots", "rollout workers")):
        num = _expired(look.stats)[what] - expired.get(what, 0)
        if num > 0:
            yield f"{num} {what if num != 1 else what[:-1]} expired by {who}"
    yield from _silent(look)


def _learner_words(link: WaitLink, stats: ReplayStats, config: ReplayConfig) -> str:
    if link.reason == "limiter":
        return f'learner waits for the limiter "{config.limiter}"'
    if link.reason == "blocked" and link.held is not None:
        slot = f"slot {link.held.id[:8]}, held for {link.held.since_s:,.0f} s"
        return f"learner waits for groups that must be in this step ({slot})"
    num = max(0, config.groups_per_step - stats.num_ready)
    words = f"learner waits for {num} group{'s' * (num != 1)}"
    return f"{words}, and none is being played" if stats.num_slots == 0 else words


def _expired(stats: ReplayStats) -> dict[str, int]:
    return {"leases": stats.num_leases_expired, "slots": stats.num_slots_expired}


def _silent(look: Look) -> Iterator[str]:
    """Workers that have not written for long, no engine at all, and loops that wake late."""
    ages = {name: look.unix - s.get("updated_at", look.unix) for name, s in look.sections.items()}
    # The learner computes its steps in its loop: that it is late by one is no news.
    loops = {name for name in ages if name.startswith("loop:")} - {"loop:learner"}
    for name, age_s in sorted(ages.items()):
        member = name.partition(":")[2]
        lag_s = look.sections[name].get("lag_s", 0.0)
        if name.startswith("rollout:") and age_s > SILENT_S:
            yield f"{member} has been silent for {age_s:,.0f} s"
        elif name in loops and age_s <= SILENT_S and lag_s > BLOCKED_S:
            yield f"the event loop of {member} was held up for {lag_s:.1f} s"
    if not any(name.startswith("policy:") and age_s <= SILENT_S for name, age_s in ages.items()):
        yield "no engine lives"
