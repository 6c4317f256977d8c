"""`leeway replay`: look into a buffer, export it, import it. This file imports nothing heavy.

A buffer is named by the directory of its run, whose own Redis is started for the while if the run
is stopped; or, where there is no directory, by the Redis URL and the run's name.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer

from leeway.services.arguments import AsJson, ConfigFile, DryRunOfWork, Overrides, RunDir

if TYPE_CHECKING:
    from leeway.replay.archive_buffer import Imported, OpenBuffer
    from leeway.replay.config import ReplayConfig
    from leeway.replay.store import ReplayStats
    from leeway.services.layout import RunDirectory

T = TypeVar("T")

replay_app = typer.Typer(
    help="Look into the replay buffer of a run, export it, import it.", no_args_is_help=True
)

RETRY_S = 5.0
"""How long a command tries a Redis that does not answer."""

File = Annotated[Path, typer.Argument(metavar="FILE", help="The exported buffer.")]
Url = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="Redis of the run: redis://host:6379/0.")
]
RunName = Annotated[
    str | None, typer.Option("--run", metavar="NAME", help="Run without a directory here.")
]


@replay_app.command("inspect")
def replay_inspect(
    run_dir: RunDir = None,
    group: Annotated[
        str | None,
        typer.Option("--group", metavar="ID", help="Show this group; the start of its id will do."),
    ] = None,
    url: Url = None,
    run: RunName = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show what a buffer holds, who waits, and what was dropped."""
    from rich.console import Console

    from leeway.services import replay_view

    with _opened(run_dir, url, run, config, overrides or ()) as target:
        if group is None:
            found = target.run(replay_view.inspect)
            return _print_json(found) if as_json else replay_view.show(found, Console())
        view = target.run(lambda buffer: replay_view.find_group(buffer, group))
    if as_json:
        return _print_json(view)
    for line in replay_view.describe_group(view):
        typer.echo(line)


@replay_app.command("export")
def replay_export(
    file: File,
    run_dir: RunDir = None,
    url: Url = None,
    run: RunName = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE.")] = False,
    dry_run: DryRunOfWork = False,
    as_json: AsJson = False,
) -> None:
    """Write every group of a buffer to FILE; the run goes on."""
    from leeway.replay.archive_buffer import check_absent, export_groups

    check_absent(file, force)
    with _opened(run_dir, url, run, config, overrides or ()) as target:
        if dry_run:
            return _tell_export(target, file, as_json)
        exported = target.run(lambda buffer: export_groups(buffer, file, force))
    if as_json:
        return _print_json(exported._asdict())
    typer.echo(
        f"{exported.num_groups:,} groups, {exported.num_bytes:,} bytes in {file}; "
        f"{exported.num_gone:,} were trained or dropped meanwhile"
    )


@replay_app.command("import")
def replay_import(
    file: File,
    run_dir: RunDir = None,
    url: Url = None,
    run: RunName = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    dry_run: DryRunOfWork = False,
    as_json: AsJson = False,
) -> None:
    """Store the groups of FILE in a buffer; those it has already are left alone."""
    from leeway.replay.archive_buffer import check_readable, import_groups

    check_readable(file)
    with _opened(run_dir, url, run, config, overrides or (), for_import=True) as target:
        imported = target.run(lambda buffer: import_groups(buffer, file, stores=not dry_run))
    if dry_run:
        return _tell_import(target, file, imported, as_json)
    if as_json:
        _print_json({**imported._asdict(), "fault": imported.fault and str(imported.fault)})
    else:
        typer.echo(_import_words(imported, file))
    if imported.fault is not None:
        raise imported.fault


def _tell_export(target: Target, file: Path, as_json: bool) -> None:
    from leeway.replay.connection import address
    from leeway.services.dry_run import Place, Plan, check_room, check_writable, tell

    async def stats_of(buffer: OpenBuffer) -> ReplayStats:
        return await buffer.replay.stats()

    stats = target.run(stats_of)
    check_writable(file, "FILE")
    check_room(file, stats.num_bytes)
    where = f"{target.name} at {address(target.url)}"
    tell(
        Plan(
            does=f"write {stats.num_ready + stats.num_leased:,} groups",
            reads=[Place(what="buffer", where=where, num_bytes=stats.num_bytes)],
            writes=[Place(what="archive, at most", where=str(file), num_bytes=stats.num_bytes)],
            facts={"learner version": int(stats.learner_version)},
        ),
        as_json,
    )


def _tell_import(target: Target, file: Path, imported: Imported, as_json: bool) -> None:
    from leeway.replay.connection import address
    from leeway.services.dry_run import Place, Plan, found, tell

    if imported.fault is not None:
        raise imported.fault
    tell(
        Plan(
            does=f"store {imported.num_groups:,} groups",
            reads=[found("archive", file)],
            writes=[Place(what="buffer", where=f"{target.name} at {address(target.url)}")],
            facts={
                "learner version": int(imported.learner_version),
                **{f"skipped ({why})": number for why, number in sorted(imported.skipped.items())},
            },
        ),
        as_json,
    )


def _import_words(imported: Imported, file: Path) -> str:
    skipped = "".join(f", {n:,} skipped ({why})" for why, n in sorted(imported.skipped.items()))
    taken = ", taken from the file" if imported.is_version_taken else ""
    return (
        f"{imported.num_groups:,} groups stored from {file}{skipped}; learner version "
        f"{imported.learner_version}{taken}"
    )


def _print_json(found: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(found).decode())


# ---- which buffer


class Target(NamedTuple):
    """A buffer that can be connected to."""

    url: str
    name: str
    config: ReplayConfig
    for_import: bool
    """It may be new."""

    def run(self, job: Callable[[OpenBuffer], Coroutine[Any, Any, T]]) -> T:
        """Do `job` on the buffer in an event loop of its own."""
        import asyncio

        return asyncio.run(self._do(job))

    async def _do(self, job: Callable[[OpenBuffer], Coroutine[Any, Any, T]]) -> T:
        from leeway.replay.archive_buffer import OpenBuffer

        await _check_shards(self)
        buffer = OpenBuffer(self.url, self.name, self.config, RETRY_S)
        try:
            return await job(buffer)
        finally:
            await buffer.close()


@contextmanager
def _opened(
    run_dir: str | None,
    url: str | None,
    name: str | None,
    file: Path | None,
    overrides: Sequence[str],
    for_import: bool = False,
) -> Iterator[Target]:
    """The buffer that the command line names; a Redis that was started for it ends with it."""
    from leeway.replay.errors import ConfigurationError

    if run_dir is None and (url or name or file):
        yield _elsewhere(url, name, file, overrides, for_import)
        return
    if name or file or overrides:
        raise ConfigurationError(
            "--run, --config and --set are for a run without a directory here; "
            "give them with --url, or give RUN_DIR alone"
        )
    from leeway.services.layout import latest_run, open_run

    run = latest_run() if run_dir is None else open_run(run_dir)
    config = run.read_config().replay
    with _redis_of(run, url or config.url) as found:
        yield Target(found, run.root.name, config, for_import)


def _elsewhere(
    url: str | None, name: str | None, file: Path | None, overrides: Sequence[str], for_import: bool
) -> Target:
    from leeway.replay.errors import ConfigurationError
    from leeway.services.config import load

    config = load(file, overrides).replay
    found = url or config.url
    if found is None or name is None:
        raise ConfigurationError(
            "a run without a directory here is named by both --url redis://... and --run NAME"
        )
    if for_import and not (file or overrides):
        # They would be the buffer's own until the run's next call: max_returns among them.
        raise ConfigurationError(
            "an import by --url needs the limits of the run: give --config FILE, as it is started"
        )
    return Target(found, name, config, for_import)


@contextmanager
def _redis_of(run: RunDirectory, url: str | None) -> Iterator[str]:
    """The Redis that the run uses; its own is started for the while if the run is stopped."""
    if url is None and run.running_pid() is not None:
        url = run.read_redis_url()
    if url is not None:
        yield url
        return
    from leeway.replay.server import EmbeddedRedis

    with EmbeddedRedis.start(run.redis, run.root.name) as server:
        yield server.url


async def _check_shards(target: Target) -> None:
    """Raise ConfigurationError where there is no such buffer, or it has more shards than named."""
    from leeway.replay.connection import address
    from leeway.replay.errors import ConfigurationError
    from leeway.replay.sharded_store import check_shards

    is_there = await check_shards(target.url, target.name, target.config.num_shards, RETRY_S)
    if not (is_there or target.for_import):
        raise ConfigurationError(
            f"Redis at {address(target.url)} holds no replay buffer of run {target.name}"
        )
