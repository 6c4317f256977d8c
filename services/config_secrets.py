"""Secrets that a configuration must not hold, and openness that nobody asked for."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from leeway.services.redaction import redacted, redacted_values

if TYPE_CHECKING:
    from leeway.services.config import RunConfig

_ADDRESSES: Final = {
    "search.retriever_url": "put what it asks for into a proxy in front of it",
    "tracing.endpoint": "give it as a header in OTEL_EXPORTER_OTLP_HEADERS",
}
"""URLs that go into config.toml and reports as they are, and what to do about a password there."""


def secret_problems(config: RunConfig) -> Iterator[str]:
    """Every refusal, one sentence each; the secret itself is never in it."""
    values = {
        "search.retriever_url": config.search.retriever_url,
        "tracing.endpoint": config.tracing.endpoint,
    }
    for key, url in values.items():
        if url is not None and redacted(url) != url:
            yield (
                f"{key} holds a password, which would be written to the run directory and shown; "
                f"{_ADDRESSES[key]}"
            )
    for name in _secret_options(config.environment.options, "environment.options"):
        yield (
            f"{name} looks like a secret, which would be written to the run directory; name an "
            f'environment variable instead, as in {name.rpartition(".")[2]}_variable = "MY_KEY", '
            "and read that in your environment"
        )
    yield from _open_api(config)


def _secret_options(options: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in options.items():
        yield from _secret_option(name, value, f"{prefix}.{name}")


def _secret_option(name: str, value: object, place: str) -> Iterator[str]:
    """`name` is what the value goes by, also where it stands in a list."""
    if isinstance(value, Mapping):
        yield from _secret_options(value, place)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _secret_option(name, each, f"{place}[{number}]")
    elif isinstance(value, str) and redacted_values({name: value}) != {name: value}:
        yield place


def _open_api(config: RunConfig) -> Iterator[str]:
    host = config.api.host
    if not config.api.auth and not is_loopback(host):
        yield (
            f'api.auth = false with api.host = "{host}" lets everybody who reaches this machine '
            "control the run; leave api.auth on, or set api.host to 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """127.0.0.1, ::1, localhost -> True; 0.0.0.0, a name of the network -> False"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
