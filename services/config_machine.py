"""What a configuration needs from this machine: a port, a Redis, files that can be read, factories.

Each fault is one sentence; the libraries that find it are imported when they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leeway.replay.errors import ConfigurationError, DataError
from leeway.services.config_text import BUNDLED

if TYPE_CHECKING:
    from leeway.services.config import ApiConfig, RunConfig


def check_environment(config: RunConfig, source: str = "the configuration") -> None:
    """Raise ConfigurationError or DataError for what cannot work on this machine at this time: the
    API's port, a Redis that does not answer, a corpus or question file.
    """
    check_packages(config, source)
    check_port(config.api, source)
    if config.replay.url is not None:
        from leeway.replay.server import check_url

        try:
            check_url(config.replay.url)
        except ConfigurationError as error:
            raise ConfigurationError(f"{source}: replay.url: {error}") from None
    check_files(config)


def check_packages(config: RunConfig, source: str = "the configuration") -> None:
    """Raise ConfigurationError for a missing package that only this configuration needs."""
    from leeway.replay import tracing
    from leeway.services.sinks import factory

    try:
        factory.check_installed(config.metrics)
        tracing.check_installed(config.tracing)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}") from None


def check_files(config: RunConfig) -> None:
    """Read the user's corpus and questions through, and build the environment once; DataError names
    the first bad file and line, ConfigurationError what keeps an environment from being built.

    The bundled files were checked when they were made.
    """
    data, search = config.data, config.search
    if search.corpus != BUNDLED:
        from leeway.actors.search.index_source import check_corpus

        check_corpus(search.corpus)
    if search.index is not None:
        from leeway.actors.search.index_source import check_folder

        check_folder(search)
    is_bundled = not data.sources and data.train == data.held_out == BUNDLED
    if not is_bundled or search.prompt == "data":
        _check_questions(config)
    _check_environment_factory(config)


def _check_questions(config: RunConfig) -> None:
    from leeway.actors.config import held_out_file
    from leeway.actors.search.questions import check_disjoint, load_questions, load_sources

    train = [question for source in load_sources(config.data) for question in source.questions]
    held_out = load_questions(held_out_file(config.data))
    check_disjoint(train, held_out)
    if config.search.prompt == "data":
        for question in (*train, *held_out):
            if not question.prompt:
                raise DataError(
                    f"question {question.id!r} carries no messages, and search.prompt = "
                    '"data" takes them from the data; use auto or template'
                )


def _check_environment_factory(config: RunConfig) -> None:
    """What the rollout workers would build, built once here for its refusals."""
    from leeway.actors.config import model_dir
    from leeway.actors.environment_factory import check_factory
    from leeway.actors.tokens import Tokens

    facts = Tokens.load(model_dir(config.model)).facts
    check_factory(config.environment, config.search, config.reward, facts)


def check_port(api: ApiConfig, source: str) -> None:
    """Raise ConfigurationError for an address that the API could not listen on now."""
    check_listening(api.host, api.port, f"{source}: api.host", f"{source}: api.port")


def check_listening(host: str, port: int, host_name: str, port_name: str) -> None:
    """Raise ConfigurationError for an address that nobody could listen on now; the names are those
    of the two settings."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise ConfigurationError(
                f'{host_name} = "{host}" is not an address of this machine '
                f"({error.strerror}); use 127.0.0.1, or 0.0.0.0 for every interface"
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"{port_name} = {port} cannot be used on {host} "
                f"({error.strerror}); name another, or 0 for a free one"
            ) from None
