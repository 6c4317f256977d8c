"""sweep.html: what the sweep says first, then how it was made, then every run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

from leeway.services.experiments.sweep_canvas import Drawn
from leeway.services.experiments.sweep_rows import Cell, Row
from leeway.services.experiments.sweep_verdict import Verdict
from leeway.services.page_frame import framed

if TYPE_CHECKING:
    from leeway.services.experiments.sweep_folder import SweepState
    from leeway.services.experiments.sweep_report import Findings


def page(found: Findings, drawn: Sequence[Drawn], state: SweepState | None) -> str:
    """The whole page, without outside references."""
    first = [d for d in drawn if not d.picture.name.startswith("runs_")]
    rest = [d for d in drawn if d.picture.name.startswith("runs_")]
    body = "\n".join(
        [
            _head(found, state),
            _verdicts(found),
            "".join(_figure(one) for one in first),
            _delays(found),
            _rates(found),
            _folded("What happened inside the runs", "".join(_figure(one) for one in rest)),
            _folded(f"Every run ({len(found.grid_rows)})", _runs(found.grid_rows)),
            _scan(found),
            _method(found),
        ]
    )
    return fill(f"Leeway · sweep {found.name}", body)


def fill(title: str, body: str) -> str:
    """A page of this style around `body`, which is HTML; also that of a recording's report."""
    return framed(title, _STYLE, body)


def _head(found: Findings, state: SweepState | None) -> str:
    counts = {
        "runs": len(found.grid_rows),
        "collapsed": sum(row.status == "collapsed" for row in found.grid_rows),
        "failed": sum(row.status == "failed" for row in found.grid_rows),
        "hours of runs": f"{sum(row.wall_s for row in found.rows) / 3600:.2g}",
    }
    left = state.num_arms - state.num_ended if state is not None and state.phase != "done" else 0
    note = f'<p class="warn">{left} runs have not ended yet.</p>' if left > 0 else ""
    tiles = "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in counts.items())
    devices = ", ".join(sorted({r.device for r in found.results if r.device})) or "–"
    mode = {
        "exact": "every trained token exactly so many versions old",
        "bound": "the live asynchronous loop under a bound",
    }[str(found.plan["mode"])]
    return (
        f'<header><p class="over">Staleness sweep · {mode} · {escape(devices)}</p>'
        f'<h1>{escape(found.name)}</h1><dl class="tiles">{tiles}</dl>{note}</header>'
    )


def _verdicts(found: Findings) -> str:
    sentences = "".join(f"<li>{escape(v.sentence)}</li>" for v in found.verdicts)
    rows = "".join(_verdict_row(verdict) for verdict in found.verdicts)
    return f"""<section><h2>What it says</h2><ul class="verdicts">{sentences}</ul>
<div class="wide"><table><caption>Largest realised staleness that keeps {found.retention:.0%} of the
on-policy score</caption><thead><tr><th>series</th><td>on-policy score</td>
<td>kept up to, versions</td><td>score there</td><td>lost at, versions</td><td>score there</td>
<td>seeds</td><td>collapsed</td><td>failed</td></tr></thead><tbody>{rows}</tbody></table></div>
</section>"""


def _verdict_row(v: Verdict) -> str:
    cells = (
        _number(v.on_policy), _number(v.kept_staleness, 1), _number(v.kept_score),
        _number(v.lost_staleness, 1), _number(v.lost_score), str(v.num_seeds),
        str(v.num_collapsed), str(v.num_failed),
    )  # fmt: skip
    return _row(v.series, cells)


def _delays(found: Findings) -> str:
    if not found.delays:
        return ""
    rows = "".join(_row(name, [", ".join(parts)]) for name, parts in _delay_parts(found).items())
    text = (
        f"Steps until a run first scores {found.retention:.0%} of what its objective scores "
        "on-policy, by realised staleness: the median over seeds, to the next evaluation."
    )
    return (
        f"<section><h2>Cost in steps</h2><p>{text}</p>"
        + table("<tr><th>series</th><td>staleness: steps</td></tr>", rows)
        + "</section>"
    )


def _delay_parts(found: Findings) -> dict[str, list[str]]:
    """By series: 0: 32, 16: 48 (2 of 3 runs), 64: none in 80"""
    parts: dict[str, list[str]] = {}
    for one in sorted(found.delays, key=lambda delay: delay.staleness):
        steps = f"none in {one.last_step}" if one.step is None else f"{one.step:g}"
        some = f" ({one.num_reached} of {one.num_runs} runs)"
        note = some if 0 < one.num_reached < one.num_runs else ""
        parts.setdefault(one.series, []).append(f"{_number(one.staleness, 1)}: {steps}{note}")
    return {v.series: parts[v.series] for v in found.verdicts if v.series in parts}


def _row(head: str, cells: Iterable[str]) -> str:
    return f"<tr><th>{escape(head)}</th>{''.join(f'<td>{escape(c)}</td>' for c in cells)}</tr>"


def _number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "–"
    shown = f"{value:.{digits}f}"
    return shown.removesuffix(".0") if digits == 1 else shown


def _figure(drawn: Drawn) -> str:
    picture = drawn.picture
    return (
        f'<figure id="{picture.name}"><figcaption><h2>{escape(picture.title)}</h2>'
        f"<p>{escape(picture.note)}</p></figcaption>{drawn.inline}</figure>"
    )


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""


def _rates(found: Findings) -> str:
    if not found.rates:
        rates = sorted({row.learning_rate for row in found.grid_rows})
        shown = ", ".join(f"{rate:g}" for rate in rates)
        text = f"No scan was asked for; {shown} as configured."
        return f"<section><h2>Learning rates</h2><p>{text}</p></section>"
    scan = found.plan["scan"]
    tried = [float(rate) for rate in scan["learning_rate"]]
    rows = "".join(
        _row(name, [f"{rate:g}", *(_scan_score(found, name, one, rate) for one in tried)])
        for name, rate in found.rates.items()
    )
    heads = "".join(f"<td>{rate:g}</td>" for rate in tried)
    edge = [
        name
        for name, rate in found.rates.items()
        if len(tried) > 1 and rate in (min(tried), max(tried))
    ]
    note = (
        f"<p>The rate lies at an end of the scan for {escape(', '.join(edge))}, so a better "
        "one may lie beyond it.</p>"
        if edge
        else ""
    )
    seeds = f"seed{'s' if len(scan['seed']) > 1 else ''} {', '.join(map(str, scan['seed']))}"
    rule = "the highest mean of final scores, of equals the smaller rate"
    if scan["tolerance"]:
        rule = (
            f"the smallest rate whose mean of final scores is within {scan['tolerance']:g} of the "
            "highest"
        )
    return f"""<section><h2>Learning rates</h2><p>The same scan at staleness 0 for every objective,
{seeds}: {rule}.</p>
{table(f"<tr><th>objective</th><td>taken</td>{heads}</tr>", rows)}{note}</section>"""


def _scan_score(found: Findings, objective: str, rate: float, taken: float) -> str:
    rows = [
        row
        for row in found.rows
        if row.is_scan and row.objective == objective and row.learning_rate == rate
    ]
    scores = [row.score for row in rows if row.score is not None]
    if not scores:
        return "failed" if rows else "–"
    mark = " ◂" if rate == taken else ""
    return f"{sum(scores) / len(scores):.3f}{mark}"


_COLUMNS: Final = (
    "run", "realised staleness", "learning rate", "before", "score", "best", "collapse at step",
    "steps", "seconds", "clipped tokens", "clipped turns", "mean ‖C‖", "steps rescaled",
    "gradient norm", "spikes", "ESS", "mean KL", "entropy at end", "reasoning tokens at end",
)  # fmt: skip


def _runs(rows: Sequence[Row]) -> str:
    head, *others = _COLUMNS
    heads = f"<th>{head}</th>" + "".join(f"<td>{name}</td>" for name in others)
    body = "".join(_run_row(row) for row in rows)
    return table(f"<tr>{heads}</tr>", body, "wide runs")


def _run_row(row: Row) -> str:
    name = f"{row.series}, seed {row.seed}"
    if row.status == "failed":
        wide = len(_COLUMNS) - 1
        reason = escape(row.reason or "")
        return (
            f'<tr class="failed"><th>{escape(name)}</th>'
            f'<td colspan="{wide}">set to {row.staleness_set} versions; failed: {reason}</td></tr>'
        )
    cells = (
        _number(row.staleness, 2), f"{row.learning_rate:g}", _number(row.score_before),
        _number(row.score), _number(row.score_best),
        "" if row.collapse_step is None else str(row.collapse_step), str(row.steps),
        f"{row.wall_s:.0f}", _share(row.clip_fraction_tokens), _share(row.clip_fraction_turns),
        _short(row.ctn_norm), str(row.num_rescaled), _short(row.grad_norm), str(row.num_spikes),
        _number(row.effective_sample_size), _short(row.kl), _short(row.entropy_last),
        _number(row.think_tokens_last, 1),
    )  # fmt: skip
    tag = ' class="collapsed"' if row.status == "collapsed" else ""
    return _row(name, cells).replace("<tr>", f"<tr{tag}>", 1)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}"


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _scan(found: Findings) -> str:
    names = {row.arm for row in found.grid_rows}
    rows = [row for row in found.rows if row.arm not in names]
    return _folded(f"Runs of the scan alone ({len(rows)})", _runs(rows)) if rows else ""


def _method(found: Findings) -> str:
    incomplete = [cell for cell in found.cells if cell.is_incomplete]
    behind = ", behind the ramp" if found.plan["mode"] == "exact" else ""
    ended = " It is ended there, and keeps the score it fell to." if found.rule.stop_early else ""
    notes = [
        "Staleness is the realised one: learner version when a trajectory is trained, less the "
        f"oldest version that sampled one of its tokens; mean over all trained ones{behind}. "
        "No picture shows the setting.",
        "The score is exact match on held-out questions, the same ones for every run, played "
        "greedily after the last step.",
        "Bands and intervals are 95 % by Student's t over seeds. They hold for one point, not for "
        "the best of many.",
        found.rule.sentence + ended,
        "A failed run has no score and enters no mean; a collapsed one does.",
        *([_missing(incomplete)] if incomplete else []),
    ]
    keys = json.dumps(found.plan["set"] | {"grid": found.plan["grid"]}, indent=1)
    return (
        f"<section><h2>How to read this</h2>{listed(notes)}<details><summary>Settings of the sweep"
        f"</summary><pre>{escape(keys)}</pre></details></section>"
    )


def listed(notes: Sequence[str]) -> str:
    """Sentences as a list."""
    return f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"


def table(head: str, body: str, kind: str = "wide") -> str:
    """Rows that scroll sideways where the page is narrow. Both are HTML."""
    return f'<div class="{kind}"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _missing(cells: Sequence[Cell]) -> str:
    parts = [
        f"{c.series} at {_number(c.staleness, 1)} ({c.num_failed} of {c.num_arms})" for c in cells
    ]
    return f"Means over fewer runs than were asked for, because some failed: {'; '.join(parts)}."


_STYLE: Final = """
:root { --soft: #f6e9e7; }
@media (prefers-color-scheme: dark) { :root { --soft: #33211f; } }
h1 { margin-bottom: 16px; }
h2 { margin: 0 0 8px; font-size: 18px; font-weight: 600; }
section, figure, details { margin: 32px 0 0; } p { margin: 0 0 8px; }
.warn { color: var(--bad); margin-top: 12px; }
ul { margin: 0 0 16px; padding-left: 20px; } li { margin: 4px 0; }
.verdicts { list-style: none; padding: 0; } .verdicts li { padding: 6px 0 6px 12px;
  border-left: 3px solid var(--rule); }
figure { margin-left: 0; margin-right: 0; padding: 18px 18px 10px; }
figcaption p { color: var(--muted); font-size: 13px; }
figure svg { max-height: 900px; }
#heat_map svg { max-width: 860px; }
.wide { overflow-x: auto; }
table { font-size: 13px; }
caption { color: var(--muted); padding-bottom: 6px; }
th, td { padding: 5px 10px 5px 0; border-top: 1px solid var(--rule); text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap; font-weight: 400; }
th { text-align: left; }
thead th, thead td { color: var(--muted); border-top: 0; vertical-align: bottom;
  white-space: normal; font-size: 12px; }
.runs table { font-size: 12px; } tr.collapsed { background: var(--soft); }
tr.failed td { text-align: left; color: var(--bad); white-space: normal; }
summary { cursor: pointer; font-size: 18px; font-weight: 600; padding: 4px 0; }
section summary { font-size: 14px; }
details figure { margin-top: 16px; }
pre { font: 12px/1.5 ui-monospace, Menlo, Consolas, monospace; }
"""
