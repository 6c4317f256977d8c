"""From `metrics.sinks` to the sinks of a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from leeway.replay.errors import ConfigurationError
from leeway.services.sinks.delivery import Sinks
from leeway.services.sinks.protocol import RunFacts, Sink

if TYPE_CHECKING:
    from leeway.services.config import MetricsConfig, RunConfig
    from leeway.services.layout import RunDirectory


def check_installed(metrics: MetricsConfig) -> None:
    """Raise ConfigurationError for a sink whose package is missing."""
    for name in metrics.sinks:
        if importlib.util.find_spec(name) is None:
            raise ConfigurationError(
                f'metrics.sinks names "{name}", which is not installed: '
                f'pip install "leeway-rl[{name}]"'
            )


def open_sinks(config: RunConfig, run: RunDirectory, step: int) -> Sinks:
    """The sinks of a run that has done `step` optimizer steps; rank 0 of the learner owns them."""
    from leeway.services.config_text import flatten, masked

    facts = RunFacts(
        name=run.root.name,
        project=config.metrics.project,
        directory=run.root,
        step=step,
        config=dict(flatten(masked(config).model_dump(mode="json"))),
    )
    return Sinks({name: partial(BUILDERS[name], facts) for name in config.metrics.sinks})


def _wandb(run: RunFacts) -> Sink:
    from leeway.services.sinks.wandb_sink import WandbSink

    return WandbSink(run)


def _tensorboard(run: RunFacts) -> Sink:
    from leeway.services.sinks.tensorboard_sink import TensorboardSink

    return TensorboardSink(run)


def _trackio(run: RunFacts) -> Sink:
    from leeway.services.sinks.trackio_sink import TrackioSink

    return TrackioSink(run)


BUILDERS: Final[dict[str, Callable[[RunFacts], Sink]]] = {
    "wandb": _wandb,
    "tensorboard": _tensorboard,
    "trackio": _trackio,
}
