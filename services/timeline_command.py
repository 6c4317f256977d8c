"""`leeway timeline`: what a run did when, as a Chrome trace. This file imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leeway.services.arguments import AsJson, DryRunOfWork, RunDir


def timeline(
    run_dir: RunDir = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to; else timeline.json in the run directory."),
    ] = None,
    dry_run: DryRunOfWork = False,
    as_json: AsJson = False,
) -> None:
    """Draw a run as a Chrome trace: who waited, trained, published, and what engines did."""
    from leeway.services.dry_run import check_writable
    from leeway.services.layout import latest_run, open_run
    from leeway.services.timeline import check_has_steps, read_records, write_timeline

    run = latest_run() if run_dir is None else open_run(run_dir)
    path = run.timeline if out is None else out
    _check_is_no_folder(path)
    check_writable(path, "--out")
    records = read_records(run)
    check_has_steps(run, records)
    if dry_run:
        return _tell(run.metrics, run.publishes, path, as_json)
    path.parent.mkdir(parents=True, exist_ok=True)
    records = write_timeline(run, path)
    _say(path, len(records.steps), len(records.publishes), records.num_unread, as_json)


def _check_is_no_folder(path: Path) -> None:
    if path.is_dir():
        from leeway.replay.errors import ConfigurationError

        raise ConfigurationError(f"--out {path} is a folder; name a file in it")


def _tell(metrics: Path, publishes: Path, path: Path, as_json: bool) -> None:
    from leeway.services.dry_run import Place, Plan, found, tell

    reads = [found("steps", metrics)]
    if publishes.is_file():
        reads.append(found("publishes", publishes))
    trace = Place(what="trace", where=str(path))
    tell(Plan(does="write a Chrome trace", reads=reads, writes=[trace]), as_json)


def _say(path: Path, num_steps: int, num_publishes: int, num_unread: int, as_json: bool) -> None:
    if num_unread:
        typer.echo(f"{num_unread} lines could not be read and are left out", err=True)
    if as_json:
        import json

        numbers = {"steps": num_steps, "publishes": num_publishes, "unread": num_unread}
        typer.echo(json.dumps({"file": str(path), **numbers}))
    else:
        typer.echo(
            f"{num_steps} steps and {num_publishes} publishes in {path}; open it in Perfetto or "
            "chrome://tracing"
        )
