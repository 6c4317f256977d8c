"""`report.html` of a run: one file without outside references, readable in light and dark."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from leeway.services.layout import RunDirectory
from leeway.services.page_frame import framed
from leeway.services.report_plots import Plot, draw_panels
from leeway.services.snapshot import exact_match_of

MAX_SAMPLES: Final = 4
"""Transcripts shown."""

Json = Mapping[str, Any]


def write_report(run_dir: Path | RunDirectory) -> Path:
    """Write report.html from what the run left behind; whatever is missing is left out."""
    run = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory(Path(run_dir))
    lines, evals, summary = read_lines(run.metrics), _read_json(run.eval), _read_json(run.summary)
    config = tomllib.loads(run.config.read_text("utf-8")) if run.config.is_file() else {}
    bound = summary.get("max_staleness", config.get("replay", {}).get("max_staleness"))
    plots = draw_panels(lines, _held_out(evals), bound)
    body = "\n".join(
        [
            _headline(str(config.get("name", run.root.name)), run.root.name, summary, bound),
            _plots_section(plots),
            _transcripts_section(evals),
            _config_section(config),
        ]
    )
    page = framed(f"Leeway · {run.root.name}", _STYLE, body)
    partial = run.report.with_suffix(".partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(run.report)
    return run.report


def read_lines(path: Path) -> list[Json]:
    """Metrics by step. Where a resumed run repeated a step, the later line counts; a last line that
    was cut off by a crash is left out.
    """
    if not path.is_file():
        return []
    by_step: dict[int, Json] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and "step" in line:
            by_step[int(line["step"])] = _with_rates(line)
    return [by_step[step] for step in sorted(by_step)]


def _with_rates(line: Json) -> Json:
    """Add what follows from a line: 300 tokens in 2 s of training after 1 s of waiting are 100
    tokens/s, and the learner waited a third of the time; if 0.6 s of it were for a group that was
    due, a fifth.
    """
    wait_s, seconds = line.get("wait_s"), line.get("seconds")
    if wait_s is None or seconds is None or wait_s + seconds <= 0:
        return line
    whole = wait_s + seconds
    blocked_s = line.get("wait_s/blocked", 0.0)
    rates = {"idle_share": wait_s / whole, "blocked_share": blocked_s / whole}
    if "num_tokens_trained" in line:
        rates["trained_tokens_per_s"] = line["num_tokens_trained"] / whole
    return rates | dict(line)


def _read_json(path: Path) -> Json:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _evaluations(evals: Json) -> Iterator[Json]:
    for entry in [evals.get("before"), *(evals.get("history") or []), evals.get("after")]:
        if entry:
            yield entry


def _held_out(evals: Json) -> list[tuple[int, float]]:
    """Step and exact match of every evaluation."""
    return [
        (int(entry.get("step", 0)), score)
        for entry in _evaluations(evals)
        if (score := exact_match_of(entry)) is not None
    ]


# --- headline -----------------------------------------------------------------------------------


def _headline(name: str, run: str, summary: Json, bound: int | None) -> str:
    before, after = summary.get("exact_match_before"), summary.get("exact_match_after")
    seen = summary.get("max_staleness_seen")
    facts = [
        ("wall time", _duration(summary.get("wall_s"))),
        ("steps", _text(summary.get("steps"))),
        ("objective", _text(summary.get("objective"))),
        ("staleness, max of bound", f"{_text(seen)} of {_text(bound)}"),
        ("publishes", _text(summary.get("publishes"))),
        ("pause, median", _text(summary.get("pause_ms_p50"), " ms")),
    ]
    tiles = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    return f"""<header>
<p class="over">{escape(run)}</p>
<h1>{escape(name)}</h1>
<div class="result"><p class="label">held-out exact match</p>
<p class="score"><span>{_score(before)}</span> <span class="arrow">→</span>
<strong>{_score(after)}</strong></p></div>
<dl class="tiles">{tiles}</dl>
</header>"""


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _text(value: object, unit: str = "") -> str:
    return "–" if value is None else f"{value}{unit}"


def _duration(seconds: float | None) -> str:
    """372.4 -> 6 min 12 s"""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


# --- plots --------------------------------------------------------------------------------------


def _plots_section(plots: Sequence[Plot]) -> str:
    if not plots:
        return '<section><p class="empty">No optimizer step was recorded.</p></section>'
    return f'<section class="plots">{"".join(_figure(plot) for plot in plots)}</section>'


def _figure(plot: Plot) -> str:
    legend = "".join(
        f'<span class="key"><i style="background:var(--series-{i})"></i>{escape(label)}</span>'
        for label, i in plot.legend
    )
    unit = f' <span class="unit">{escape(plot.unit)}</span>' if plot.unit else ""
    return (
        f"<figure><figcaption><h2>{escape(plot.title)}{unit}</h2>"
        f'<p>{escape(plot.note)}</p><p class="legend">{legend}</p></figcaption>'
        f"{plot.svg}</figure>"
    )


# --- transcripts --------------------------------------------------------------------------------

_TAGS: Final = "think|search|information|answer"
_TAG: Final = re.compile(rf"<({_TAGS})>.*?(?:</\1>|(?=<(?:{_TAGS})>)|\Z)", re.DOTALL)


def _transcripts_section(evals: Json) -> str:
    before = _samples(evals.get("before"))
    last = next((e for e in reversed(list(_evaluations(evals))) if e.get("samples")), None)
    after = _samples(last) if last is not evals.get("before") else {}
    questions = list(dict.fromkeys([*before, *after]))
    # A pair says more than either alone.
    questions.sort(key=lambda question: not (question in before and question in after))
    if not questions:
        return ""
    rows = "".join(_pair(before.get(q), after.get(q)) for q in questions[:MAX_SAMPLES])
    return f"""<section class="transcripts"><h2>Transcripts</h2>
<p class="legend"><span class="think">think</span> <span class="search">search</span>
<span class="information">information (not trained)</span> <span class="answer">answer</span></p>
<div class="pair head"><p>before training</p><p>after training</p></div>{rows}</section>"""


def _samples(evaluation: Json | None) -> dict[str, Json]:
    samples = (evaluation or {}).get("samples") or []
    return {str(sample["question_id"]): sample for sample in samples}


def _pair(before: Json | None, after: Json | None) -> str:
    return f'<div class="pair">{_transcript(before)}{_transcript(after)}</div>'


def _transcript(sample: Json | None) -> str:
    if sample is None:
        return '<article class="empty">not played</article>'
    golden = " or ".join(str(answer) for answer in sample.get("golden_answers", []))
    reward = float(sample.get("reward", 0.0))
    # A right answer after a malformed action has lost a penalty, so it may be below 1.
    verdict = "right" if reward > 0.5 else "wrong"
    return (
        f"<article><pre>{coloured(str(sample.get('text', '')))}</pre>"
        f'<footer><span class="{verdict}">reward {reward:g}</span>'
        f"<span>ended by {escape(str(sample.get('stop_reason', '?')))}</span>"
        f"<span>right: {escape(golden)}</span></footer></article>"
    )


def coloured(text: str) -> str:
    """Escaped text, each tagged part in a span; a tag without an end reaches to the next one."""
    parts, position = [], 0
    for found in _TAG.finditer(text):
        parts.append(escape(text[position : found.start()]))
        parts.append(f'<span class="{found[1]}">{escape(found[0])}</span>')
        position = found.end()
    return "".join([*parts, escape(text[position:])])


# --- configuration ------------------------------------------------------------------------------


def _config_section(config: Json) -> str:
    if not config:
        return ""
    top = {key: value for key, value in config.items() if not isinstance(value, dict)}
    tables = {"run": top} | {key: value for key, value in config.items() if isinstance(value, dict)}
    blocks = "".join(_config_table(name, keys) for name, keys in tables.items())
    return f'<section><h2>Configuration</h2><div class="config">{blocks}</div></section>'


def _config_table(name: str, keys: Json) -> str:
    rows = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(json.dumps(value, ensure_ascii=False))}</td></tr>"
        for key, value in keys.items()
    )
    return f"<table><caption>{escape(name)}</caption>{rows}</table>"


_STYLE: Final = """
:root { --series-1: #1769aa; --series-2: #d07a1f; --series-3: #1a8a72;
  --think: #5b646c; --search: #1769aa; --information: #8a6d1f; --answer: #1a7f5a; }
@media (prefers-color-scheme: dark) { :root {
  --series-1: #63aee8; --series-2: #eda354; --series-3: #54c7ab;
  --think: #a3adb5; --search: #7dbcf0; --information: #d9b95c; --answer: #5fd0a2; } }
h2 { margin: 0; font-size: 15px; font-weight: 600; }
section { margin-top: 40px; } section > h2 { font-size: 20px; margin-bottom: 12px; }
p { margin: 0; }
.result { margin: 20px 0 24px; } .label { color: var(--muted); font-size: 13px; }
.score { font-size: 44px; line-height: 1.15; font-variant-numeric: tabular-nums; }
.score span { color: var(--muted); } .score .arrow { font-size: 30px; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 16px; }
figure { margin: 0; padding: 16px 16px 8px; display: flex; flex-direction: column; }
figcaption { flex: 1; } figcaption p { color: var(--muted); font-size: 12.5px; }
.unit { color: var(--muted); font-weight: 400; }
.legend { min-height: 22px; margin-top: 4px; font-size: 12.5px; color: var(--muted); }
.key { margin-right: 14px; white-space: nowrap; } .key i { display: inline-block; width: 10px;
  height: 10px; border-radius: 2px; margin-right: 5px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; margin-top: 12px; }
.pair.head { color: var(--muted); font-size: 13px; }
article { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: 14px;
  min-width: 0; display: flex; flex-direction: column; }
article.empty, .empty { color: var(--muted); }
pre { margin: 0; flex: 1; overflow-wrap: anywhere;
  font: 12.5px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.think { color: var(--think); font-style: italic; }
.search { color: var(--search); font-weight: 600; }
.information { color: var(--information); } .answer { color: var(--answer); font-weight: 600; }
article footer { display: flex; flex-wrap: wrap; gap: 4px 16px; margin-top: 10px; padding-top: 8px;
  border-top: 1px solid var(--rule); font-size: 12.5px; color: var(--muted); }
.right { color: var(--good); } .wrong { color: var(--bad); }
.config { columns: 3 300px; column-gap: 24px; }
table { font-size: 12.5px; break-inside: avoid; margin-bottom: 18px; }
caption { font-weight: 600; padding-bottom: 4px; }
th { text-align: left; font-weight: 400; color: var(--muted); }
th, td { padding: 3px 0; border-top: 1px solid var(--rule); vertical-align: top; }
td { text-align: right; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
@media (max-width: 720px) { .pair { grid-template-columns: 1fr; } .pair.head { display: none; } }
"""
