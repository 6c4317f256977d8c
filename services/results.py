"""The end of a run: the final model, the summary, the report, and what to do next."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from leeway.replay.board import RunBoard
from leeway.services.config import RunConfig
from leeway.services.layout import RunDirectory


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The final numbers; `leeway train --json` prints it as its last line."""

    exact_match_before: float | None
    """Held-out, greedy, before training; None when eval.num_questions is 0."""
    exact_match_after: float | None
    wall_s: float
    """From the start of the run to the last evaluation, loading of engines included; after
    `leeway train --resume` from the start of that command."""
    steps: int
    max_staleness_seen: int
    """Largest staleness of a trained token, in policy versions."""
    publishes: int
    """Versions that at least one engine confirmed."""
    pause_ms_p50: float | None
    """Median over publishes and engines of the time in which nothing was generated."""
    objective: str
    max_staleness: int
    run_dir: str


async def write_results(run: RunDirectory, config: RunConfig, board: RunBoard) -> None:
    """Write model/, report.html and summary.json, which says that the run has ended."""
    started_at = (await board.get_all()).get("run", {}).get("started_at", time.time())
    await asyncio.to_thread(_write, run, config, time.time() - started_at)


def _write(run: RunDirectory, config: RunConfig, wall_s: float) -> None:
    from leeway.learner.checkpoint import latest
    from leeway.services.report import write_report
    from leeway.services.timeline import keep_timeline

    checkpoint = latest(run.checkpoints)
    if checkpoint is not None:
        export_model(checkpoint.path, run.model)
    summary = summarise(run, config, wall_s)
    encoded = msgspec.json.format(msgspec.json.encode(summary)).decode() + "\n"
    partial = run.summary.with_name(f".{run.summary.name}.partial")
    partial.write_text(encoded, encoding="utf-8")
    partial.replace(run.summary)
    write_report(run.root)
    keep_timeline(run)


def show_results(run: RunDirectory, console: Console, json_output: bool) -> None:
    """Say what came out and where it is; with `json_output` the summary as one line on stdout."""
    summary = msgspec.json.decode(run.summary.read_bytes(), type=Summary)
    _print(run, summary, console)
    if json_output:
        print(msgspec.json.encode(summary).decode(), flush=True)


def export_model(checkpoint: Path, model: Path) -> None:
    """Copy the Hugging Face files of a checkpoint, without the training state."""
    partial = model.with_name(model.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(checkpoint, partial, ignore=shutil.ignore_patterns("training*", "*.pt"))
    shutil.rmtree(model, ignore_errors=True)
    partial.rename(model)


def summarise(run: RunDirectory, config: RunConfig, wall_s: float) -> Summary:
    """Read metrics.jsonl, publishes.jsonl and eval.json."""
    steps = read_metrics(run.metrics)
    evals: dict[str, Any] = json.loads(run.eval.read_text()) if run.eval.exists() else {}
    publishes = [line for line in _read_publishes(run.publishes) if line["num_engines"]]
    pauses = [pause * 1e3 for line in publishes for pause in line["pause_s"]]
    return Summary(
        exact_match_before=_exact_match(evals.get("before")),
        exact_match_after=_exact_match(evals.get("after")),
        wall_s=round(wall_s, 1),
        steps=max((int(line["step"]) for line in steps), default=0),
        max_staleness_seen=int(max((line["staleness_max"] for line in steps), default=0)),
        publishes=len({line["version"] for line in publishes}),
        pause_ms_p50=round(statistics.median(pauses), 2) if pauses else None,
        objective=config.learner.objective,
        max_staleness=config.replay.max_staleness,
        run_dir=str(run.root),
    )


def read_metrics(path: Path) -> list[Mapping[str, Any]]:
    """Lines by step; where a resumed run repeated a step, the later line counts."""
    from leeway.services.report import read_lines

    lines = read_lines(path)
    return [line for _, line in sorted({int(line["step"]): line for line in lines}.items())]


def _read_publishes(path: Path) -> list[Mapping[str, Any]]:
    """One line per publish; an engine that came late makes a version be published again."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def _exact_match(entry: dict[str, Any] | None) -> float | None:
    return None if not entry else round(float(entry["scores"]["exact_match"]), 4)


def _print(run: RunDirectory, summary: Summary, console: Console) -> None:
    root = Path(os.path.relpath(run.root, Path.cwd()))
    if summary.exact_match_before is not None and summary.exact_match_after is not None:
        console.print(
            f"\nheld-out exact match {summary.exact_match_before:.3f} -> "
            f"[bold]{summary.exact_match_after:.3f}[/] in {summary.wall_s:.0f} s, "
            f"{summary.steps} steps, staleness at most {summary.max_staleness_seen} "
            f"of {summary.max_staleness}",
            soft_wrap=True,
        )
    console.print(
        f"model    {root / 'model'}   (transformers loads it)\n"
        f"metrics  {root / 'metrics.jsonl'}\n"
        f"report   {root / 'report.html'}   (open it in a browser)\n"
        f"next     leeway train --resume {root} --set learner.num_steps={summary.steps * 2}",
        soft_wrap=True,  # a command that is broken over two lines cannot be copied
        highlight=False,
    )
