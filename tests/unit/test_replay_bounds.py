"""The bound is asserted where groups are handed out, with numbers worked out by hand."""

from __future__ import annotations

import msgspec
import pytest

from leeway.replay.bounds import check_exact, check_staleness
from leeway.replay.config import ReplayConfig
from leeway.replay.errors import StalenessViolation
from leeway.replay.schema import PolicyVersion
from leeway.replay.store import Lease, Slot
from leeway.replay.synthetic import build_group


def lease(learner: int, *versions: int, ramp: int = 0) -> Lease:
    groups = tuple(build_group(Slot(f"g{a}", PolicyVersion(a))) for a in versions)
    return Lease("l", PolicyVersion(learner), groups, PolicyVersion(ramp))


def test_exactly_2_versions_old_is_right_and_1_is_not():
    check_exact(lease(10, 8, 8), max_staleness=2)
    with pytest.raises(StalenessViolation, match=r"g9 of version 9 .* at 10: staleness 1, .* be 2"):
        check_exact(lease(10, 8, 9), max_staleness=2)


def test_groups_up_to_the_version_of_the_ramp_may_be_younger():
    check_exact(lease(1, 0), max_staleness=2)
    check_exact(lease(10, 9, ramp=9), max_staleness=2)
    with pytest.raises(StalenessViolation, match="for every version after 8, where the ramp began"):
        check_exact(lease(10, 9, ramp=8), max_staleness=2)


def test_a_group_of_two_versions_is_refused_even_in_the_ramp():
    old, new = build_group(Slot("g", PolicyVersion(0))), build_group(Slot("g", PolicyVersion(1)))
    mixed = msgspec.structs.replace(new, trajectories=old.trajectories + new.trajectories)
    with pytest.raises(StalenessViolation, match="group g holds tokens of versions 0 to 1"):
        check_exact(Lease("l", PolicyVersion(1), (mixed,), PolicyVersion(1)), max_staleness=2)


def test_pace_allows_what_exact_refuses_and_neither_goes_beyond_the_bound():
    pace = ReplayConfig(max_staleness=2)
    exact = ReplayConfig(max_staleness=2, staleness_policy="exact")
    check_staleness(lease(10, 8, 9, 10), pace)
    with pytest.raises(StalenessViolation, match="must be 2"):
        check_staleness(lease(10, 8, 9, 10), exact)
    for config in (pace, exact):
        with pytest.raises(StalenessViolation, match="staleness 3 > max_staleness 2"):
            check_staleness(lease(10, 7, ramp=10), config)
