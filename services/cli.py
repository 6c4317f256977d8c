"""The `leeway` command. Every command imports what it needs when it runs; `--help` imports nothing.

Exit codes: 0 done, 1 the run failed, 2 bad input, 3 it failed and would again, 130 Ctrl-C. An error
is one line on stderr.
`leeway doctor` and `leeway sweep` say in their help what else theirs mean.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Final, NoReturn

import typer
from typer.exceptions import TyperException

from leeway.services.bench.commands import bench_app
from leeway.services.cli_help import CONTEXT, dress, usage_sentence
from leeway.services.config_commands import config_app
from leeway.services.doctor.command import doctor
from leeway.services.evaluation.commands import evaluate
from leeway.services.export import export
from leeway.services.process_commands import api, learn, rollout, serve
from leeway.services.replay_commands import replay_app
from leeway.services.retriever_commands import retriever_app
from leeway.services.soak.command import soak
from leeway.services.status_command import status
from leeway.services.sweep_commands import RunByDefault, sweep_app
from leeway.services.timeline_command import timeline
from leeway.services.train_command import train
from leeway.services.trajectory_commands import trajectories_app
from leeway.services.warmstart_command import warmstart

app = typer.Typer(
    name="leeway",
    help="Train search agents from data that has drifted, and know how much drift they bear.",
    no_args_is_help=True,
    # Typer's own options for it would import pydantic at every call; those below do the same.
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=CONTEXT,
)
for command in (
    train, learn, serve, api, rollout, status, timeline, export, doctor, soak, warmstart
):  # fmt: skip
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")
app.add_typer(replay_app, name="replay")
app.add_typer(retriever_app, name="retriever")
app.add_typer(trajectories_app, name="trajectories")
app.add_typer(sweep_app, name="sweep", cls=RunByDefault)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        typer.echo(f"leeway {version('leeway-rl')}")
        raise typer.Exit


def _install_completion(context: typer.Context, param: Any, is_wanted: bool) -> None:
    if is_wanted:
        from typer.completion import install_callback

        install_callback(context, param, is_wanted)


def _show_completion(context: typer.Context, param: Any, is_wanted: bool) -> None:
    if is_wanted:
        from typer.completion import show_callback

        show_callback(context, param, is_wanted)


@app.callback()
def _leeway(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
    install_completion: Annotated[
        bool,
        typer.Option(
            "--install-completion",
            help="Let the current shell complete commands, options, run directories and keys.",
            callback=_install_completion,
            is_eager=True,
        ),
    ] = False,
    show_completion: Annotated[
        bool,
        typer.Option(
            "--show-completion",
            help="Print what --install-completion would install.",
            callback=_show_completion,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """A callback holds the options of `leeway` itself."""


dress(app)
# Dressed already: its group has a class of its own.

# --- entry --------------------------------------------------------------------------------------


COMPLETION: Final = "_LEEWAY_COMPLETE"
"""Set by the shell's completion script: what is printed is then read by the shell."""


def main() -> NoReturn:
    """Entry point of the `leeway` command."""
    if COMPLETION in os.environ:
        from typer.completion import completion_init

        completion_init()
    try:
        code = app(prog_name="leeway", standalone_mode=False)
    except Exception as error:
        sys.exit(_report(error))
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _report(error: Exception) -> int:
    """Print an error that was raised on purpose in one line; any other keeps its traceback."""
    if isinstance(error, typer.Abort):
        return 130
    if isinstance(error, TyperException):
        return _report_usage(error)
    from leeway.replay.errors import LeewayError

    if not isinstance(error, LeewayError):
        raise error
    print(f"leeway: {error}", file=sys.stderr)
    return error.exit_code


def _report_usage(error: TyperException) -> int:
    """A command line that cannot be read; without any word behind a group, its help page."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)
    else:
        print(f"leeway: {usage_sentence(error, app, sys.argv[1:])}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
