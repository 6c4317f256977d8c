"""The report: self-contained, complete where there are data, silent where there are none."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from leeway.services.config import load
from leeway.services.layout import RunDirectory, create_run
from leeway.services.report import coloured, read_lines, write_report
from leeway.services.report_plots import PANELS, Series, draw_panels, points


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(load(None, ["name=demo", f"directory={tmp_path}"]))


def step_line(step: int) -> dict[str, Any]:
    names = {series.keys[0] for panel in PANELS for series in panel.series}
    return {
        "step": step,
        **dict.fromkeys(names, 0.1 * step),
        "pause_ms": [10.0, 14.0],
        "staleness_histogram/0": 3,
        "staleness_histogram/2": 1,
    }


def sample(question: str, text: str, reward: float) -> dict[str, Any]:
    return {
        "question_id": question,
        "golden_answers": ["Lisbon"],
        "text": text,
        "reward": reward,
        "stop_reason": "answer",
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a run that has everything."""
    run = create_run(load(None, [f"directory={tmp_path_factory.mktemp('full')}"]))
    fill(run)
    return write_report(run.root).read_text()


def fill(run: RunDirectory) -> None:
    run.metrics.write_text("".join(json.dumps(step_line(step)) + "\n" for step in (1, 2, 3)))
    evals = {
        "before": {
            "step": 0,
            "scores": {"exact_match": 0.31},
            "samples": [sample("q1", "<think>a</think><b>", 0.0)],
        },
        "history": [{"step": 2, "scores": {"exact_match": 0.5}}],
        "after": {
            "step": 3,
            "scores": {"exact_match": 0.85},
            "samples": [sample("q1", "<answer>Lisbon</answer>", 1.0)],
        },
    }
    run.eval.write_text(json.dumps(evals))
    summary = {"exact_match_before": 0.31, "exact_match_after": 0.85, "wall_s": 372.4, "steps": 3}
    run.summary.write_text(json.dumps({**summary, "max_staleness_seen": 2, "max_staleness": 4}))


def test_the_headline_says_what_the_run_reached(page: str):
    for words in ("0.310", "0.850", "6 min 12 s", "2 of 4"):
        assert words in page


def test_every_panel_with_data_is_drawn(page: str):
    assert page.count("<figure>") == page.count("<svg") == len(PANELS) + 1
    for panel in PANELS:
        assert panel.title in page


def test_the_page_needs_nothing_from_outside(page: str):
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert "<script" not in page
    assert "@import" not in page


def test_ids_are_unique_over_all_plots(page: str):
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_every_tag_is_closed(page: str):
    open_tags: list[str] = []

    class Check(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta",):
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            """Closed by itself."""

    Check().feed(page)
    assert open_tags == []


def test_no_placeholder_colour_is_left(page: str):
    assert not re.search(r"#[0-4]a[0-4]b[0-4]c", page)


def test_a_run_that_made_no_step_has_a_report(run: RunDirectory):
    page = write_report(run).read_text()
    assert "No optimizer step was recorded." in page
    assert "learning_rate" in page


def test_a_repeated_step_counts_once_and_a_cut_line_not_at_all(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "x": 1}\n{"step": 1, "x": 1}\n{"step": 2, "x": 5}\n{"st')
    assert read_lines(path) == [{"step": 1, "x": 1}, {"step": 2, "x": 5}]


def test_rates_follow_from_seconds(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "wait_s": 1, "seconds": 2, "num_tokens_trained": 300}')
    (line,) = read_lines(path)
    assert line["trained_tokens_per_s"] == 100
    assert line["idle_share"] == pytest.approx(1 / 3)
    assert line["blocked_share"] == 0
    path.write_text('{"step": 1, "wait_s": 1, "seconds": 2, "wait_s/blocked": 0.6}')
    (line,) = read_lines(path)
    assert line["blocked_share"] == pytest.approx(1 / 5)


def test_a_list_is_drawn_by_its_mean_and_a_gap_is_left_out():
    lines = [{"step": 1, "p": [10, 14]}, {"step": 2, "p": None}, {"step": 3, "p": float("nan")}]
    assert points(lines, Series("p", ("p",))) == ([1.0], [12.0])


def test_a_panel_without_data_is_left_out():
    plots = draw_panels([{"step": 1, "entropy": 0.5}])
    assert [plot.title for plot in plots] == ["Entropy"]


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-9, 1e9])
def test_any_constant_value_can_be_drawn(value: float):
    line = {"step": 1} | {s.keys[0]: value for panel in PANELS for s in panel.series}
    assert len(draw_panels([line], max_staleness=0)) == len(PANELS)


def test_a_transcript_is_escaped_and_coloured():
    assert coloured("<b><search>x & y</search>z") == (
        '&lt;b&gt;<span class="search">&lt;search&gt;x &amp; y&lt;/search&gt;</span>z'
    )


def test_an_unclosed_tag_reaches_to_the_next_tag():
    assert coloured("<think>a<answer>b") == (
        '<span class="think">&lt;think&gt;a</span><span class="answer">&lt;answer&gt;b</span>'
    )
