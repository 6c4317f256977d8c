"""What a run did, drawn from its records at any time: the learner's steps laid back from the moment
each line was written, what engines did between two lines, and the pauses."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from leeway.services import cli, timeline
from leeway.services.layout import RunDirectory
from leeway.services.timeline import (
    engine_events,
    keep_timeline,
    pause_events,
    read_records,
    step_events,
    write_timeline,
)

LINE: dict[str, Any] = {
    "step": 3,
    "time": 100.0,
    "wait_s": 1.0,
    "seconds": 4.0,
    "confirm_s": 0.1,
    "publish_s": 0.2,
    "num_ready": 2,
    "engine_requests_in_flight": 7,
    "engine_up_s": 10.0,
    "engine_busy_s": 9.0,
    "engine_tokens": 1000,
    "engine_discarded_tokens": 10,
    "engine_prompt_tokens": 500,
    "engine_cached_tokens": 400,
}
NEXT = {
    **LINE,
    "step": 4,
    "time": 110.0,
    "engine_up_s": 20.0,
    "engine_busy_s": 17.0,
    "engine_tokens": 3000,
    "engine_discarded_tokens": 60,
    "engine_prompt_tokens": 900,
    "engine_cached_tokens": 500,
}
PUBLISH: dict[str, Any] = {
    "version": 3,
    "pause_s": [0.005, 0.007],
    "copy_s": [0.004, 0.006],
    "transport": "direct",
    "num_bytes": 64,
    "transfer_s": 0.1,
    "wire_s": 0.05,
    "evicted": {},
}


def spans(events: Any) -> list[tuple[str, float, float]]:
    return [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]


def levels(events: Any) -> dict[str, tuple[float, float]]:
    """Curve -> (since when, value)."""
    return {e["name"]: (e["ts"] / 1e6, e["args"][e["name"]]) for e in events if e["ph"] == "C"}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Steps 3 and 4, and the publish of version 3."""
    run = RunDirectory(tmp_path / "demo-1")
    run.root.mkdir()
    run.config.write_text("")
    run.metrics.write_text(json.dumps(LINE) + "\n" + json.dumps(NEXT) + "\n")
    run.publishes.write_text(json.dumps(PUBLISH) + "\n")
    return run


def test_parts_of_a_step_follow_each_other_up_to_its_end():
    expected = [
        ("wait for groups", 94.7, 1.0),
        ("train step 3", 95.7, 4.0),
        ("confirm 2", 99.7, 0.1),
        ("publish 3", 99.8, 0.2),
    ]
    for got, wanted in zip(spans(step_events(LINE)), expected, strict=True):
        assert got[0] == wanted[0]
        assert got[1:] == pytest.approx(wanted[1:])


def test_a_wait_says_what_was_short():
    line = {**LINE, "wait_s/blocked": 0.75, "wait_s/missing": 0.25}
    [wait] = [e for e in step_events(line) if e["name"] == "wait for groups"]
    assert list(wait["args"].values()) == [0.25, 0.75]
    assert "had to be in this step" in list(wait["args"])[1]


def test_buffer_and_requests_in_flight_are_those_of_the_moment():
    assert levels(step_events(LINE)) == {
        "groups ready": (100.0, 2),
        "requests in flight": (100.0, 7),
    }


def test_engines_are_drawn_by_what_grew_between_two_lines():
    """In 10 s: busy for 8, 2000 tokens given and 50 thrown away, 100 of 400 of prompts reused."""
    assert levels(engine_events(LINE, NEXT)) == {
        "busy %": (100.0, 80.0),
        "tokens generated /s": (100.0, 200.0),
        "tokens thrown away /s": (100.0, 5.0),
        "prompts reused %": (100.0, 25.0),
    }


@pytest.mark.parametrize(
    "change",
    [{"engine_up_s": 4.0, "engine_busy_s": 3.0}, {"time": 100.0}],
    ids=["an engine was started anew", "the same moment"],
)
def test_numbers_that_do_not_go_on_draw_nothing(change: dict[str, float]):
    assert list(engine_events(LINE, {**NEXT, **change})) == []


def test_lines_without_engines_draw_none():
    bare = {name: value for name, value in NEXT.items() if not name.startswith("engine_")}
    assert list(engine_events(LINE, bare)) == []


def test_a_pause_stands_behind_the_step_that_made_the_version_with_a_lane_for_each_engine():
    events = list(pause_events([LINE, NEXT], [PUBLISH]))
    assert spans(events) == [("pause for 3", 100.0, 0.005), ("pause for 3", 100.0, 0.007)]
    assert [e["tid"] for e in events] == [1, 2]
    assert events[1]["args"] == {
        "transport": "direct", "num_bytes": 64, "transfer_s": 0.1, "wire_s": 0.05, "copy_s": 0.006,
    }  # fmt: skip


def test_what_was_sent_before_the_first_step_stands_where_that_begins():
    """As a version is that engines lack which come late; of 9 no step tells anything."""
    publishes = [{**PUBLISH, "version": version, "pause_s": [0.5]} for version in (2, 9)]
    [(name, at, _)] = spans(pause_events([LINE], publishes))
    assert (name, at) == ("pause for 2", pytest.approx(94.7))


def test_trace_is_what_the_browser_reads(run: RunDirectory):
    write_timeline(run)
    events = json.loads(run.timeline.read_text(encoding="utf-8"))["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    named = {e["pid"] for e in events if e["ph"] == "M"}
    assert {e["pid"] for e in events} == named
    assert {"train step 4", "pause for 3", "busy %"} <= {e["name"] for e in events}


def test_half_a_line_is_left_out_and_only_counted_where_it_has_an_end(run: RunDirectory):
    """A crash leaves one in the middle; the last may be being written."""
    with run.metrics.open("a") as lines:
        lines.write('{"step": 5, "ti\n[]\n' + json.dumps({**NEXT, "step": 6}) + '\n{"step": 7')
    found = read_records(run)
    assert [line["step"] for line in found.steps] == [3, 4, 6]
    assert found.num_unread == 2


# --- at the end of a run ---


def test_a_run_without_a_step_has_an_empty_trace_at_its_end(tmp_path: Path):
    run = RunDirectory(tmp_path)
    keep_timeline(run)
    events = json.loads(run.timeline.read_text(encoding="utf-8"))["traceEvents"]
    assert {e["ph"] for e in events} == {"M"}


def test_it_is_written_again_only_when_its_records_are_newer(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    written: list[RunDirectory] = []
    monkeypatch.setattr(timeline, "write_timeline", written.append)
    run.timeline.write_text("{}")
    for at_s, is_written in ((10, False), (20, True), (30, True)):
        os.utime(run.timeline, (20, 20))
        os.utime(run.metrics, (5, 5))
        os.utime(run.publishes, (at_s, at_s))
        keep_timeline(run)
        assert bool(written) == is_written
        written.clear()


def test_a_full_disk_at_the_end_is_no_error(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    keep_timeline(run)
    assert "No space left on device" in caplog.text
    assert not run.timeline.exists()


# --- leeway timeline ---


def leeway(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["leeway", "timeline", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command_writes_into_the_run_directory_or_where_it_is_told(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert leeway(monkeypatch, str(run.root)) == 0
    assert f"2 steps and 1 publishes in {run.timeline}" in capsys.readouterr().out
    out = run.root.parent / "traces" / "a.json"
    assert leeway(monkeypatch, str(run.root), "--out", str(out), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"file": str(out), "steps": 2, "publishes": 1, "unread": 0}
    assert out.read_text() == run.timeline.read_text()


def test_a_dry_run_writes_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out = run.root.parent / "traces" / "a.json"
    assert leeway(monkeypatch, str(run.root), "--out", str(out), "--dry-run", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert [place["what"] for place in said["reads"]] == ["steps", "publishes"]
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("metrics", "out", "words"),
    [
        (None, "a.json", "holds no step yet, so there is nothing to draw"),
        ('{"step": 1', "a.json", "holds no step yet, so there is nothing to draw"),
        ("nonsense\n", "a.json", "metrics.jsonl is a step of a run"),
        (json.dumps(LINE) + "\n", ".", "is a folder; name a file in it"),
        (json.dumps(LINE) + "\n", "demo-1/config.toml/a.json", "is no folder that may be written"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence_and_2(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    metrics: str | None,
    out: str,
    words: str,
):
    run.metrics.unlink()
    if metrics is not None:
        run.metrics.write_text(metrics)
    assert leeway(monkeypatch, str(run.root), "--out", str(run.root.parent / out)) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert leeway(monkeypatch, str(tmp_path)) == 2
    assert "is not a run directory" in capsys.readouterr().err
