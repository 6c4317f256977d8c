"""`leeway doctor`: the command and how its findings are shown. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leeway.services.arguments import AsJson, ConfigFile, Overrides
from leeway.services.completion import run_directories

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from leeway.services.doctor.examination import Subject
    from leeway.services.doctor.finding import Finding


def doctor(
    run_dir: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN_DIR",
            help="Look at this run too: Redis, engines, clocks, API.",
            autocompletion=run_directories,
        ),
    ] = None,
    config: ConfigFile = None,
    redis: Annotated[
        str | None,
        typer.Option("--redis", metavar="URL", help="Look at this Redis: redis://host:6379/0."),
    ] = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Load the model in engine and learner, and compare their log-probs; a minute.",
        ),
    ] = False,
    bundle: Annotated[
        bool,
        typer.Option(
            "--bundle",
            help="Collect the evidence of RUN_DIR in one archive there, without secrets.",
        ),
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong with this machine or a run, and what to do.

    Exit code 0: nothing; 1: warnings; 2: errors, or bad input.
    """
    if bundle:
        _refuse_beside_bundle({"--deep": deep, "--config": config, "--redis": redis}, overrides)
        return _bundle(run_dir, as_json)
    subject = subject_of(run_dir, config, redis, overrides or ())
    from rich.console import Console

    from leeway.services.doctor.examination import examine
    from leeway.services.doctor.finding import exit_code

    with _Progress(Console(stderr=True)) as progress:
        findings = list(examine(subject, deep=deep, progress=progress.say))
    if as_json:
        _print_json(findings)
    else:
        show(findings, Console(highlight=False))
    raise typer.Exit(exit_code(findings))


def _refuse_beside_bundle(options: dict[str, object], overrides: list[str] | None) -> None:
    given = [name for name, value in (options | {"--set": overrides}).items() if value]
    if given:
        raise typer.BadParameter(
            f"{', '.join(given)} change nothing of what is collected; leave them out",
            param_hint="--bundle",
        )


def _bundle(run_dir: str | None, as_json: bool) -> None:
    from leeway.services.layout import open_run

    if run_dir is None:
        raise typer.BadParameter("name the run: leeway doctor RUN_DIR --bundle")
    from leeway.services.doctor.bundle import write_bundle

    found = write_bundle(open_run(run_dir))
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(found).decode())
    else:
        typer.echo(f"{len(found.files)} files, {found.num_bytes:,} bytes in {found.path}")


def subject_of(
    run_dir: str | None, file: Path | None, redis: str | None, overrides: Sequence[str]
) -> Subject:
    """What the command line names. Raises ConfigurationError for what contradicts itself."""
    from leeway.replay.errors import ConfigurationError
    from leeway.services.config import load
    from leeway.services.config_commands import source_of
    from leeway.services.doctor.examination import Subject

    if run_dir is None:
        config = load(file, overrides)
        return Subject(config, source_of(file), redis or config.replay.url)
    if file is not None or overrides:
        raise ConfigurationError(
            "RUN_DIR has a configuration of its own; leave out --config and --set, or RUN_DIR"
        )
    from leeway.services.layout import open_run

    run = open_run(run_dir)
    state = run.read_state()
    config = run.read_config()
    url = redis or config.replay.url
    if url is None and run.running_pid() is not None and run.redis_url.is_file():
        url = run.read_redis_url()
    address = state.api_address if state and run.running_pid() is not None else None
    if state is not None and "train" not in state.pids:
        address = state.api_address
    return Subject(config, str(run.config), url, run, address)


class _Progress:
    """What is looked at now, on a terminal alone: it goes when the answer comes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("looking") if _is_live(console) else None

    def __enter__(self) -> _Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, what: str) -> None:
        """Next is `what`."""
        if self._status is not None:
            self._status.update(f"looking at {what}")


def _is_live(console: Console) -> bool:
    from leeway.services.observability import is_live

    return is_live(console)


def _print_json(findings: Sequence[Finding]) -> None:
    import msgspec

    from leeway.services.doctor.finding import exit_code, worst

    answer = {
        "severity": worst(findings),
        "exit_code": exit_code(findings),
        "findings": list(findings),
    }
    typer.echo(msgspec.json.encode(answer).decode())


def show(findings: Sequence[Finding], console: Console) -> None:
    """A line for each finding, by part; what to do below it; and how many are wrong at the end."""
    from leeway.services.observability import is_live

    if not is_live(console):
        for line in plain_lines(findings):
            typer.echo(line)
        return
    console.print(_table(findings))
    console.print(summary(findings), style="bold")


MARKS = {"ok": "ok", "note": "note", "warning": "WARN", "error": "FAIL"}
COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


def plain_lines(findings: Sequence[Finding]) -> list[str]:
    """`FAIL  redis  reachable: no answer; start it` a line, for logs and grep."""
    width = max((len(finding.part) for finding in findings), default=0)
    lines = []
    for finding in findings:
        text = f"{finding.name}: {finding.text}"
        if finding.remedy is not None:
            text += f"; {finding.remedy}"
        lines.append(f"{MARKS[finding.severity]:4}  {finding.part:{width}}  {text}")
    return [*lines, summary(findings)]


def _table(findings: Sequence[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(max_width=24)
    table.add_column(overflow="fold")
    last = ""
    for finding in findings:
        text = Text(finding.text)
        if finding.remedy is not None:
            text.append(f"\n→ {finding.remedy}", style="italic")
        mark = Text(MARKS[finding.severity], style=COLOURS[finding.severity])
        part = finding.part if finding.part != last else ""
        table.add_row(mark, part, Text(finding.name), text)
        last = finding.part
    return table


def summary(findings: Sequence[Finding]) -> str:
    """`2 errors, 1 warning, 20 fine`"""
    count = dict.fromkeys(MARKS, 0)
    for finding in findings:
        count[finding.severity] += 1
    words = [
        f"{number} {name}{'s' * (number != 1)}"
        for name, number in (("error", count["error"]), ("warning", count["warning"]))
        if number
    ]
    return ", ".join([*words, f"{count['ok'] + count['note']} fine"])
