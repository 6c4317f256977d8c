"""`leeway soak`. This file imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leeway.services.arguments import AsJson, File, Overrides


def soak(
    file: File = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="How long, from the first optimizer step on.")
    ] = 120.0,
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between samples.")] = 10.0,
    warm_up_minutes: Annotated[
        float | None,
        typer.Option(min=0.0, help="Samples before are not judged; else the first quarter."),
    ] = None,
    judge: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV", help="Judge the samples of a soak, also of one that is under way."
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Train for hours and tell whether memory, files, Redis or Ray objects grow.

    Exit code 1: something grows, or cannot be told from growth.
    """
    if judge is not None and file is not None:
        raise typer.BadParameter("give a FILE or --judge CSV, not both", param_hint="--judge")
    samples = judge or _watched(file, overrides or [], minutes, every_s)
    from leeway.services.soak.judging import judge_file
    from leeway.services.soak.show import show

    report = judge_file(samples, warm_up_minutes)
    show(report, as_json=as_json)
    raise typer.Exit(0 if report.is_flat else 1)


def _watched(file: Path | None, overrides: list[str], minutes: float, every_s: float) -> Path:
    import asyncio

    from leeway.services.config import check_environment, load
    from leeway.services.config_commands import source_of
    from leeway.services.layout import create_run
    from leeway.services.soak.run import check_times, prepared
    from leeway.services.soak.run import soak as watch

    check_times(minutes, every_s)
    config = prepared(load(file, overrides))
    check_environment(config, source_of(file))
    run = create_run(config)
    typer.echo(f"run directory  {run.root}", err=True)
    return asyncio.run(watch(config, run, minutes, every_s))
