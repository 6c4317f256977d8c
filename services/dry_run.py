"""What `--dry-run` says: what would be done, from what, into what, how large. It starts nothing.

The command has checked everything by then, as it does before it works; a plan only tells.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import typer

from leeway.replay.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Place:
    """A file, a folder or an address that is read or written."""

    what: str
    """policy, corpus, archive, ..."""
    where: str
    num_bytes: int | None = None
    """Size now, or as estimated of what will be written; None: not known."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a command would do."""

    does: str
    """Behind "would": play 64 groups of 8."""
    reads: Sequence[Place] = ()
    writes: Sequence[Place] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """More numbers, by name."""


def tell(plan: Plan, as_json: bool) -> None:
    """On stdout: lines, or one JSON line with `dry_run` true."""
    if as_json:
        typer.echo(json.dumps({"dry_run": True, **asdict(plan)}, ensure_ascii=False))
        return
    typer.echo(f"would {plan.does}")
    for verb, places in (("reads", plan.reads), ("writes", plan.writes)):
        for place in places:
            size = "" if place.num_bytes is None else f", {size_of(place.num_bytes)}"
            typer.echo(f"  {verb:<7} {place.what}: {place.where}{size}")
    for name, value in plan.facts.items():
        typer.echo(f"  {name}: {value:,}" if isinstance(value, int) else f"  {name}: {value}")
    typer.echo("nothing was changed")


def size_of(num_bytes: int) -> str:
    """1536 -> 1.5 KiB"""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:,.1f} {unit}"


def found(what: str, path: Path) -> Place:
    """A file or folder that is there, with its size."""
    files = path.rglob("*") if path.is_dir() else [path]
    total = sum(file.stat().st_size for file in files if file.is_file())
    return Place(what=what, where=str(path), num_bytes=total)


def check_writable(path: Path, option: str) -> None:
    """Raise ConfigurationError unless `path` can be made: its nearest folder that exists is
    writable. `option` is how the command line names it."""
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"{option} {path} cannot be written: {folder} is no folder that may be written to; "
            "name another place"
        )


def check_room(path: Path, num_bytes: int) -> None:
    """Raise ConfigurationError where the disk of `path` has less than `num_bytes` left."""
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ConfigurationError(
            f"{path} needs {size_of(num_bytes)} and its disk has {size_of(free)} left; "
            "make room, or name another place"
        )
