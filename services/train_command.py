"""`leeway train`. This file imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leeway.services.arguments import AsJson, DryRun, File, Overrides
from leeway.services.completion import run_directories

if TYPE_CHECKING:
    from leeway.services.config import RunConfig
    from leeway.services.layout import RunDirectory


def train(
    file: File = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on with the run in this directory.",
            metavar="RUN_DIR",
            autocompletion=run_directories,
        ),
    ] = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train on this machine: replay, engines, rollouts, learner and API, until the last step."""
    if resume is not None and file is not None:
        raise typer.BadParameter("give a FILE or --resume RUN_DIR, not both", param_hint="FILE")
    config, run = _configuration(file, resume, overrides or ())
    from leeway.services.config import check_environment
    from leeway.services.config_commands import print_configuration, print_remarks, source_of

    check_environment(config, source_of(file or resume))
    print_remarks(config)
    if dry_run:
        print_configuration(config, as_json)
        return
    from leeway.services.layout import create_run

    if run is None:
        run = create_run(config)
    else:
        run.write_config(config)
    from leeway.services.processes.train import run as run_training

    raise typer.Exit(run_training(config, run, json_output=as_json, resume=resume is not None))


def _configuration(
    file: Path | None, resume: Path | None, overrides: Sequence[str]
) -> tuple[RunConfig, RunDirectory | None]:
    """The configuration, and the run directory if there is one already."""
    if resume is not None:
        from leeway.services.layout import open_for_resume

        run = open_for_resume(resume)
        return run.read_config(overrides), run
    from leeway.services.config import load

    return load(file, overrides), None
