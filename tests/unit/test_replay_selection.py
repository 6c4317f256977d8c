"""Scores of selectors: order, chances, seeds."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from leeway.replay.selection import draw_score, evict_score, exponential


def rank(selector: str, groups: list[tuple[int, int]], score=draw_score) -> list[int]:
    """Places of (version, arrival) pairs, the first to go first."""
    scores = [score(selector, v, a, 1.0, 0.0, 0, 0) for v, a in groups]
    return sorted(range(len(groups)), key=lambda i: scores[i])


GROUPS = [(3, 10), (2, 11), (3, 12), (2, 9)]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [("fifo", [3, 1, 0, 2]), ("lifo", [2, 1, 0, 3]), ("freshest", [2, 0, 1, 3])],
)
def test_order_of_four_groups(selector, expected):
    assert rank(selector, GROUPS) == expected
    assert rank(selector, GROUPS, evict_score) == expected


def test_eviction_by_priority_takes_the_lowest_first_and_of_equals_the_older():
    priorities = {5: 0.5, 6: 0.1, 7: 0.1, 8: 0.0}
    scores = {a: evict_score("prioritised", 0, a, p, 0.0, 0, 0) for a, p in priorities.items()}
    assert sorted(scores, key=scores.__getitem__) == [8, 6, 7, 5]


def test_exponentials_have_mean_and_variance_1():
    values = [exponential(0, arrival, 0) for arrival in range(20_000)]
    mean = sum(values) / len(values)
    assert mean == pytest.approx(1.0, abs=0.03)
    assert sum((x - mean) ** 2 for x in values) / len(values) == pytest.approx(1.0, abs=0.06)


def test_the_first_to_be_drawn_is_so_in_proportion_to_its_priority():
    weights = [1.0, 2.0, 5.0]
    first = Counter(
        min(range(3), key=lambda i: draw_score("prioritised", 0, 3 * n + i, weights[i], 0.0, 7, 0))
        for n in range(20_000)
    )
    for i, weight in enumerate(weights):
        assert first[i] / 20_000 == pytest.approx(weight / 8, abs=0.012)


def test_chances_stay_right_when_groups_come_in_while_others_wait():
    """A newcomer starts at the virtual time of the last draw, so nobody's wait counts."""
    num_new = 0
    for n in range(20_000):
        old = [draw_score("uniform", 0, 10 * n + i, 1.0, 0.0, 3, 0) for i in range(4)]
        now = min(old)
        rest = sorted(old)[1:]
        new = draw_score("uniform", 0, 10 * n + 9, 1.0, now, 3, 0)
        num_new += new < rest[0]
    assert num_new / 20_000 == pytest.approx(1 / 4, abs=0.012)


def test_a_priority_of_0_is_drawn_after_all_others_and_some_time():
    assert math.isfinite(draw_score("prioritised", 0, 1, 0.0, 0.0, 0, 0))
