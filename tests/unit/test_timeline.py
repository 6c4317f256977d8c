"""What a step did, laid back from the moment its line was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leeway.services.layout import RunDirectory
from leeway.services.timeline import step_events, write_timeline

LINE = {
    "step": 3,
    "time": 100.0,
    "wait_s": 1.0,
    "seconds": 4.0,
    "confirm_s": 0.1,
    "publish_s": 0.2,
    "pause_ms": [5.0, 7.0],
    "num_ready": 2,
}


def test_parts_of_a_step_follow_each_other_up_to_its_end():
    events = [e for e in step_events(LINE) if e["ph"] == "X"]
    found = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events]
    expected = [
        ("wait for groups", 94.7, 1.0),
        ("train step 3", 95.7, 4.0),
        ("confirm 2", 99.7, 0.1),
        ("publish 3", 99.8, 0.2),
        ("pause for 2", 95.7, 0.005),
        ("pause for 2", 95.7, 0.007),
    ]
    for got, wanted in zip(found, expected, strict=True):
        assert got[0] == wanted[0]
        assert got[1:] == pytest.approx(wanted[1:])


def test_a_wait_says_what_was_short():
    line = {**LINE, "wait_s/blocked": 0.75, "wait_s/missing": 0.25}
    [wait] = [e for e in step_events(line) if e["name"] == "wait for groups"]
    assert list(wait["args"].values()) == [0.25, 0.75]
    assert "had to be in this step" in list(wait["args"])[1]


def test_trace_is_what_the_browser_reads(tmp_path: Path):
    run = RunDirectory(tmp_path)
    run.metrics.write_text(json.dumps(LINE) + "\n", encoding="utf-8")
    write_timeline(run)
    events = json.loads(run.timeline.read_text(encoding="utf-8"))["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    assert all("pid" in e for e in events)


def test_run_without_a_step_has_an_empty_trace(tmp_path: Path):
    run = RunDirectory(tmp_path)
    write_timeline(run)
    assert len(json.loads(run.timeline.read_text(encoding="utf-8"))["traceEvents"]) == 2
