"""`leeway config`: show, check and describe configurations. This file imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leeway.services.arguments import AsJson, File, Overrides

if TYPE_CHECKING:
    from leeway.services.config import RunConfig

config_app = typer.Typer(help="Show, check and describe configurations.", no_args_is_help=True)


@config_app.command("show")
def config_show(file: File = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the whole configuration, defaults filled in, secrets masked."""
    from leeway.services.config import load

    print_configuration(load(file, overrides or ()), as_json)


def print_configuration(config: RunConfig, as_json: bool) -> None:
    """As TOML that `load` reads back, or as one JSON line; secrets masked either way."""
    from leeway.services.config import dump, masked

    typer.echo(masked(config).model_dump_json() if as_json else dump(config), nl=as_json)


def print_remarks(config: RunConfig) -> None:
    """What is allowed but probably not meant, on stderr, so that a dry run's output stays clean."""
    from leeway.services.config import remarks

    for remark in remarks(config):
        typer.echo(f"note: {remark}", err=True)


@config_app.command("validate")
def config_validate(
    file: File = None, overrides: Overrides = None, as_json: AsJson = False
) -> None:
    """Check a configuration, and the corpus and questions it names, without starting anything."""
    from leeway.replay.errors import LeewayError
    from leeway.services.config import check_files, load, remarks

    source = source_of(file)
    try:
        config = load(file, overrides or ())
        check_files(config)
    except LeewayError as error:
        if as_json:
            _print_verdict(source, [], str(error))
        raise
    if as_json:
        _print_verdict(source, remarks(config), None)
        return
    for remark in remarks(config):
        typer.echo(f"note: {remark}")
    typer.echo(f"{source} is valid")


def source_of(file: Path | None) -> str:
    """What a sentence about a configuration calls it."""
    return "the default configuration" if file is None else str(file)


def _print_verdict(source: str, notes: list[str], error: str | None) -> None:
    import json

    verdict = {"source": source, "is_valid": error is None, "notes": notes, "error": error}
    typer.echo(json.dumps(verdict, ensure_ascii=False))


@config_app.command("schema")
def config_schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="A reference page instead of JSON schema.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON schema on one line; else indented.")
    ] = False,
) -> None:
    """Print every key with its type, default and meaning, as JSON schema."""
    import json

    from leeway.replay.errors import ConfigurationError
    from leeway.services.config import RunConfig, describe

    if markdown and as_json:
        raise ConfigurationError("--markdown and --json are two forms of one page; give one")
    if markdown:
        typer.echo(describe(), nl=False)
    else:
        schema = RunConfig.model_json_schema()
        typer.echo(json.dumps(schema, indent=None if as_json else 2))
