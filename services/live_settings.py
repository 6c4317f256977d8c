"""Settings that may be changed while a run goes on, and the check of a change.

The new value lies on the run board; the learner applies what is its own between two steps, each
rollout worker within a second or two. A restarted process applies it as well. The configuration of
the run directory stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from leeway.replay.errors import ConfigurationError
from leeway.services.config import RunConfig, check
from leeway.services.config_text import known_keys, validation_sentence, value_at, with_values

LIVE_KEYS: Final = (
    "learner.learning_rate",
    "learner.weight_decay",
    "learner.max_grad_norm",
    "learner.num_steps",
    "learner.checkpoint_every",
    "learner.draw_timeout_s",
    "rollout.max_groups_in_flight",
    "rollout.episode_timeout_s",
    "rollout.max_failure_share",
)
"""Anything else decides what the processes are made of, and is fixed when they start."""


def changed(config: RunConfig, values: Mapping[str, float]) -> RunConfig:
    """The configuration with these values, checked as a file is. Raises ConfigurationError for a
    key that is not live, and for a value that the configuration would refuse.
    """
    for key in values:
        if key not in LIVE_KEYS:
            raise ConfigurationError(
                f"{key} cannot be changed while a run goes on; what can: {', '.join(LIVE_KEYS)}"
            )
    given = {key: _whole(key, value) for key, value in values.items()}
    data = with_values(config, given).model_dump(mode="json", warnings=False)
    try:
        validated = RunConfig.model_validate(data)
    except ValidationError as error:
        sentence, _ = validation_sentence(error.errors()[0])
        raise ConfigurationError(sentence) from None
    check(validated, "settings")
    return validated


def applied(config: RunConfig, values: Mapping[str, float]) -> RunConfig:
    """The configuration with values that were checked before."""
    return with_values(config, {key: _whole(key, value) for key, value in values.items()})


def text_of(key: str) -> str:
    """What the key does, as the configuration says it."""
    return " ".join((known_keys()[key].description or "").split())


def value_of(config: RunConfig, key: str) -> float:
    """The value in the configuration."""
    return float(value_at(config, key))


class Bounds(NamedTuple):
    """What values a key may have by itself; other keys may narrow that further."""

    minimum: float | None
    """None: no bound."""
    maximum: float | None
    is_minimum_allowed: bool
    """False: it must be above `minimum`."""
    is_whole: bool
    """Only whole numbers."""


def bounds_of(key: str) -> Bounds:
    """Of the key in the configuration. learner.learning_rate: above 0, without an upper bound."""
    field = known_keys()[key]
    found = {
        name: float(value)
        for rule in field.metadata
        for name in ("gt", "ge", "le")
        if (value := getattr(rule, name, None)) is not None
    }
    return Bounds(
        minimum=found.get("gt", found.get("ge")),
        maximum=found.get("le"),
        is_minimum_allowed="gt" not in found,
        is_whole=field.annotation is int,
    )


def _whole(key: str, value: float) -> Any:
    """JSON has one kind of number: 20.0 for a key that counts is 20. 20.5 is left to be refused."""
    counts = known_keys()[key].annotation is int
    return int(value) if counts and float(value).is_integer() else value
