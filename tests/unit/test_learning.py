"""The bound is asserted on what is about to be trained."""

import pytest

from leeway.replay.config import ReplayConfig
from leeway.replay.errors import StalenessViolation
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Lease, Slot
from leeway.replay.synthetic import build_group
from leeway.services.learning import check_staleness


def lease(learner_version: int, *versions: int) -> Lease:
    groups = tuple(
        build_group(Slot(slot_id=f"g{v}", version=PolicyVersion(v)), version=PolicyVersion(v))
        for v in versions
    )
    return Lease(lease_id="l", version=PolicyVersion(learner_version), groups=groups)


def test_learner_at_10_oldest_8_and_9_is_within_2():
    check_staleness(lease(10, 8, 9), ReplayConfig(max_staleness=2))


def test_learner_at_10_oldest_8_is_outside_1_and_the_group_is_named():
    with pytest.raises(StalenessViolation, match=r"group g8 .* staleness is 2 and the bound is 1"):
        check_staleness(lease(10, 8, 9), ReplayConfig(max_staleness=1))


def test_a_version_newer_than_the_learner_is_refused():
    with pytest.raises(StalenessViolation, match="staleness is -1"):
        check_staleness(lease(10, 11), ReplayConfig(max_staleness=4))


def test_exact_refuses_a_group_that_is_too_young():
    exact = ReplayConfig(max_staleness=2, staleness_policy="exact")
    check_staleness(lease(10, 8, 8), exact)
    with pytest.raises(StalenessViolation, match=r"group g9 .* staleness 1, .* must be 2"):
        check_staleness(lease(10, 8, 9), exact)
