"""`leeway trajectories`: read what was played, token by token. This file imports nothing heavy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from leeway.services.arguments import AsJson
from leeway.services.completion import run_directories

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from leeway.services.trajectory_source import Choice, Chosen
    from leeway.services.trajectory_view import Episode

trajectories_app = typer.Typer(
    help="Read trajectories of a run, of an exported buffer, or of an evaluation.",
    no_args_is_help=True,
)

TERMINAL_LIMIT = 10
PAGE_LIMIT = 200


@trajectories_app.callback()
def _trajectories() -> None:
    """A callback keeps `show` a command of its own while it is the only one."""


@trajectories_app.command("show")
def trajectories_show(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="SOURCE",
            help="Run directory, exported buffer, or folder of leeway eval; else the latest run.",
            autocompletion=run_directories,
        ),
    ] = None,
    group: Annotated[
        str | None, typer.Option(metavar="ID", help="This group; the start of its id will do.")
    ] = None,
    trajectory: Annotated[
        str | None, typer.Option(metavar="ID", help="This trajectory; the start of its id will do.")
    ] = None,
    question: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The start of a question's id, or words of its text."),
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Questions of this benchmark or data set alone."),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only what was answered wrongly.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"Most trajectories; {TERMINAL_LIMIT}, with --html {PAGE_LIMIT}."),
    ] = None,
    colour_by: Annotated[
        Literal["turn", "trained", "version", "ratio"],
        typer.Option(help="What the colour of a token says."),
    ] = "turn",
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page instead.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of the tokenizer, or bundled; for an archive."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Model whose importance ratios to show, or bundled."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show trajectories turn by turn: text, trained tokens, versions, ratios."""
    from leeway.services.trajectory_source import Choice

    limit = limit or (PAGE_LIMIT if html else TERMINAL_LIMIT)
    choice = Choice(limit, group, trajectory, question, benchmark, failed)
    chosen = _chosen(source, choice)
    episodes = _episodes(chosen, tokenizer, model, colour_by == "ratio")
    more = f"There are more than these {limit}: see --limit." if chosen.is_cut else ""
    if as_json:
        import msgspec

        shown = {"source": chosen.name, "is_cut": chosen.is_cut, "trajectories": episodes}
        typer.echo(msgspec.json.encode(shown).decode())
    if html is not None:
        from leeway.services.trajectory_html import write_html

        write_html(html, f"Trajectories · {chosen.name}", episodes, colour_by=colour_by, note=more)
        typer.echo(f"{len(episodes):,} trajectories in {html}; open it in a browser", err=as_json)
    elif not as_json:
        from rich.console import Console

        from leeway.services.trajectory_terminal import show

        show(Console(highlight=False), chosen.name, episodes, colour_by, more)


def _chosen(source: Path | None, choice: Choice) -> Chosen:
    """What the choice wants. Raises ConfigurationError where that is nothing."""
    from leeway.replay.errors import ConfigurationError
    from leeway.services.layout import latest_run
    from leeway.services.trajectory_source import read_source

    chosen = read_source(latest_run().root if source is None else source, choice)
    if not chosen.found:
        among = f"{chosen.num_groups:,} group{'s' * (chosen.num_groups != 1)}"
        raise ConfigurationError(f"no trajectory of the {chosen.name} is like that, among {among}")
    return chosen


def _episodes(
    chosen: Chosen, tokenizer: str | None, model: str | None, needs_ratio: bool
) -> list[Episode]:
    from leeway.actors.config import model_dir
    from leeway.actors.tokens import Tokens
    from leeway.replay.errors import ConfigurationError
    from leeway.services.trajectory_view import build_episode, failed_episode

    current = model_dir(model) if model is not None else None
    if current is None and needs_ratio:
        current = _checkpoint(chosen)
    folder = model_dir(tokenizer) if tokenizer else chosen.model or current
    if folder is None:
        raise ConfigurationError(
            f"{chosen.name}: an archive holds token ids alone; give the folder of the model that"
            " played them with --tokenizer DIR"
        )
    tokens = Tokens.load(folder)
    ratios = iter(_ratios(current, chosen))
    return [
        failed_episode(found.question, found.error or "")
        if found.group is None or found.trajectory is None
        else build_episode(
            found.trajectory,
            found.group.group_id,
            found.group.question_id,
            tokens,
            question=found.question,
            scores=found.scores,
            ratios=next(ratios, None),
        )
        for found in chosen.found
    ]


def _checkpoint(chosen: Chosen) -> Path:
    """The last one of the run. Raises ConfigurationError where there is none."""
    from leeway.replay.errors import ConfigurationError

    checkpoint = None
    if chosen.run is not None:
        from leeway.learner.checkpoint import latest

        checkpoint = latest(chosen.run.checkpoints)
    if checkpoint is None:
        raise ConfigurationError(
            f"--colour-by ratio needs the model to compare with: the {chosen.name} has no"
            " checkpoint, so give --model DIR"
        )
    return checkpoint.path


def _ratios(model: Path | None, chosen: Chosen) -> list[NDArray[np.float32]]:
    """In the order of the trajectories that were played to their end; empty without a model."""
    trajectories = [found.trajectory for found in chosen.found if found.trajectory is not None]
    if model is None or not trajectories:
        return []
    from leeway.services.trajectory_ratio import token_ratios

    print(f"reading {len(trajectories):,} trajectories with {model}", file=sys.stderr)
    return token_ratios(model, trajectories)
