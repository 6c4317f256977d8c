"""The `leeway` command. Every command imports what it needs when it runs; `--help` imports nothing.

Exit codes: 0 done, 1 the run failed, 2 bad input, 130 Ctrl-C. An error is one line on stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from leeway.services.bench.commands import Overrides, bench_app
from leeway.services.evaluation.commands import evaluate
from leeway.services.export import export
from leeway.services.replay_commands import replay_app
from leeway.services.retriever_commands import retriever_app
from leeway.services.trajectory_commands import trajectories_app

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from leeway.services.config import RunConfig
    from leeway.services.layout import RunDirectory
    from leeway.services.snapshot import Snapshot

app = typer.Typer(
    name="leeway",
    help="Train search agents from data that has drifted, and know how much drift they bear.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show, check and describe configurations.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")
app.add_typer(replay_app, name="replay")
app.add_typer(retriever_app, name="retriever")
app.add_typer(trajectories_app, name="trajectories")
app.command("eval")(evaluate)
app.command("export")(export)

File = Annotated[Path | None, typer.Argument(help="TOML file; without one, the defaults.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]


# --- train --------------------------------------------------------------------------------------


@app.command()
def train(
    file: File = None,
    overrides: Overrides = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one JSON line on stdout; progress on stderr.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this directory.", metavar="RUN_DIR")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check, show the configuration, start nothing."),
    ] = False,
) -> None:
    """Train on this machine: replay, engines, rollouts, learner and API, until the last step."""
    if resume is not None and file is not None:
        raise typer.BadParameter("give a FILE or --resume RUN_DIR, not both", param_hint="FILE")
    config, run = _configuration(file, resume, overrides or ())
    from leeway.services.config import check_environment, dump, remarks

    check_environment(config, _source(file, resume))
    for remark in remarks(config):
        typer.echo(f"note: {remark}", err=True)
    if dry_run:
        typer.echo(_masked_json(config) if as_json else dump(config), nl=as_json)
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


def _source(file: Path | None, resume: Path | None) -> str:
    return str(file or resume or "the default configuration")


def _masked_json(config: RunConfig) -> str:
    from leeway.services.config import masked

    return masked(config).model_dump_json()


# --- status -------------------------------------------------------------------------------------


@app.command()
def status(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN_DIR|URL]", help="Run directory or API address; else the latest run."
        ),
    ] = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Draw it again every second.")] = False,
) -> None:
    """Show where a run stands."""
    address, run = _address_of(target)
    body = _fetch(address) if address else None
    if body is None:
        _show_ended(run, address, as_json)
    elif as_json:
        typer.echo(body)
    elif watch:
        _watch(address or "", body)
    else:
        from rich.console import Console

        _draw(Console(), _snapshot(body))


def _address_of(target: str | None) -> tuple[str | None, RunDirectory | None]:
    if target is not None and target.startswith(("http://", "https://")):
        return target.rstrip("/"), None
    from leeway.services.layout import latest_run, open_run

    run = latest_run() if target is None else open_run(target)
    state = run.read_state()
    return (state.api_address if state else None), run


def _fetch(address: str) -> str | None:
    """The body of /v1/status; None if nobody listens there."""
    import httpx

    from leeway.replay.errors import LeewayError

    try:
        answer = httpx.get(f"{address}/v1/status", timeout=10, trust_env=False)
    except httpx.TransportError:
        return None
    except httpx.InvalidURL as error:
        raise LeewayError(f"{address} is not a URL ({error})") from None
    if answer.is_success:
        return answer.text
    is_problem = "problem+json" in answer.headers.get("content-type", "")
    detail = answer.json()["detail"] if is_problem else answer.reason_phrase
    raise LeewayError(f"{address} answered {answer.status_code}: {detail}")


def _show_ended(run: RunDirectory | None, address: str | None, as_json: bool) -> None:
    """What the run directory still says once the API is gone."""
    from leeway.replay.errors import LeewayError

    if run is None:
        raise LeewayError(f"nobody answers at {address}; is the run still on?")
    if run.running_pid() is not None:
        raise LeewayError(f"the run in {run.root} has no API yet; try again in a few seconds")
    if not run.summary.is_file():
        raise LeewayError(
            f"the run in {run.root} is stopped; go on with leeway train --resume {run.root}"
        )
    summary = run.summary.read_text(encoding="utf-8").strip()
    typer.echo(
        summary if as_json else f"{run.root} has ended; its report is {run.report}\n{summary}"
    )


def _snapshot(body: str) -> Snapshot:
    import msgspec

    from leeway.replay.errors import LeewayError
    from leeway.services.snapshot import Snapshot

    try:
        return msgspec.json.decode(body, type=Snapshot)
    except msgspec.DecodeError as error:
        raise LeewayError(f"the answer is not the status of a leeway run ({error})") from None


def _draw(console: Console, snapshot: Snapshot) -> None:
    from leeway.services.observability import progress_line, render

    if console.is_terminal:
        console.print(render(snapshot))
    else:
        typer.echo(progress_line(snapshot))


def _watch(address: str, body: str | None) -> None:
    """Until the API goes away or Ctrl-C."""
    import time

    from rich.console import Console

    from leeway.services.observability import Display

    with Display(Console()) as display:
        while body is not None:
            display.update(_snapshot(body))
            time.sleep(1)
            body = _fetch(address)


# --- config -------------------------------------------------------------------------------------


@config_app.command("show")
def config_show(file: File = None, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the whole configuration, defaults filled in, secrets masked."""
    from leeway.services.config import dump, load

    config = load(file, overrides or ())
    typer.echo(_masked_json(config) if as_json else dump(config), nl=as_json)


@config_app.command("validate")
def config_validate(file: File = None, overrides: Overrides = None) -> None:
    """Check a configuration, and the corpus and questions it names, without starting anything."""
    from leeway.services.config import check_files, load, remarks

    config = load(file, overrides or ())
    check_files(config)
    for remark in remarks(config):
        typer.echo(f"note: {remark}")
    typer.echo(f"{_source(file, None)} is valid")


@config_app.command("schema")
def config_schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="A reference page instead of JSON schema.")
    ] = False,
) -> None:
    """Print every key with its type, default and meaning, as JSON schema."""
    import json

    from leeway.services.config import RunConfig, describe

    if markdown:
        typer.echo(describe(), nl=False)
    else:
        typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))


# --- other commands -----------------------------------------------------------------------------


@app.command(
    # Its options are described by the command itself, where they are read.
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def warmstart(context: typer.Context) -> None:
    """Train the bundled policy anew, supervised on scripted episodes."""
    from leeway.services.processes.warmstart import main as run_warmstart

    sys.argv = ["leeway warmstart", *context.args]
    run_warmstart()


@app.command()
def doctor() -> None:
    """Say whether this machine can run, and what is missing."""
    from leeway.services.doctor import examine

    findings = examine()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = "ok  " if finding.is_fine else "FAIL"
        typer.echo(f"{mark}  {finding.name:{width}}  {finding.text}")
    raise typer.Exit(0 if all(finding.is_fine for finding in findings) else 1)


# --- entry --------------------------------------------------------------------------------------


def main() -> NoReturn:
    """Entry point of the `leeway` command."""
    try:
        app()
    except Exception as error:
        sys.exit(_report(error))
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _report(error: Exception) -> int:
    """Print an error that was raised on purpose in one line; any other keeps its traceback."""
    from leeway.replay.errors import ConfigurationError, DataError, LeewayError

    if not isinstance(error, LeewayError):
        raise error
    print(f"leeway: {error}", file=sys.stderr)
    return 2 if isinstance(error, ConfigurationError | DataError) else 1


if __name__ == "__main__":
    main()
