"""What the shell offers behind a command: run directories, configuration files, keys of `--set`.

Nothing here imports more than it must: the first two read folders, the third imports the
configuration, which is free of torch, Ray and vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

RUNS: Final = "runs"
CONFIG_FOLDERS: Final = (".", "deploy/configs")
MAX_OFFERED: Final = 50


def run_directories(incomplete: str) -> list[str]:
    """Run directories that begin so, the newest first; `runs/` where nothing was typed yet.

    Folders that hold runs are looked into wherever the typed path leads.
    """
    parent = Path(_folder(incomplete) if "/" in incomplete else RUNS)
    try:
        found = [(path.stat().st_mtime, str(path.parent)) for path in parent.glob("*/config.toml")]
    except OSError:
        return []
    names = [name for _, name in sorted(found, reverse=True)]
    return [name for name in names if name.startswith(incomplete)][:MAX_OFFERED]


def configuration_files(incomplete: str) -> list[str]:
    """TOML files that begin so: of the working directory and deploy/configs, or where the typed
    path leads."""
    folders = [_folder(incomplete)] if "/" in incomplete else CONFIG_FOLDERS
    found = [str(path) for folder in folders for path in sorted(Path(folder).glob("*.toml"))]
    return [name for name in found if name.startswith(incomplete)][:MAX_OFFERED]


def _folder(incomplete: str) -> str:
    """runs/de -> runs, runs/ -> runs, /demo -> /"""
    return incomplete[: incomplete.rindex("/")] or "/"


def override_keys(incomplete: str) -> list[tuple[str, str]]:
    """(`learner.num_steps=`, its meaning) of every key that begins so; behind the equals sign the
    values of a choice."""
    from leeway.services.config_text import known_keys

    key, equals, _ = incomplete.partition("=")
    fields = known_keys()
    if equals and key in fields:
        return [(f"{key}={value}", "") for value in _choices(fields[key].annotation)]
    return [
        (f"{name}=", _first_sentence(field.description or ""))
        for name, field in fields.items()
        if name.startswith(incomplete)
    ]


def _choices(annotation: object) -> Iterator[str]:
    """The values of a Literal, also inside a union; true and false of a bool."""
    from typing import Literal, get_args, get_origin

    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from (str(value) for value in get_args(annotation))
    else:
        for arm in get_args(annotation):
            yield from _choices(arm)


def _first_sentence(text: str) -> str:
    """`Steps of the run. More of it.` -> `Steps of the run`"""
    return " ".join(text.split()).partition(". ")[0].rstrip(".")
