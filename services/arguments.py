"""Arguments and options that several commands share, so that one name means one thing everywhere.

Light: it is imported by every call of `leeway`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leeway.services.completion import configuration_files, override_keys, run_directories

File = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE",
        help="TOML file; without one, the defaults.",
        autocompletion=configuration_files,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="TOML file of the run.", autocompletion=configuration_files
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace one key: learner.num_steps=20. May be given often.",
        autocompletion=override_keys,
    ),
]
RunDir = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN_DIR",
        help="Run directory; else the latest run.",
        autocompletion=run_directories,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON line last on stdout; all else goes to stderr.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check, show the configuration, start nothing.")
]
DryRunOfWork = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, say what would be done, do nothing.")
]
