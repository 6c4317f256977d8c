"""pass@k without bias, and confidence intervals against exact ones."""

from __future__ import annotations

from itertools import combinations
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.services.evaluation import statistics
from leeway.services.evaluation.statistics import Estimate, average, pass_at_k, score


@pytest.mark.parametrize(
    ("num_samples", "num_right", "k", "expected"),
    [
        (4, 1, 2, 0.5),  # 1 - C(3, 2) / C(4, 2) = 1 - 3/6
        (4, 0, 4, 0.0),
        (4, 1, 4, 1.0),
        (10, 3, 1, 0.3),
        (10, 3, 5, 1 - 21 / 252),  # C(7, 5) = 21, C(10, 5) = 252
        # beyond what floats hold of the binomials: each right one is missed in turn
        (200, 10, 100, 1 - prod((100 - i) / (200 - i) for i in range(10))),
    ],
)
def test_pass_at_k_by_hand(num_samples: int, num_right: int, k: int, expected: float):
    assert pass_at_k(num_samples, num_right, k) == pytest.approx(expected, abs=1e-9)


@given(
    st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_one(case: tuple[int, int, int]):
    num_samples, num_right, k = case
    subsets = list(combinations([1] * num_right + [0] * (num_samples - num_right), k))
    assert pass_at_k(*case) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_of_too_few_samples_is_no_number(k: int):
    with pytest.raises(ValueError, match="of 4 samples"):
        pass_at_k(4, 2, k)


def rows(*values: float) -> list[dict[str, float]]:
    return [{"exact_match": value} for value in values]


def test_two_questions_one_right_are_resampled_to_0_half_and_1():
    # 0 with chance 1/4, 1/2 with 1/2, 1 with 1/4: the 2.5 and 97.5 percentiles are 0 and 1
    scored = score("nq", rows(1, 0), seed=0)
    assert scored.estimates() == {"exact_match": Estimate(0.5, 0.0, 1.0)}
    shares = [np.mean(scored.resampled_BM == value) for value in (0, 0.5, 1)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.02)


def test_30_of_100_right_have_the_interval_of_the_binomial():
    # quantiles of Binomial(100, 0.3): P(X <= 21) = 0.029, P(X <= 20) = 0.016; P(X <= 39) = 0.979
    found = score("nq", rows(*[1] * 30, *[0] * 70), seed=1).estimates()["exact_match"]
    assert (found.mean, found.low, found.high) == pytest.approx((0.30, 0.21, 0.39), abs=0.011)


def test_questions_that_score_alike_have_an_interval_of_one_point():
    assert score("nq", rows(1, 1, 1), seed=0).estimates()["exact_match"] == Estimate(1, 1, 1)


def test_scores_of_one_question_are_drawn_together():
    both = [{"a": value, "b": 2 * value} for value in (0.0, 0.25, 1.0)]
    scored = score("nq", both, seed=3)
    assert scored.resampled_BM[:, 1] == pytest.approx(2 * scored.resampled_BM[:, 0])


def test_a_seed_repeats_and_a_name_is_part_of_it():
    values = rows(*[1] * 5, *[0] * 9)
    one, again = (score("nq", values, seed=7).resampled_BM for _ in range(2))
    assert (one == again).all()
    assert (one != score("popqa", values, seed=7).resampled_BM).any()
    assert (one != score("nq", values, seed=8).resampled_BM).any()


def test_the_average_is_plain_whatever_the_sizes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 500)
    small = score("bamboogle", rows(1), seed=0)
    large = score("popqa", rows(*[0] * 99), seed=0)
    assert average([small, large]) == {"exact_match": Estimate(0.5, 0.5, 0.5)}


def test_the_average_over_two_is_surer_than_either():
    halves = [score(name, rows(*[1, 0] * 50), seed=0) for name in ("nq", "popqa")]
    one, both = halves[0].estimates()["exact_match"], average(halves)["exact_match"]
    ratio = (both.high - both.low) / (one.high - one.low)
    assert ratio == pytest.approx(0.5**0.5, abs=0.05)  # independent: by the root of two


def test_the_average_is_over_the_scores_that_all_have():
    one = score("nq", [{"exact_match": 1.0, "f1": 1.0}], seed=0)
    other = score("mine", [{"f1": 0.5}], seed=0)
    assert average([one, other]) == {"f1": Estimate(0.75, 0.75, 0.75)}
