"""The files, factories and ports that a configuration names, and what it probably does not mean."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from leeway.replay.errors import ConfigurationError, LeewayError
from leeway.services.config import check_files, remarks
from leeway.services.config_machine import check_port
from leeway.services.doctor.finding import Finding, Part

if TYPE_CHECKING:
    from leeway.services.config import RunConfig

CONFIGURATION = Part("configuration")


def check_configuration(config: RunConfig, source: str, is_live: bool) -> Iterator[Finding]:
    """`is_live`: a run holds the port of the API now."""
    yield _model(config)
    try:
        check_files(config)
        yield CONFIGURATION.ok("files", f"corpus and questions of {source} can be read")
    except LeewayError as error:
        yield CONFIGURATION.error("files", str(error), f"correct it, or the key in {source}")
    if not is_live:
        yield _port(config, source)
    for remark in remarks(config):
        yield CONFIGURATION.note("remark", remark)


def _model(config: RunConfig) -> Finding:
    from leeway.actors.config import model_dir

    folder = model_dir(config.model)
    weights = list(folder.glob("*.safetensors"))
    if not weights or not (folder / "config.json").is_file():
        remedy = "name a Hugging Face folder with config.json, safetensors and tokenizer as model"
        return CONFIGURATION.error("model", f"{folder} holds no whole model", remedy)
    size = sum(file.stat().st_size for file in weights)
    return CONFIGURATION.ok("model", f"{folder}, {size / 2**20:,.0f} MiB", num_bytes=size)


def _port(config: RunConfig, source: str) -> Finding:
    shown = f"{config.api.host}, {config.api.port or 'a free one'}"
    try:
        check_port(config.api, source)
    except ConfigurationError as error:
        sentence, _, remedy = str(error).rpartition("; ")
        return CONFIGURATION.error("api port", sentence, remedy)
    return CONFIGURATION.ok("api port", shown)


def check_server_binary(config: RunConfig) -> Iterator[Finding]:
    """The server that `leeway train` starts where no URL is given."""
    if config.replay.url is not None:
        return
    from leeway.replay.server import find_server_binary

    try:
        yield CONFIGURATION.ok("Redis server", f"leeway train starts {find_server_binary()}")
    except ConfigurationError as error:
        sentence, _, remedy = str(error).partition(": ")
        yield CONFIGURATION.error("Redis server", sentence, remedy)
