"""Who did what when in a run, as a Chrome trace (chrome://tracing, Perfetto).

It is made of what metrics.jsonl and publishes.jsonl hold, at any time.

    learner   each step in its parts, laid back from its line, which is written when it is over:
              waiting for groups, training, confirming the version before, publishing
    engines   the pauses of each publish, and as curves what all engines did between two lines: busy
              share, tokens generated and thrown away, prompts reused; and their requests in flight
    buffer    groups ready and groups being played, as curves
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from leeway.replay.errors import ConfigurationError
from leeway.services.layout import RunDirectory

log = logging.getLogger(__name__)

Json = Mapping[str, Any]

LEARNER: Final = {"pid": 1, "tid": 1}
ENGINES: Final = {"pid": 2}
BUFFER: Final = {"pid": 3}
PROCESSES: Final = {1: "learner", 2: "engines", 3: "buffer"}
WAIT: Final = "wait for groups"
WORDS: Final = {
    "missing": "s with fewer groups ready than a step trains",
    "blocked": "s until a group was played that had to be in this step",
    "limiter": "s for the limiter",
}
"""What was short, by ShortageReason."""
LEVELS: Final = {
    "num_ready": ("groups ready", BUFFER),
    "num_slots": ("groups being played", BUFFER),
    "engine_requests_in_flight": ("requests in flight", ENGINES),
}
"""Numbers that hold for the moment of a line: key -> curve and where it stands."""
OF_A_PUBLISH: Final = ("transport", "num_bytes", "transfer_s", "wire_s", "evicted")
"""What a pause tells when it is clicked on, beside its copy."""


class Records(NamedTuple):
    """What a run has written down of its steps and publishes, in the order of the files."""

    steps: list[Json]
    publishes: list[Json]
    num_unread: int
    """Lines that are no step and no publish: a crash or a full disk may leave half of one."""


def write_timeline(run: RunDirectory, out: Path | None = None) -> Records:
    """Write the trace to `out`, else as timeline.json into the run directory; returns what it was
    made of. Raises OSError."""
    records = read_records(run)
    text = json.dumps({"traceEvents": list(trace_events(records))})
    path = out or run.timeline
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return records


def keep_timeline(run: RunDirectory) -> None:
    """Write timeline.json where it is older than what it is made of.

    For the end of a run, good or bad. It raises nothing: the disk may be full, and an error from
    here would hide the one that ended the run.
    """
    try:
        if _changed_at(run.timeline) <= max(map(_changed_at, (run.metrics, run.publishes))):
            write_timeline(run)
    except (OSError, ValueError, MemoryError) as error:
        log.warning("%s could not be written: %s", run.timeline, error)


def read_records(run: RunDirectory) -> Records:
    """Every whole line. Steps that a resumed run trained again were trained, so they stay."""
    steps, num_bad_steps = _lines(run.metrics, ("step", "time", "wait_s", "seconds"))
    publishes, num_bad_publishes = _lines(run.publishes, ("version", "pause_s"))
    return Records(steps, publishes, num_bad_steps + num_bad_publishes)


def check_has_steps(run: RunDirectory, records: Records) -> None:
    """Raise ConfigurationError where there is nothing to draw."""
    if records.steps:
        return
    if records.num_unread:
        raise ConfigurationError(
            f"none of the lines of {run.metrics} is a step of a run; give a directory that "
            "leeway train or leeway learn has written"
        )
    raise ConfigurationError(
        f"{run.root} holds no step yet, so there is nothing to draw; ask again when the first step "
        "is trained"
    )


def trace_events(records: Records) -> Iterator[dict[str, Any]]:
    """All of them; the order does not matter to who reads them."""
    for pid, name in PROCESSES.items():
        yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
    for line in records.steps:
        yield from step_events(line)
    for before, line in pairwise(records.steps):
        yield from engine_events(before, line)
    yield from pause_events(records.steps, records.publishes)


def step_events(line: Json) -> Iterator[dict[str, Any]]:
    """The learner's part of one line of metrics.jsonl, and what held when it was written.

    Written at 100 s after 1 s of waiting, 4 s of training, 0.1 s of confirming and 0.2 s of
    publishing: waited from 94.7 to 95.7, trained until 99.7, confirmed until 99.8.
    """
    at = _began(line)
    for name, seconds in _parts(line):
        why = _split(line) if name == WAIT else {}
        yield _span(name, at, seconds, LEARNER | ({"args": why} if why else {}))
        at += seconds
    for key, (name, lane) in LEVELS.items():
        if key in line:
            yield _level(name, line["time"], line[key], lane)


def engine_events(before: Json, line: Json) -> Iterator[dict[str, Any]]:
    """What the engines did between two lines, as curves that hold from the first to the second.

    up from 10 s to 20 s, busy from 9 s to 17 s: 80 % between the two. Their numbers count from an
    engine's start: where one was started anew in between, or tells nothing, there is none.
    """
    up_s = _grown(before, line, "engine_up_s")
    wall_s = line["time"] - before["time"]
    if up_s is None or up_s <= 0 or wall_s <= 0:
        return
    busy_s = _grown(before, line, "engine_busy_s")
    generated = _grown(before, line, "engine_tokens")
    discarded = _grown(before, line, "engine_discarded_tokens")
    prompts = _grown(before, line, "engine_prompt_tokens")
    cached = _grown(before, line, "engine_cached_tokens")
    curves = {
        "busy %": None if busy_s is None else 100 * busy_s / up_s,
        "tokens generated /s": None if generated is None else generated / wall_s,
        "tokens thrown away /s": None if discarded is None else discarded / wall_s,
        "prompts reused %": 100 * cached / prompts if prompts and cached is not None else None,
    }
    for name, value in curves.items():
        if value is not None:
            yield _level(name, before["time"], round(value, 3), ENGINES)


def pause_events(steps: Sequence[Json], publishes: Iterable[Json]) -> Iterator[dict[str, Any]]:
    """When generation stopped for each version, a lane for each engine.

    publishes.jsonl holds no time. An engine takes a version into use as soon as it has been sent,
    which is when the step that made it ends; what was sent before a step, when the step begins.
    """
    moments = {line["step"] - 1: _began(line) for line in steps}
    moments |= {line["step"]: line["time"] for line in steps}
    for publish in publishes:
        at = moments.get(publish["version"])
        if at is None:
            continue
        facts = {name: publish[name] for name in OF_A_PUBLISH if publish.get(name)}
        copies: Sequence[float] = publish.get("copy_s") or ()
        for place, pause_s in enumerate(publish["pause_s"]):
            args = facts | ({"copy_s": copies[place]} if place < len(copies) else {})
            lane = ENGINES | {"tid": place + 1, "args": args}
            yield _span(f"pause for {publish['version']}", at, pause_s, lane)


def _parts(line: Json) -> tuple[tuple[str, float], ...]:
    step = line["step"]
    return (
        (WAIT, line["wait_s"]),
        (f"train step {step}", line["seconds"]),
        (f"confirm {step - 1}", line.get("confirm_s", 0.0)),
        (f"publish {step}", line.get("publish_s", 0.0)),
    )


def _began(line: Json) -> float:
    """When the learner began to wait for this step."""
    return line["time"] - sum(seconds for _, seconds in _parts(line))


def _split(line: Json) -> dict[str, float]:
    """What the learner waited for, in seconds."""
    waits = {words: line.get(f"wait_s/{reason}") for reason, words in WORDS.items()}
    return {words: seconds for words, seconds in waits.items() if seconds is not None}


def _grown(before: Json, line: Json, key: str) -> float | None:
    """By how much; None where it fell, or is not told."""
    if key not in before or key not in line or line[key] < before[key]:
        return None
    return line[key] - before[key]


def _span(name: str, at: float, seconds: float, lane: Json) -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": 1e6 * at, "dur": 1e6 * seconds, **lane}


def _level(name: str, at: float, value: float, lane: Json) -> dict[str, Any]:
    """A curve holds a value until it is told the next."""
    return {"name": name, "ph": "C", "ts": 1e6 * at, "args": {name: value}, **lane}


def _lines(path: Path, keys: tuple[str, ...]) -> tuple[list[Json], int]:
    """Lines that have all `keys`, and how many others there are. What has no end yet is being
    written."""
    if not path.is_file():
        return [], 0
    found: list[Json] = []
    whole = path.read_bytes().rpartition(b"\n")[0].splitlines()
    for text in whole:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and all(key in line for key in keys):
            found.append(line)
    return found, len(whole) - len(found)


def _changed_at(path: Path) -> int:
    """Nanoseconds; 0 where it is missing."""
    return path.stat().st_mtime_ns if path.exists() else 0
