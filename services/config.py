"""RunConfig: the whole of a run, read from one TOML file, and every check that spans two parts.

Reading it imports nothing heavy (no torch, ray, vllm, transformers). Every fault in it is a
ConfigurationError of one sentence: the file or `--set`, the dotted key, and what would be right.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import ByteSize, Field, ValidationError, model_validator

from leeway.actors.config import (
    DataConfig,
    EnvironmentConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    SearchConfig,
)
from leeway.learner.config import LearnerConfig
from leeway.replay.config import FrozenModel, ReplayConfig
from leeway.replay.errors import ConfigurationError
from leeway.replay.redis_urls import parse_url
from leeway.replay.tracing import TracingConfig
from leeway.services.config_checks import check, remarks
from leeway.services.config_machine import check_environment, check_files
from leeway.services.config_text import (
    BUNDLED,
    FREE_TABLES,
    PATH_KEYS,
    accepts_none,
    describe,
    dump,
    flatten,
    is_text,
    known_keys,
    masked,
    unknown_key,
    validation_sentence,
    value_at,
    with_values,
)
from leeway.services.redaction import MASK, redacted
from leeway.services.supervision_config import SupervisionConfig

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

__all__ = [
    "BUNDLED",
    "MASK",
    "ApiConfig",
    "EvalConfig",
    "MetricsConfig",
    "RunConfig",
    "check",
    "check_environment",
    "check_files",
    "describe",
    "dump",
    "load",
    "masked",
    "remarks",
    "with_values",
]


REDIS_URL = "LEEWAY_REDIS_URL"
"""Environment variable that replaces replay.url of the file: a password belongs into no file."""


SinkName = Literal["wandb", "tensorboard", "trackio"]


class EvalConfig(FrozenModel):
    """Held-out evaluation. Keys of the `[eval]` table."""

    num_questions: int = Field(default=200, ge=0)
    """Held-out questions played greedily before and after training; 0 plays none."""
    every_steps: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations while training goes on; 0 means only before and after."""


class ApiConfig(FrozenModel):
    """REST. Keys of the `[api]` table."""

    host: str = "127.0.0.1"
    """Address the API listens on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the API; 0 takes a free one."""
    auth: bool = True
    """Whether /v1 and /metrics ask for a bearer token (docs/rest.md says where tokens come from).
    false lets everybody who reaches the port read and control the run."""
    max_requests_per_s: int = Field(default=500, ge=1)
    """Most requests a second from one address, counted apart with and without a token; more are
    answered 429."""
    max_body_bytes: ByteSize = Field(default=ByteSize(16 * 2**20), ge=1024)
    """Largest body of a request, such as 16777216 or "16MiB"; a larger one is answered 413."""
    max_listeners: int = Field(default=1000, ge=1)
    """Most open streams of GET /v1/events."""


class MetricsConfig(FrozenModel):
    """Where metrics go besides the run directory and Prometheus. Keys of the `[metrics]` table."""

    sinks: tuple[SinkName, ...] = ()
    """What also gets each step's metrics and the final summary: wandb, tensorboard, trackio."""
    project: str = Field(default="leeway", min_length=1)
    """Project that the run belongs to in wandb and trackio."""
    ray_port: int = Field(default=0, ge=0, le=65535)
    """Port at which the Ray that a run starts exports its metrics, and vLLM's; 0 takes a free one.
    Not read where RAY_ADDRESS names a cluster, which has its own."""

    @model_validator(mode="after")
    def _names_each_once(self) -> Self:
        twice = next((name for name in self.sinks if self.sinks.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f'metrics.sinks names "{twice}" twice; once is enough')
        return self


class RunConfig(FrozenModel):
    """One run. Keys at the top of the file, and a table for each part."""

    name: str = Field(default="run", pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_-]{0,62}$")
    """Name of the run; the run directory and the Redis keys carry it."""
    directory: str = "runs"
    """Folder that receives the run directory."""
    model: str = BUNDLED
    """Hugging Face model directory to start from; or `bundled`."""
    seed: int = 0
    """Seed of sampling, question order and optimizer."""
    policy: PolicyConfig = PolicyConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    search: SearchConfig = SearchConfig()
    reward: RewardConfig = RewardConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    api: ApiConfig = ApiConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()
    supervision: SupervisionConfig = SupervisionConfig()

    @property
    def engine(self) -> PolicyConfig:
        """`policy` with its arithmetic decided: `auto` is the learner's, so that both round the
        same weights alike."""
        if self.policy.dtype != "auto":
            return self.policy
        return self.policy.model_copy(update={"dtype": self.learner.precision})


def load(
    path: Path | str | None, overrides: Sequence[str] = (), *, has_files: bool = True
) -> RunConfig:
    """Read a TOML file, apply `a.b=c` overrides, resolve its paths and check the whole.

    None reads no file: every key has its default. Paths are looked for beside the file, then in
    the working directory, and are absolute afterwards. LEEWAY_REDIS_URL goes before the file's
    replay.url, and an override before both. `has_files` False leaves paths unchecked, for a process
    that needs none of the files.
    """
    default = "the command line" if overrides else "the default configuration"
    source = default if path is None else str(path)
    try:
        data = {} if path is None else _read_toml(Path(path))
        _apply_environment(data)
        keys_set = [_apply_override(data, override) for override in overrides]
        config = _resolve_paths(_validate(data, source, keys_set), path)
        check(config, source, has_files=has_files)
    except ConfigurationError as error:
        raise ConfigurationError(redacted(str(error))) from None
    return config


def _apply_environment(data: dict[str, Any]) -> None:
    url = os.environ.get(REDIS_URL)
    replay = data.setdefault("replay", {}) if url else None
    if url and isinstance(replay, dict):
        try:
            parse_url(url)
        except ConfigurationError as error:
            raise ConfigurationError(f"{REDIS_URL}: {error}") from None
        replay["url"] = url


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"{path} does not exist; give the path of a TOML file") from None
    except IsADirectoryError:
        raise ConfigurationError(f"{path} is a folder; give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} is not UTF-8 text (byte {error.start}); a TOML file must be"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(_syntax_sentence(path, text, str(error))) from None


def _syntax_sentence(path: Path, text: str, message: str) -> str:
    """demo.toml, line 3: invalid value in `num_steps = sixty`; correct the TOML there (...)."""
    found = re.search(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$", message)
    what = message[: found.start()] if found else message
    lines = text.splitlines() or [""]
    number = int(found[1]) if found and found[1] else len(lines)
    at = lines[number - 1].strip() if number <= len(lines) else ""
    return (
        f"{path}, line {number}: {what[:1].lower()}{what[1:]} in `{at}`; "
        "TOML wants `key = value`, with strings in double quotes and true or false in lower case"
    )


def _apply_override(data: dict[str, Any], override: str) -> str:
    """Put one `a.b=c` into `data`; returns its dotted key."""
    key, equals, raw = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigurationError(
            f"--set {override} is not of the form key=value, such as learner.num_steps=20"
        )
    fields = known_keys()
    free = next((table for table in FREE_TABLES if key.startswith(f"{table}.")), None)
    if key not in fields and free is None:
        raise ConfigurationError(f"--set {override}: {unknown_key(key)}")
    *tables, leaf = key.split(".")
    target = data
    for depth, table in enumerate(tables, start=1):
        target = target.setdefault(table, {})
        if not isinstance(target, dict):
            path = ".".join(tables[:depth])
            raise ConfigurationError(f"--set {override}: {path} is not a table in the file")
    field = fields.get(key)
    if field is not None and accepts_none(field) and raw.strip().lower() == "none":
        target.pop(leaf, None)
    else:
        target[leaf] = _parse_value(raw.strip(), field)
    return free or key


def _parse_value(raw: str, field: FieldInfo | None) -> Any:
    """The TOML value of `raw`; text without quotes stands for itself. No field: any value."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    if set(parsed) != {"value"}:
        return raw
    value = parsed["value"]
    is_string = field is not None and is_text(field)
    return raw if is_string and not isinstance(value, str) else value


def _validate(data: dict[str, Any], source: str, keys_set: Sequence[str]) -> RunConfig:
    for key, value in flatten(data):
        value = next(filter(_is_infinite, _leaves(value)), None)
        if value is not None:
            where = f"--set {key}" if key in keys_set else f"{source}: {key}"
            raise ConfigurationError(f"{where} is {value}; it must be a finite number")
    try:
        return RunConfig.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        sentence, key = validation_sentence(error.errors()[0])
        where = "--set" if key in keys_set else f"{source}:"
        raise ConfigurationError(f"{where} {sentence}") from None


def _leaves(value: Any) -> Iterator[Any]:
    """The values in a list or table, however deep; any other value itself."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _resolve_paths(config: RunConfig, file: Path | str | None) -> RunConfig:
    """Make the paths of the user absolute; a missing one stays as written for `check` to name."""
    folders = [Path(file).resolve().parent, Path.cwd()] if file is not None else [Path.cwd()]
    found: dict[str, Any] = {}
    for key in (*PATH_KEYS, "search.index", "search.encoder"):
        written = value_at(config, key)
        found[key] = None if written is None else _found_path(written, folders)
    found["data.sources"] = tuple(
        source.model_copy(update={"path": _found_path(source.path, folders)})
        for source in config.data.sources
    )
    return with_values(config, found)


def _found_path(written: str, folders: Sequence[Path]) -> str:
    """Absolute where it exists in one of the folders, as written where it does not."""
    if written == BUNDLED:
        return written
    candidates = [folder / Path(written).expanduser() for folder in folders]
    existing = next((path for path in candidates if path.exists()), None)
    return written if existing is None else str(existing.resolve())
