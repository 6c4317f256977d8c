"""What may be changed while a run goes on, and within which bounds."""

from __future__ import annotations

import pytest

from leeway.replay.errors import ConfigurationError
from leeway.services.config import load
from leeway.services.live_settings import LIVE_KEYS, Bounds, bounds_of, changed


@pytest.mark.parametrize(
    ("key", "bounds"),
    [
        ("learner.learning_rate", Bounds(0.0, None, False, False)),
        ("learner.weight_decay", Bounds(0.0, None, True, False)),
        ("learner.num_steps", Bounds(1.0, None, True, True)),
        ("rollout.max_failure_share", Bounds(0.0, 1.0, False, False)),
    ],
)
def test_a_setting_has_the_bounds_of_its_key(key: str, bounds: Bounds):
    assert bounds_of(key) == bounds


@pytest.mark.parametrize("key", LIVE_KEYS)
def test_a_value_outside_of_the_bounds_is_refused(key: str):
    config, bounds = load(None), bounds_of(key)
    assert bounds.minimum is not None
    outside = [bounds.minimum - 1]
    outside += [] if bounds.is_minimum_allowed else [bounds.minimum]
    outside += [] if bounds.maximum is None else [bounds.maximum + 1]
    outside += [bounds.minimum + 0.5] if bounds.is_whole else []
    for value in outside:
        with pytest.raises(ConfigurationError, match=key):
            changed(config, {key: value})
