"""The rule of collapse, on curves drawn by hand."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.services.experiments.collapse import CollapseRule, Evaluated, collapse_step

RULE = CollapseRule()


def step_of(scores: Sequence[float], *, is_over: bool = True, rule: CollapseRule = RULE):
    curve = [Evaluated(8 * n, 0.0, score) for n, score in enumerate(scores)]
    return collapse_step(curve, rule, is_over=is_over)


@pytest.mark.parametrize(
    ("scores", "step"),
    [
        ([0.3, 0.6, 0.8, 0.9], None),
        # Best 0.8: 0.39 and 0.1 lie below 0.4, the first of them at step 16.
        ([0.3, 0.8, 0.39, 0.1, 0.0], 16),
        # Exactly half is not below half.
        ([0.3, 0.8, 0.4, 0.4], None),
        # One fall that recovers is none, and the best before it still counts.
        ([0.3, 0.8, 0.2, 0.7, 0.2, 0.1], 32),
        # Worse than before training from the first step on: the best is the one before training.
        ([0.3, 0.1, 0.05], 8),
        # A slow decline: 0.5 of 0.8 is kept until 0.35.
        ([0.3, 0.8, 0.7, 0.6, 0.5, 0.35, 0.3], 40),
        ([], None),
        ([0.3], None),
    ],
)
def test_a_run_collapsed_at_the_first_of_two_falls_below_half_of_the_best(
    scores: list[float], step: int | None
):
    assert step_of(scores) == step


def test_a_single_fall_counts_at_the_end_of_a_run_and_not_before():
    assert step_of([0.3, 0.8, 0.2], is_over=True) == 16
    assert step_of([0.3, 0.8, 0.2], is_over=False) is None


def test_a_run_that_never_scored_has_nothing_to_lose():
    assert step_of([0.04, 0.0, 0.0, 0.0]) is None
    assert step_of([0.0, 0.0, 0.0]) is None
    assert step_of([0.06, 0.0, 0.0]) == 8


def test_share_and_number_of_evaluations_are_the_rules():
    strict = CollapseRule(share=0.9, num_evaluations=3)
    assert step_of([0.5, 1.0, 0.89, 0.89], is_over=False, rule=strict) is None
    assert step_of([0.5, 1.0, 0.89, 0.89, 0.89], is_over=False, rule=strict) == 16


@given(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=20))
def test_a_run_that_never_falls_below_half_of_its_best_never_collapsed(scores: list[float]):
    best, kept = 0.0, []
    for score in scores:
        kept.append(max(score, 0.5 * best))
        best = max(best, kept[-1])
    assert step_of(kept) is None


@given(st.lists(st.floats(0.0, 1.0), max_size=20))
def test_what_has_collapsed_before_the_end_has_collapsed_at_the_end(scores: list[float]):
    early = step_of(scores, is_over=False)
    assert early is None or step_of(scores, is_over=True) == early


def test_the_sentence_of_the_report_says_the_numbers_of_the_rule():
    sentence = CollapseRule(share=0.4, num_evaluations=3, min_best=0.1).sentence
    assert "40%" in sentence and "3 held-out evaluations" in sentence and "0.1" in sentence
