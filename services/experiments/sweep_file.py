"""The file of a sweep: what is varied, on what, within what. Reading it imports nothing heavy.

    name = "sweep-a"
    base = "stability.toml"            a configuration, beside this file
    mode = "exact"

    [set]                              keys of every arm
    learner.num_steps = 96

    [scan]                             one rate for each objective, the best at lag 0
    learning_rate = [5e-5, 1e-4, 2e-4]

    [[grid]]                           every combination is an arm; several grids add up
    objective = ["grpo", "so-grpo"]
    staleness = [0, 4, 16]
    seed = [0, 1, 2]

docs/sweep.md explains every table.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from leeway.replay.config import FrozenModel
from leeway.replay.errors import ConfigurationError
from leeway.services.config_text import flatten, known_keys, unknown_key
from leeway.services.experiments.collapse import CollapseRule

CTN_FORMS: Final[dict[str, dict[str, Any]]] = {
    "none": {"learner.ctn": "none"},
    "gradient": {"learner.ctn": "gradient"},
    "raw": {"learner.ctn": "gradient", "learner.ctn_raw": True},
    "learning-rate": {"learner.ctn": "gradient", "learner.ctn_target": "learning-rate"},
    "penalty": {"learner.ctn": "penalty"},
}
"""Forms of clipping-triggered normalization that the axis `ctn` knows, each as keys."""

SHORT: Final = {
    "objective": "learner.objective",
    "staleness": "replay.max_staleness",
    "draws": "replay.max_draws",
    "learning_rate": "learner.learning_rate",
    "eps": "learner.eps_low and learner.eps_high",
    "ctn": "the form of clipping-triggered normalization: " + ", ".join(CTN_FORMS),
}
"""Axes with a short name. `seed` is a key already."""

RESERVED: Final = {
    "directory": "the sweep decides where its arms write",
    "name": "the sweep names its arms",
    "replay.url": "arms have buffers of their own",
}
"""Keys that a sweep may not hold, with the reason."""


class Resources(FrozenModel):
    """What the arms may take. Keys of the `[resources]` table; it may change between two calls."""

    executor: Literal["ray", "processes"] = "ray"
    """ray: places arms on a Ray of this machine, or on the cluster of RAY_ADDRESS, whose machines
    must all see the folder of the sweep. processes: on this machine, without Ray."""
    num_cpus: float = Field(default=1.0, gt=0)
    """Cores of one arm; also its threads, rounded down, at least one."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs of one arm. A part, such as 0.125, puts eight arms on one GPU and bounds the memory of
    each to its part, less what the driver keeps for a process. 0 hides the GPUs from every arm."""
    micro_batch_tokens: int | None = Field(default=None, ge=256)
    """In place of learner.micro_batch_tokens. It decides speed and memory, and results only by
    rounding, so an arm is the same arm whatever this is. None: as the arm is configured."""
    max_parallel: int | None = Field(default=None, ge=1)
    """Most arms beside each other; None: as many as cores and GPUs hold."""
    arm_timeout_s: float = Field(default=7200.0, gt=0)
    """Seconds one arm may take in one call; then it is ended, and is a failed row."""
    checkpoint_every_s: float = Field(default=60.0, ge=0)
    """Seconds between checkpoints of an arm in one process: what it loses at most when the call is
    ended. Each holds weights and optimizer three times over, until the arm has ended."""


class Scan(FrozenModel):
    """The scan of learning rates. Keys of the `[scan]` table."""

    learning_rate: tuple[float, ...] = Field(min_length=1)
    """Tried at staleness 0 for every objective of the grid; the best mean score wins, of equals the
    smaller rate."""
    tolerance: float = Field(default=0.0, ge=0, lt=1)
    """Scores this close to the best one count as equal to it. Scores are means over questions: of
    200 they are off by 0.02, and a rate that is better by less may be too fast on stale data."""
    seed: tuple[int, ...] = Field(default=(0,), min_length=1)
    """Seeds of the scan."""


class SweepFile(FrozenModel):
    """A sweep as it is written."""

    name: str = Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}$")
    """Name of the sweep, and of its folder."""
    base: str | None = None
    """Configuration that every arm starts from; None: the defaults."""
    mode: Literal["exact", "bound"] = "exact"
    """exact: every trained token is exactly so many versions old. bound: the live asynchronous
    loop, with staleness as its bound and, unless it is set, a full lookahead."""
    loop: Literal["in-process", "train"] = "in-process"
    """in-process: buffer, engine and learner of an arm in one process, policy.backend torch. train:
    each arm is a `leeway train` of its own, with Redis, Ray Serve and the configured engine."""
    retention: float = Field(default=0.95, gt=0, le=1)
    """Share of the on-policy score that counts as kept."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of every arm, dotted. Those of the critic go to objectives that have one."""
    grid: tuple[dict[str, tuple[Any, ...]], ...] = Field(min_length=1)
    """Axes and their values. Every combination of one table is an arm."""
    scan: Scan | None = None
    resources: Resources = Resources()
    collapse: CollapseRule = CollapseRule()


@dataclass(frozen=True)
class Sweep:
    """A sweep that was read: the file, and the configuration it starts from."""

    file: SweepFile
    base: Path | None
    """Absolute; None for the defaults."""
    base_digest: str
    """Of the text of the base: a sweep that goes on must find it as it was."""
    overrides: tuple[str, ...] = ()
    """--set of the command line."""

    def identity(self) -> dict[str, Any]:
        """What the results depend on, by part: all but resources and where the base lies."""
        part = self.file.model_dump(mode="json", exclude={"resources", "base"})
        return part | {"base": self.base_digest, "--set": list(self.overrides)}


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read and check a sweep file. Raises ConfigurationError, one sentence."""
    data = _read(path)
    data["set"] = dict(flatten(_table(path, data.get("set", {}), "set")))
    grids = data.get("grid", [])
    grids = [grids] if isinstance(grids, dict) else grids
    if not isinstance(grids, list) or not grids:
        raise ConfigurationError(
            f"{path} holds no [[grid]]; write one with axes such as staleness = [0, 4, 16]"
        )
    data["grid"] = [_axes(path, grid, n) for n, grid in enumerate(grids, 1)]
    for key in data["set"]:
        _check_key(path, key, "[set]")
    try:
        file = SweepFile.model_validate(data)
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {_sentence(error)}") from None
    base = None if file.base is None else _base(path, file.base)
    text = b"" if base is None else base.read_bytes()
    return Sweep(file, base, hashlib.sha256(text).hexdigest()[:16], tuple(overrides))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = "is a folder" if path.is_dir() else f"cannot be read: {error.strerror}"
        raise ConfigurationError(f"{path} {reason}; give the TOML file of a sweep") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not TOML ({error}); correct it there") from None


def _table(path: Path, value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path}: {name} is {value!r}; it must be a table")
    return value


def _axes(path: Path, grid: Any, number: int) -> dict[str, list[Any]]:
    """Dotted axes with their values. A single value is an axis of one."""
    where = f"[[grid]] {number}"
    axes = dict(flatten(_table(path, grid, where)))
    if not axes:
        raise ConfigurationError(f"{path}: {where} is empty; name an axis, such as seed = [0, 1]")
    found: dict[str, list[Any]] = {}
    for key, values in axes.items():
        _check_key(path, key, where)
        found[key] = values if isinstance(values, list) else [values]
        if not found[key]:
            raise ConfigurationError(f"{path}: {where}: {key} has no value; name one at least")
    return found


def _check_key(path: Path, key: str, where: str) -> None:
    if key in RESERVED:
        raise ConfigurationError(f"{path}: {where} holds {key}, but {RESERVED[key]}; leave it out")
    if key in SHORT or key in known_keys() or key.startswith("environment.options."):
        return
    raise ConfigurationError(
        f"{path}: {where}: {unknown_key(key)} (short names are {', '.join(SHORT)})"
    )


def _base(path: Path, written: str) -> Path:
    for folder in (path.resolve().parent, Path.cwd()):
        found = folder / Path(written).expanduser()
        if found.is_file():
            return found.resolve()
    raise ConfigurationError(
        f"{path}: base = {written!r} does not exist; name a configuration beside {path.name}"
    )


def _sentence(error: ValidationError) -> str:
    """resources.num_cpu is not a key; [resources] holds executor, ..."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        table = first["loc"][0] if len(first["loc"]) > 1 else ""
        model = {"resources": Resources, "scan": Scan, "collapse": CollapseRule}.get(
            str(table), SweepFile
        )
        holds = f"[{table}] holds" if table else "a sweep holds"
        return f"{key} is not a key; {holds} {', '.join(model.model_fields)}"
    if first["type"] == "missing":
        return f"{key} is missing"
    message = first["msg"][:1].lower() + first["msg"][1:]
    return f"{key} is {first['input']!r}; {message}"


def with_resources(
    sweep: Sweep, executor: str | None = None, num_gpus: float | None = None
) -> Sweep:
    """With arms run by another executor, or with another part of a GPU, than the file says."""
    if executor not in (None, "ray", "processes"):
        raise ConfigurationError(
            f"--executor {executor} is no executor; there are ray and processes"
        )
    given = {"executor": executor, "num_gpus": num_gpus}
    chosen = {key: value for key, value in given.items() if value is not None}
    resources = sweep.file.resources.model_copy(update=chosen)
    return replace(sweep, file=sweep.file.model_copy(update={"resources": resources}))
