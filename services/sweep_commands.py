"""`leeway sweep`: run, report, compare. Importing this file imports nothing heavy.

`leeway sweep FILE` is `leeway sweep run FILE`: the one command that has no verb.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leeway.services.arguments import AsJson, Overrides
from leeway.services.cli_help import HelpGroup, dress

if TYPE_CHECKING:
    from leeway.services.experiments.sweep_compare import Comparison
    from leeway.services.experiments.sweep_file import Sweep
    from leeway.services.experiments.sweep_folder import SweepFolder, SweepState
    from leeway.services.experiments.sweep_report import Findings


class RunByDefault(HelpGroup):
    """A first word that is no subcommand belongs to `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`sweep a.toml --dry-run` -> `sweep run a.toml --dry-run`"""
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


sweep_app = typer.Typer(
    help="Measure how much staleness an objective bears: `leeway sweep FILE`.", no_args_is_help=True
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="TOML file of the sweep.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a sweep.")]
Retention = Annotated[
    float | None,
    typer.Option(
        "--retention", min=0.01, max=1.0, metavar="SHARE", help="Share of the score that is kept."
    ),
]


@sweep_app.command("run")
def sweep_run(
    file: File,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Its folder; runs/sweeps/NAME.")
    ] = None,
    max_minutes: Annotated[
        float | None,
        typer.Option("--max-minutes", min=0.01, help="End then; the same command goes on later."),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run failed arms again.")
    ] = False,
    executor: Annotated[
        str | None,
        typer.Option("--executor", metavar="NAME", help="ray or processes; else the file's."),
    ] = None,
    num_gpus: Annotated[
        float | None,
        typer.Option("--num-gpus", min=0, metavar="N", help="GPUs of one arm; else the file's."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, print the arms, run nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run every arm that has not ended, then write the report."""
    from leeway.services.experiments.sweep_file import load_sweep, with_resources

    sweep = with_resources(load_sweep(file, overrides or ()), executor, num_gpus)
    if dry_run:
        return _print_arms(sweep, _folder_of(sweep, out), as_json)
    _run(sweep, _folder_of(sweep, out), max_minutes, retry_failed, as_json)


@sweep_app.command("report")
def sweep_report(folder: Folder, retention: Retention = None, as_json: AsJson = False) -> None:
    """Write the report of a sweep again, also of one that has not ended."""
    found, page = _report(_existing(folder), retention)
    _show(found, page, as_json)


@sweep_app.command("compare")
def sweep_compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of a sweep.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Folder of another.")],
    across: Annotated[
        list[str] | None,
        typer.Option("--across", metavar="AXIS", help="It may differ within a pair; repeatable."),
    ] = None,
    retention: Retention = None,
    as_json: AsJson = False,
) -> None:
    """Compare two sweeps, series by series at like realised staleness."""
    import msgspec

    from leeway.services.experiments.sweep_compare import compare
    from leeway.services.experiments.sweep_report import findings

    found = [findings(_existing(folder), retention) for folder in (a, b)]
    comparison = compare(found[0], found[1], across or ())
    if as_json:
        typer.echo(msgspec.json.encode(comparison).decode())
    else:
        _show_comparison(comparison)


dress(sweep_app)


# ---- run


def _folder_of(sweep: Sweep, out: Path | None) -> SweepFolder:
    from leeway.services.config import load
    from leeway.services.experiments.sweep_folder import SweepFolder

    if out is not None:
        return SweepFolder(out)
    directory = Path(load(sweep.base, sweep.overrides).directory).expanduser()
    return SweepFolder(directory / "sweeps" / sweep.file.name)


def _run(
    sweep: Sweep, folder: SweepFolder, max_minutes: float | None, retry_failed: bool, as_json: bool
) -> None:
    import asyncio
    import signal

    from leeway.services.experiments.sweep_run import Limits, run_sweep

    # SIGTERM ends the arms as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    limits = Limits(None if max_minutes is None else max_minutes * 60, retry_failed)
    say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    state = asyncio.run(run_sweep(sweep, folder, limits, say))
    left = state.num_arms - state.num_ended
    if state.num_ended == 0:
        return _end(folder, state, as_json)
    found, page = _report(folder, None)
    if not as_json:
        _show(found, page, as_json)
    if left:
        typer.echo(
            f"{left} of {state.num_arms} arms have not ended; the same command goes on", err=True
        )
    _end(folder, state, as_json)


def _end(folder: SweepFolder, state: SweepState, as_json: bool) -> None:
    if as_json:
        import msgspec

        body: dict[str, Any] = msgspec.to_builtins(state)
        body |= {"folder": str(folder.root), "num_left": state.num_arms - state.num_ended}
        if (folder.report / "verdicts.json").is_file():
            body["verdicts"] = msgspec.json.decode((folder.report / "verdicts.json").read_bytes())
        typer.echo(msgspec.json.encode(body).decode())


def _print_arms(sweep: Sweep, folder: SweepFolder, as_json: bool) -> None:
    """The arms, where they would be kept, and how many have ended there."""
    import msgspec

    from leeway.services.dry_run import check_writable
    from leeway.services.experiments.sweep_arms import grid_arms, scan_arms

    grid = grid_arms(sweep)
    ended = folder.ended()
    scan = scan_arms(sweep, grid, ended)
    folder.check(sweep.identity())
    check_writable(folder.root, "--out")
    if as_json:
        arms = [
            {"name": a.name, "is_scan": a.is_scan, "rate_from_scan": a.needs_rate, **a.values}
            for a in (*scan, *grid)
        ]
        body = {"dry_run": True, "name": sweep.file.name, "folder": str(folder.root)}
        return typer.echo(
            msgspec.json.encode(body | {"num_ended": len(ended), "arms": arms}).decode()
        )
    for arm in scan:
        typer.echo(f"scan  {arm.name}")
    for arm in grid:
        rate = "  (learning rate: from the scan)" if arm.needs_rate else ""
        typer.echo(f"grid  {arm.name}{rate}")
    typer.echo(f"{len(scan)} arms of the scan, {len(grid)} of the grid; some may be the same")
    resources = sweep.file.resources
    typer.echo(
        f"each with {resources.num_cpus:g} cores and {resources.num_gpus:g} GPUs, by "
        f"{resources.executor}; kept in {folder.root}, where {len(ended)} have ended"
    )


# ---- report


def _existing(path: Path) -> SweepFolder:
    from leeway.services.experiments.sweep_folder import SweepFolder

    folder = SweepFolder(path)
    folder.read_plan()
    return folder


def _report(folder: SweepFolder, retention: float | None) -> tuple[Findings, Path]:
    from leeway.services.experiments.sweep_report import findings, write_report

    page = write_report(folder, retention)
    return findings(folder, retention), page


def _show(found: Findings, page: Path, as_json: bool) -> None:
    import json

    if as_json:
        verdicts = [verdict.model_dump() for verdict in found.verdicts]
        body = {"name": found.name, "report": str(page), "verdicts": verdicts}
        return typer.echo(json.dumps(body, ensure_ascii=False))
    for verdict in found.verdicts:
        typer.echo(verdict.sentence)
    typer.echo(f"report  {page}   (open it in a browser)")


def _show_comparison(found: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    from leeway.services.experiments.sweep_compare import label

    columns = ("series", "learning rate", "staleness", found.a, found.b, "difference")
    table = Table(*columns, title="held-out score")
    for pair in found.pairs:
        half = "" if pair.half_width is None else f" ± {pair.half_width:.3f}"
        mark = " *" if pair.is_clear else ""
        table.add_row(
            label(pair.series_a, pair.series_b),
            f"{pair.learning_rate_a:g}, {pair.learning_rate_b:g}",
            f"{pair.staleness_a:.3g}, {pair.staleness_b:.3g}",
            f"{pair.score_a:.3f}",
            f"{pair.score_b:.3f}",
            f"{pair.difference:+.3f}{half}{mark}",
        )
    console = Console()
    console.print(table)
    console.print("* the 95 % interval of the difference leaves 0 out", highlight=False)
    for name, (a, b) in found.kept.items():
        kept = ["nothing to compare with" if k is None else f"{k:.3g} versions" for k in (a, b)]
        console.print(f"{name}: kept up to {kept[0]} in {found.a}, {kept[1]} in {found.b}")
    for key, (a, b) in found.settings.items():
        console.print(f"different: {key}: {a} | {b}", highlight=False, soft_wrap=True)
    for where, names in ((found.a, found.only_a), (found.b, found.only_b)):
        if names:
            console.print(f"only in {where}: {', '.join(names)}")
