"""`leeway status`: where a run stands, over REST. This file imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from leeway.services.completion import run_directories

if TYPE_CHECKING:
    from leeway.services.layout import RunDirectory
    from leeway.services.status_client import Heard, StatusClient


class Target(NamedTuple):
    """Whose status is shown."""

    address: str | None
    """Of its API; None where the run directory names none."""
    run: RunDirectory | None
    """None for a run that was named by its address."""


def status(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN_DIR|URL",
            help="Run directory, or address of its API; else the latest run.",
            autocompletion=run_directories,
        ),
    ] = None,
    watch: Annotated[
        bool | None,
        typer.Option(
            "--watch/--once",
            help="Live until the run ends, or one look. Unless told: live on a terminal, one look "
            "elsewhere and with --json. Live without a terminal is a line for each step.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON line on stdout; with --watch one for each change."),
    ] = False,
) -> None:
    """Show where a run stands, live on a terminal."""
    from leeway.services.status_client import NotAnswering, StatusClient, token_of

    found = target_of(target)
    if found.address is None:
        return _show_ended(found, as_json)
    with StatusClient(found.address, token_of(found.run)) as client:
        try:
            first = client.status()
        except NotAnswering as error:
            return _show_ended(found, as_json, error)
        if watch if watch is not None else _is_shown_live(as_json):
            return _watch(client, found, as_json)
    if as_json:
        typer.echo(first.body)
    else:
        _draw(first)


def target_of(text: str | None) -> Target:
    """The run that RUN_DIR or URL names. Raises ConfigurationError where there is none."""
    if text is not None and text.startswith(("http://", "https://")):
        return Target(text.rstrip("/"), None)
    from leeway.services.layout import latest_run, open_run

    run = latest_run() if text is None else open_run(text)
    state = run.read_state()
    return Target(state.api_address if state else None, run)


def _is_shown_live(as_json: bool) -> bool:
    from rich.console import Console

    return not as_json and Console().is_terminal


def _draw(heard: Heard) -> None:
    from rich.console import Console

    from leeway.services.observability import progress_line, render

    assert heard.snapshot is not None
    console = Console()
    if console.is_terminal:
        console.print(render(heard.snapshot))
    else:
        typer.echo(progress_line(heard.snapshot))


def _watch(client: StatusClient, target: Target, as_json: bool) -> None:
    """Until the run ends, the API stays away, or Ctrl-C."""
    from rich.console import Console

    from leeway.services.observability import Display

    with Display(Console(stderr=as_json), is_quiet=as_json) as display:
        for heard in client.watch():
            if heard.snapshot is None:
                if _has_ended(target):
                    break
                display.note(heard.note)
                continue
            if as_json:
                typer.echo(heard.body)
            display.update(heard.snapshot)
    _show_ended(target, as_json)


def _has_ended(target: Target) -> bool:
    """Whether the run directory says that nobody will answer any more."""
    run = target.run
    if run is None:
        return False
    return run.summary.is_file() or (_is_of_train(run) and run.running_pid() is None)


def _is_of_train(run: RunDirectory) -> bool:
    """Whether `leeway train` is the parent of the run, and not a supervisor that we cannot ask."""
    state = run.read_state()
    return state is None or "train" in state.pids or not state.pids


def _show_ended(target: Target, as_json: bool, error: Exception | None = None) -> None:
    """What the run directory still says once the API is gone."""
    from leeway.replay.errors import LeewayError
    from leeway.services.status_client import NotNow

    run = target.run
    is_over = run is not None and run.summary.is_file()
    if isinstance(error, NotNow) and not is_over:
        raise LeewayError(f"{error}; try again in a few seconds")
    if run is None:
        raise LeewayError(f"{error or f'nobody answers at {target.address}'}; is the run still on?")
    if run.summary.is_file():
        summary = run.summary.read_text(encoding="utf-8").strip()
        text = f"{run.root} has ended; its report is {run.report}\n{summary}"
        typer.echo(summary if as_json else text)
        return
    if error is not None and not _is_of_train(run):
        raise LeewayError(f"{error}; leeway api, which served it, is gone")
    if run.running_pid() is not None:
        what = error or f"the run in {run.root} has no API yet"
        raise LeewayError(f"{what}; try again in a few seconds")
    raise LeewayError(
        f"the run in {run.root} is stopped; go on with leeway train --resume {run.root}"
    )
