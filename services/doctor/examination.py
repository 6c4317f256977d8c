"""Which checks are made, in which order: from the machine to the run, each once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from leeway.services.doctor.finding import Finding, Part

if TYPE_CHECKING:
    from leeway.services.config import RunConfig
    from leeway.services.layout import RunDirectory

Check = tuple[str, Callable[[], Iterable[Finding]]]
"""What is looked at, in words for the progress line; and the look."""


class Subject(NamedTuple):
    """What is examined."""

    config: RunConfig
    source: str
    """What sentences call the configuration."""
    redis_url: str | None
    """Of a run, or of the configuration; None examines none."""
    run: RunDirectory | None = None
    address: str | None = None
    """Of the API of the run."""

    @property
    def is_live(self) -> bool:
        """Whether `leeway train` runs it on this machine now."""
        return self.run is not None and self.run.running_pid() is not None


def examine(subject: Subject, *, deep: bool, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Every finding as it is made. `progress` is told what is looked at next."""
    for what, check in _checks(subject, deep):
        progress(what)
        try:
            yield from check()
        except Exception as error:  # a check that breaks must not hide what the others find
            text = f"the check itself failed ({type(error).__name__}: {error})"
            yield Part("doctor").error(what, text, "report this; it is a fault of Leeway")


def _checks(subject: Subject, deep: bool) -> Iterator[Check]:
    from leeway.services.doctor import configuration, machine, versions

    config, is_live = subject.config, subject.is_live
    elsewhere = config.replay.url is not None
    yield "versions", lambda: versions.check_versions(config, elsewhere)
    yield "GPUs", lambda: versions.check_gpus(config, is_live)
    yield "cores", machine.check_cores
    yield "limits", machine.check_limits
    yield "memory", lambda: machine.check_memory(config, bool(versions.list_gpus()))
    yield "disk", lambda: machine.check_disk(config)
    yield "shared memory", machine.check_shared_memory
    yield (
        "configuration",
        lambda: configuration.check_configuration(config, subject.source, is_live),
    )
    yield "Redis server", lambda: configuration.check_server_binary(config)
    yield from _live_checks(subject)
    yield "transfer", lambda: _transfer(config)
    if deep:
        yield "log-probs of engine and learner (a minute or so)", lambda: _equality(config)


def _live_checks(subject: Subject) -> Iterator[Check]:
    run, url = subject.run, subject.redis_url
    if run is not None:
        from leeway.services.doctor.live import check_process

        yield "processes", lambda: check_process(run)
    if url is not None:
        from leeway.services.doctor.redis_checks import check_redis

        yield "Redis", lambda: asyncio.run(check_redis(url, subject.config))
    if run is not None and url is not None:
        from leeway.services.doctor.live import check_run

        yield "run", lambda: asyncio.run(check_run(url, run.root.name))
    if run is not None and subject.address is not None:
        from leeway.services.doctor.live import check_api
        from leeway.services.status_client import token_of

        address = subject.address
        yield "API", lambda: check_api(address, token_of(run))


def _transfer(config: RunConfig) -> Iterator[Finding]:
    from leeway.services.doctor.transfer import check_transfer
    from leeway.services.doctor.versions import list_gpus, torch_cuda

    num_gpus = len(list_gpus()) if torch_cuda() else 0
    return check_transfer(num_gpus, config.learner.transport)


def _equality(config: RunConfig) -> list[Finding]:
    from leeway.services.doctor.equality import check_equality

    return check_equality(config)
