"""Who did what when in a run, as a Chrome trace (chrome://tracing, Perfetto).

It is made of what metrics.jsonl and publishes.jsonl hold. A step's line is written when the step is
over, so its parts are laid back from there: waiting for groups, training, confirming the version
before, publishing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from leeway.services.layout import RunDirectory

LEARNER: Final = {"pid": 1, "tid": 1}
ENGINE: Final = {"pid": 2}
WAIT: Final = "wait for groups"
WORDS: Final = {
    "missing": "s with fewer groups ready than a step trains",
    "blocked": "s until a group was played that had to be in this step",
    "limiter": "s for the limiter",
}
"""What was short, by ShortageReason."""


def write_timeline(run: RunDirectory) -> None:
    """Write timeline.json into the run directory."""
    steps = _lines(run.metrics)
    events = [
        _name("process_name", 1, "learner"),
        _name("process_name", 2, "engines"),
        *(event for line in steps for event in step_events(line)),
    ]
    run.timeline.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def step_events(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one line of metrics.jsonl.

    Written at 100 s after 1 s of waiting, 4 s of training, 0.1 s of confirming and 0.2 s of
    publishing: waited from 94.7 to 95.7, trained until 99.7, confirmed until 99.8.
    """
    step = line["step"]
    parts = (
        (WAIT, line["wait_s"]),
        (f"train step {step}", line["seconds"]),
        (f"confirm {step - 1}", line.get("confirm_s", 0.0)),
        (f"publish {step}", line.get("publish_s", 0.0)),
    )
    at = line["time"] - sum(seconds for _, seconds in parts)
    for name, seconds in parts:
        why = _split(line) if name == WAIT else {}
        yield _span(name, at, seconds, LEARNER | ({"args": why} if why else {}))
        at += seconds
    pauses: Sequence[float] = line.get("pause_ms") or ()
    # The version before was taken into use while this step was trained.
    began = line["time"] - sum(seconds for _, seconds in parts[1:])
    for place, pause_ms in enumerate(pauses):
        yield _span(f"pause for {step - 1}", began, pause_ms / 1e3, ENGINE | {"tid": place})
    for name in ("num_ready", "num_slots", "generated_tokens_per_s"):
        if name in line:
            yield {
                "name": name,
                "ph": "C",
                "ts": 1e6 * line["time"],
                "pid": 1,
                "args": {name: line[name]},
            }


def _split(line: Mapping[str, Any]) -> dict[str, float]:
    """What the learner waited for, in seconds."""
    waits = {words: line.get(f"wait_s/{reason}") for reason, words in WORDS.items()}
    return {words: seconds for words, seconds in waits.items() if seconds is not None}


def _span(name: str, at: float, seconds: float, lane: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": 1e6 * at, "dur": 1e6 * seconds, **lane}


def _name(kind: str, pid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "args": {"name": name}}


def _lines(path: Any) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
