"""Rewards: normalisation, exact match, F1, and which answer counts."""

import pytest

from leeway.actors.search.protocol import last_answer
from leeway.actors.search.rewards import contains_answer, exact_match, f1, normalise


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Eiffel-Tower!", "eiffeltower"),
        ("A tale of an owl and the sea", "tale of owl and sea"),
        ("Theatre", "theatre"),
        ("  Krone\n", "krone"),
        ("U.S.A.", "usa"),
        ("«Zürich»", "zürich"),
        ("don\u2019t", "dont"),
        ("Zu\u0308rich", "z\u00fcrich"),
        ("東京", "東京"),
        ("$5 + `x`", "5 x"),
        ("The", ""),
        ("?!", ""),
        ("", ""),
    ],
)
def test_normalising_drops_case_punctuation_articles_and_extra_space(text: str, normal: str):
    assert normalise(text) == normal


def test_exact_match_takes_any_golden_answer():
    golden = ("Norwegian krone", "krone", "NOK")
    assert exact_match("the Krone.", golden) == 1.0
    assert exact_match("nok", golden) == 1.0
    assert exact_match("krona", golden) == 0.0


def test_an_answer_that_normalises_to_nothing_never_matches():
    assert exact_match("the", ("The", "krone")) == 0.0
    assert f1("the", ("The",)) == 0.0


def test_no_answer_scores_nothing():
    assert exact_match(None, ("krone",)) == 0.0
    assert f1(None, ("krone",)) == 0.0


def test_f1_is_the_best_over_golden_answers():
    # against "krone": precision 1/2, recall 1/1 -> 2 * .5 * 1 / 1.5
    assert f1("norwegian krone", ("krone", "swedish krona")) == pytest.approx(2 / 3)
    # two of three words on each side
    assert f1("king of norway", ("queen of norway",)) == pytest.approx(2 / 3)


def test_f1_counts_a_repeated_word_as_often_as_both_sides_have_it():
    # shared: one "krone"; precision 1/3, recall 1/1 -> 2 * 1/3 / (4/3)
    assert f1("krone krone krone", ("krone",)) == pytest.approx(0.5)


def test_the_last_of_several_answers_counts():
    turns = [
        "<answer>krona</answer>",
        "<think>no</think><answer>euro</answer><answer>krone</answer>",
    ]
    assert last_answer(turns) == "krone"
    assert last_answer(["<answer>krone</answer>", "<search>x</search>"]) == "krone"
    assert last_answer(["<search>x</search>"]) is None


def test_a_retrieved_answer_must_stand_as_whole_words():
    assert contains_answer(["Norway Its currency is the Krone."], ("krone",)) == 1.0
    assert contains_answer(["kroner are paid"], ("krone",)) == 0.0
    assert contains_answer([], ("krone",)) == 0.0
    assert contains_answer(["the cat"], ("The",)) == 0.0


def test_punctuation_in_a_passage_neither_joins_nor_parts_an_answer():
    assert contains_answer(["a scholar (1703–1792)"], ("1703",)) == 1.0
    assert contains_answer(["made in the U.S.A."], ("USA",)) == 1.0
