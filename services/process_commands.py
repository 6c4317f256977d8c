"""`leeway learn`, `serve`, `api` and `rollout`: the processes of a run, started one by one.

`leeway train` starts the first two itself, and the API beside them. Imports only what all commands
share; the rest when one runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leeway.services.arguments import AsJson, DryRun, DryRunOfWork
from leeway.services.completion import configuration_files, run_directories

if TYPE_CHECKING:
    from leeway.services.config import RunConfig
    from leeway.services.layout import RunDirectory

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="TOML file, the same for every process of the run.",
        autocompletion=configuration_files,
    ),
]
RunDir = Annotated[
    Path,
    typer.Option(
        "--run-dir",
        metavar="DIR",
        help="Run directory, made where it is missing; its last name is the run's.",
        autocompletion=run_directories,
    ),
]
PlanAsJson = Annotated[
    bool, typer.Option("--json", help="With --dry-run: the configuration as one JSON line.")
]
LearnAsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="With --dry-run: what would be done as one JSON line; with --from: the result.",
    ),
]


def learn(
    file: File,
    run_dir: RunDir,
    archive: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="ARCHIVE",
            help="Train on these groups instead of a run's; written by replay export or rollout.",
        ),
    ] = None,
    stay: Annotated[
        bool,
        typer.Option("--stay", help="Wait for SIGTERM at the end, for a supervisor that restarts."),
    ] = False,
    dry_run: DryRun = False,
    as_json: LearnAsJson = False,
) -> None:
    """Run the learner of a run, or train on a recording."""
    if archive is not None:
        return _learn_from(file, archive, run_dir, stay=stay, dry_run=dry_run, as_json=as_json)
    if dry_run:
        return _show_plan(file, run_dir, as_json)
    config, run = _joined(file, run_dir)
    from leeway.services.processes.foster import fork_below
    from leeway.services.processes.learn import grace_s

    if "RANK" not in os.environ:  # torchrun is the parent of its ranks
        fork_below(grace_s() + 5)  # torchrun ends after its ranks
    from leeway.services.processes.learn import learn as run_learner

    raise typer.Exit(run_learner(config, run, file.resolve(), stays=stay))


def _learn_from(
    file: Path, archive: Path, run_dir: Path, *, stay: bool, dry_run: bool, as_json: bool
) -> None:
    if stay:
        raise typer.BadParameter("--stay is for a run; a recording ends", param_hint="--stay")
    from leeway.services.config import load

    config = load(file)
    if dry_run:
        return _tell_learn_from(config, archive, run_dir, as_json)
    from leeway.services.experiments.trace_replay import learn_from

    raise typer.Exit(learn_from(config, archive, run_dir, as_json=as_json))


def _tell_learn_from(config: RunConfig, archive: Path, run_dir: Path, as_json: bool) -> None:
    from leeway.actors.config import model_dir
    from leeway.services.config import check_files
    from leeway.services.dry_run import Place, Plan, check_writable, found, tell
    from leeway.services.experiments.trace_replay import plan_of

    check_files(config)
    num_groups, num_steps = plan_of(config, archive, run_dir)
    check_writable(run_dir, "--run-dir")
    tell(
        Plan(
            does=f"train {num_steps:,} steps of {config.replay.groups_per_step} groups with "
            f"{config.learner.objective}, under {config.replay.staleness_policy}",
            reads=[found("archive", archive), found("policy", model_dir(config.model))],
            writes=[Place(what="run directory", where=str(run_dir))],
            facts={"groups recorded": num_groups},
        ),
        as_json,
    )


def serve(
    file: File, run_dir: RunDir, dry_run: DryRun = False, as_json: PlanAsJson = False
) -> None:
    """Run Ray with engines, retriever and rollout workers, and move the run through its phases."""
    if dry_run:
        return _show_plan(file, run_dir, as_json)
    config, run = _joined(file, run_dir)
    from leeway.services.processes.foster import fork_below

    fork_below()
    from leeway.services.processes.serve import serve as run_serving

    raise typer.Exit(run_serving(config, run))


def api(
    file: File,
    run_dir: RunDir,
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on; else api.host.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Port; else api.port.")
    ] = None,
    dry_run: DryRun = False,
    as_json: PlanAsJson = False,
) -> None:
    """Run the REST API and the dashboard of a run."""
    chosen = {"api.host": host, "api.port": port}
    given = {key: value for key, value in chosen.items() if value is not None}
    if dry_run:
        return _show_plan(file, run_dir, as_json, has_files=False, given=given)
    config, run = _joined(file, run_dir, has_files=False)
    from leeway.services.api.process import serve_api
    from leeway.services.config import with_values

    raise typer.Exit(serve_api(with_values(config, given), run))


def rollout(
    file: File,
    num_groups: Annotated[
        int, typer.Option("--num-groups", min=1, metavar="N", help="Groups to play.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="ARCHIVE", help="File that receives them.")],
    force: Annotated[bool, typer.Option("--force", help="Replace ARCHIVE.")] = False,
    dry_run: DryRunOfWork = False,
    as_json: AsJson = False,
) -> None:
    """Play groups without a learner, and write them as `leeway replay export` does."""
    _log()
    from leeway.replay.archive_buffer import check_absent
    from leeway.services.config import check_files, load

    config = load(file)
    check_absent(out, force)
    check_files(config)
    if dry_run:
        return _tell_rollout(config, num_groups, out, as_json)
    from leeway.services.processes.rollout import collect

    found = collect(config, num_groups, out, overwrite=force)
    if as_json:
        import json

        written = {"num_groups": found.num_groups, "num_bytes": found.num_bytes, "file": str(out)}
        typer.echo(json.dumps(written))
    else:
        typer.echo(f"{found.num_groups:,} groups, {found.num_bytes:,} bytes in {out}")


def _tell_rollout(config: RunConfig, num_groups: int, out: Path, as_json: bool) -> None:
    from leeway.actors.config import corpus_file, model_dir, train_file
    from leeway.replay.connection import address
    from leeway.replay.server import check_url
    from leeway.services.config_machine import check_packages
    from leeway.services.dry_run import Place, Plan, check_writable, found, tell

    check_packages(config)
    check_writable(out, "--out")
    redis = "one of its own, for the while"
    if config.replay.url is not None:
        check_url(config.replay.url)
        redis = address(config.replay.url)
    size, search = config.rollout.group_size, config.search
    passages = (
        Place(what="passages", where=search.retriever_url)
        if search.retriever_url
        else found("passages", Path(search.index) if search.index else corpus_file(search))
    )
    sources = [Path(source.path) for source in config.data.sources] or [train_file(config.data)]
    tell(
        Plan(
            does=f"play {num_groups:,} groups of {size} with the {config.policy.backend} policy",
            reads=[
                found("policy", model_dir(config.model)),
                passages,
                *(found("questions", path) for path in sources),
            ],
            writes=[Place(what="archive", where=str(out))],
            facts={
                "trajectories": num_groups * size,
                "tokens at most": num_groups * size * config.policy.max_model_len,
                "workers": config.rollout.num_workers,
                "engines": config.policy.num_replicas,
                "Redis": redis,
            },
        ),
        as_json,
    )


def _show_plan(
    file: Path,
    run_dir: Path,
    as_json: bool,
    *,
    has_files: bool = True,
    given: dict[str, str | int] | None = None,
) -> None:
    """Check what the process needs: configuration, with the values `given` in place of its own, run
    directory, Redis, and the files unless it `has_files` False. Start nothing."""
    from leeway.services.config import check_files, load, with_values
    from leeway.services.config_commands import print_configuration, print_remarks
    from leeway.services.dry_run import check_writable
    from leeway.services.processes.joining import redis_url_of

    config = with_values(load(file, has_files=has_files), given or {})
    url = redis_url_of(config)
    from leeway.replay.keys import replay_prefix
    from leeway.replay.server import check_url

    run = run_dir.expanduser().resolve()
    replay_prefix(run.name)  # it is part of every Redis key
    check_writable(run / "config.toml", "--run-dir")
    check_url(url)
    if has_files:
        check_files(config)
    print_remarks(config)
    print_configuration(config, as_json)


def _joined(file: Path, run_dir: Path, *, has_files: bool = True) -> tuple[RunConfig, RunDirectory]:
    """The configuration, without which no process of a run starts, and its directory."""
    _log()
    from leeway.services.config import load
    from leeway.services.layout import join_run
    from leeway.services.processes.joining import redis_url_of

    config = load(file, has_files=has_files)
    redis_url_of(config)
    return config, join_run(config, file, run_dir)


def _log() -> None:
    """These commands have no screen of their own: what they do is told line by line on stderr."""
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
