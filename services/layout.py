"""The run directory: where a run keeps what it writes, and what a later command finds again.

runs/demo-20261127-143000/
├── config.toml      the resolved configuration, secrets masked
├── run.json         RunState: processes, addresses (what `status` and `--resume` read)
├── redis_url        the Redis URL with its password, mode 0600
├── metrics.jsonl    one line per optimizer step
├── publishes.jsonl one line per published version
├── events.jsonl     one line per event
├── eval.json        held-out evaluations and sample transcripts
├── summary.json     the final numbers; written last, so a run that has it has ended
├── report.html
├── wandb-id        what wandb knows the run by
├── timeline.json   who waited, trained and published when, and what engines did: a Chrome trace
├── checkpoints/     model, optimizer and position, to resume from
├── model/           the final policy, Hugging Face format
├── redis/           append-only file of the embedded server
└── logs/            one file per process
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from leeway.replay.errors import ConfigurationError

if TYPE_CHECKING:
    from leeway.services.config import RunConfig

LogName = Literal["redis", "serve", "learner", "api"]


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of a run say about themselves, for other commands."""

    name: str
    started_at: float
    """Unix time of the first start; a resumed run keeps it."""
    pids: dict[str, int] = {}
    """Process ids by part: train, redis, serve, learner."""
    api_address: str | None = None
    """http://host:port of the API; None before it listens."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run. The object holds no open file."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def state(self) -> Path:
        return self.root / "run.json"

    @property
    def redis_url(self) -> Path:
        return self.root / "redis_url"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def publishes(self) -> Path:
        return self.root / "publishes.jsonl"

    @property
    def timeline(self) -> Path:
        return self.root / "timeline.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def eval(self) -> Path:
        return self.root / "eval.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def redis(self) -> Path:
        return self.root / "redis"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, name: LogName) -> Path:
        """Log file of one process."""
        return self.logs / f"{name}.log"

    # --- configuration and state ---

    def write_config(self, config: RunConfig) -> None:
        """Keep the resolved configuration, and the Redis URL apart from it."""
        from leeway.services.config import dump

        _replace(self.config, dump(config).encode())
        if config.replay.url is not None:
            self.write_redis_url(config.replay.url)

    def read_config(self, overrides: Sequence[str] = ()) -> RunConfig:
        """The configuration the run was started with; the Redis password comes from its file."""
        from leeway.services.config import MASK, load, with_values

        config = load(self.config, overrides)
        if config.replay.url is None or MASK not in config.replay.url:
            return config
        return with_values(config, {"replay.url": self.read_redis_url()})

    def write_redis_url(self, url: str) -> None:
        """Store the URL, password included, readable by the owner only."""
        _replace(self.redis_url, url.encode(), mode=0o600)

    def read_redis_url(self) -> str:
        if not self.redis_url.is_file():
            raise ConfigurationError(
                f"{self.redis_url} is missing, so the Redis of this run is unknown; "
                "give it with --set replay.url=redis://..."
            )
        return self.redis_url.read_text(encoding="utf-8").strip()

    def write_state(self, state: RunState) -> None:
        """Replace run.json in one step, so that a reader never sees half of it."""
        _replace(self.state, msgspec.json.format(msgspec.json.encode(state)) + b"\n")

    def read_state(self) -> RunState | None:
        """None before the run wrote it."""
        if not self.state.is_file():
            return None
        try:
            return msgspec.json.decode(self.state.read_bytes(), type=RunState)
        except msgspec.DecodeError as error:
            raise ConfigurationError(
                f"{self.state} is not the state of a run ({error}); remove it to resume without it"
            ) from None

    def running_pid(self) -> int | None:
        """Process id of the `leeway train` that owns the directory now, if it lives."""
        state = self.read_state()
        pid = state.pids.get("train") if state else None
        return pid if pid is not None and pid != os.getpid() and _is_leeway(pid) else None


def create_run(config: RunConfig, now: float | None = None) -> RunDirectory:
    """Make a new directory `{directory}/{name}-{YYYYmmdd-HHMMSS}`, unique, with config.toml."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    parent = Path(config.directory).expanduser().resolve()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        run = RunDirectory(_make_unique(parent / f"{config.name}-{stamp}"))
        for folder in (run.logs, run.checkpoints, run.redis):
            folder.mkdir()
    except OSError as error:
        raise ConfigurationError(
            f'directory = "{config.directory}" cannot hold the run ({error.strerror}: '
            f"{error.filename}); name a folder that can be written"
        ) from None
    run.write_config(config)
    return run


def join_run(config: RunConfig, file: Path, directory: Path) -> RunDirectory:
    """The directory of a run whose processes are started one by one, made where it is missing; each
    may see a disk of its own. `file` is the configuration they share. Its base name is the run's.
    """
    from leeway.replay.keys import replay_prefix

    run = RunDirectory(directory.expanduser().resolve())
    replay_prefix(run.root.name)  # it is part of every Redis key
    try:
        for folder in (run.logs, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        if file.resolve() != run.config:
            run.write_config(config)
    except OSError as error:
        raise ConfigurationError(
            f"--run-dir {directory} cannot hold the run ({error.strerror}: {error.filename}); "
            "name a folder that can be written"
        ) from None
    return run


def _make_unique(wanted: Path) -> Path:
    """runs/demo-1, or runs/demo-1-2 if another run of the same second has it."""
    number = 1
    while True:
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def open_run(path: Path | str) -> RunDirectory:
    """An existing run directory."""
    root = Path(path).resolve()
    if not root.is_dir():
        raise ConfigurationError(
            f"{path} is not a folder; give a run directory, such as runs/demo-1"
        )
    run = RunDirectory(root)
    if not run.config.is_file():
        raise ConfigurationError(f"{path} holds no config.toml, so it is not a run directory")
    return run


def open_for_resume(path: Path | str) -> RunDirectory:
    """An existing run directory that no living process owns."""
    run = open_run(path)
    pid = run.running_pid()
    if pid is not None:
        raise ConfigurationError(
            f"{path} is still being trained by process {pid}; "
            f"stop it with Ctrl-C or `kill {pid}` first"
        )
    return run


def latest_run(directory: Path | str = "runs") -> RunDirectory:
    """The run that was started last in a folder of runs."""
    found = [path.parent for path in Path(directory).glob("*/config.toml")]
    if not found:
        raise ConfigurationError(
            f"there is no run in {directory}/; name a run directory or the URL of its API"
        )
    return open_run(max(found, key=lambda path: (path / "config.toml").stat().st_mtime))


def _replace(path: Path, content: bytes, mode: int = 0o644) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    partial.replace(path)


def _is_leeway(pid: int) -> bool:
    """Whether the process lives and is ours; a process id is reused after a reboot."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False
    cmdline = Path(f"/proc/{pid}/cmdline")
    try:
        return b"leeway" in cmdline.read_bytes()
    except OSError:
        return not Path("/proc/self").exists()
