"""Rewards: normalisation, each measure by hand-computed numbers, and which answer counts."""

import pytest

from leeway.actors.environment import Question
from leeway.actors.search.protocol import last_answer
from leeway.actors.search.rewards import (
    ANSWERS,
    contains_answer,
    exact_match,
    f1,
    format_score,
    multiple_choice,
    normalise,
    substring_match,
)


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


# --- sub-string ---


@pytest.mark.parametrize(
    ("answer", "golden", "score"),
    [
        ("It is the krone of Norway.", ("krone",), 1.0),
        ("It is the krone of Norway.", ("euro", "KRONE"), 1.0),
        ("Brussels", ("us",), 0.0),
        ("the Norwegian Krone", ("Norwegian krone (NOK)",), 0.0),
        ("in Zu\u0308rich (CH)", ("Z\u00fcrich",), 1.0),
        ("\u00abKrone\u00bb", ("krone",), 1.0),
        ("the", ("The",), 0.0),
        ("", ("krone",), 0.0),
        (None, ("krone",), 0.0),
    ],
)
def test_a_golden_answer_stands_in_the_answer_as_whole_words(answer, golden, score: float):
    assert substring_match(answer, golden) == score


# --- multiple choice ---

DRUGS = ("aspirin", "heparin", "Vitamin K.", "no \u03b1-blocker")


@pytest.mark.parametrize(
    "answer",
    [
        *("B", "b", " B ", "(B)", "B.", "B)", "(b).", "B:", "\uff22", "\uff08B\uff09"),
        *("B: heparin", "B. Heparin", "(B) heparin", "B) heparin.", "Heparin", "heparin."),
    ],
)
def test_the_right_choice_may_be_named_in_many_ways(answer: str):
    assert multiple_choice(answer, ("B",), DRUGS) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        *("A", "A or B", "A, B", "AB", "B and C", "B: aspirin", "B. heparin or aspirin", "B A"),
        *("B because of clots", "not B", "aspirin, heparin", "E", "Z", "", "  ", "()", "the"),
        *("Beta", "\u0412", "B heparin"),
    ],
)
def test_another_choice_or_an_unclear_answer_is_wrong(answer: str):
    assert multiple_choice(answer, ("B",), DRUGS) == 0.0


def test_no_answer_chooses_nothing():
    assert multiple_choice(None, ("B",), DRUGS) == 0.0


def test_a_choice_is_its_text_without_regard_to_case_and_full_stop():
    assert multiple_choice("vitamin k", ("C",), DRUGS) == 1.0
    assert multiple_choice("C: VITAMIN K", ("C",), DRUGS) == 1.0
    assert multiple_choice("NO \u0391-blocker", ("D",), DRUGS) == 1.0


def test_signs_tell_choices_apart():
    assert multiple_choice("+", ("A",), ("+", "-")) == 1.0
    assert multiple_choice("-", ("A",), ("+", "-")) == 0.0


def test_any_of_several_right_letters_counts():
    assert multiple_choice("C", ("B", "c"), DRUGS) == 1.0


def test_a_text_that_two_choices_have_is_right_only_if_both_are():
    twins = ("same", "same", "other")
    assert multiple_choice("same", ("A", "B"), twins) == 1.0
    assert multiple_choice("same", ("A",), twins) == 0.0
    assert multiple_choice("A", ("A",), twins) == 1.0


def test_without_the_choices_texts_a_letter_is_still_an_answer():
    assert multiple_choice("(B)", ("B",), ()) == 1.0
    assert multiple_choice("B: heparin", ("B",), ()) == 0.0


# --- format ---

GOOD = "<think>so</think><search>a</search>"
END = "<think>ok</think>\n<answer>krone</answer>"


@pytest.mark.parametrize(
    ("turns", "score"),
    [
        ([GOOD, END], 1.0),
        ([f" {GOOD}", f"{END}."], 1.0),  # the rest of the last token
        ([GOOD], 0.0),  # no answer
        ([GOOD, "<answer>krone</answer>"], 0.0),  # no thought
        ([GOOD, f"well, {END}"], 0.0),
        ([GOOD, "<think>ok</think> so <answer>krone</answer>"], 0.0),
        ([GOOD, "<think>ok<answer>krone</answer>"], 0.0),  # thought not closed
        ([GOOD, "<think>a</think><think>b</think><answer>krone</answer>"], 0.0),
        ([GOOD, "<think>ok</think><answer> </answer>"], 0.0),
        ([GOOD, "<think>ok</think><answer>krone</search>"], 0.0),
        ([GOOD, "<think><information>x</information></think><answer>krone</answer>"], 0.0),
        (["hello", END], 0.0),
        ([], 0.0),
    ],
)
def test_the_format_is_one_thought_and_one_action_in_every_turn(turns: list[str], score: float):
    assert format_score(turns) == score


def test_a_thought_that_the_prompt_opened_need_not_be_opened_again():
    turns = ["so</think><search>a</search>", END]
    assert format_score(turns, thought_is_open=True) == 1.0
    assert format_score(turns) == 0.0
    # in the first turn only
    assert format_score([GOOD, turns[0].replace("search", "answer")], thought_is_open=True) == 0.0


# --- by name ---

FREE = Question(id="q", question="?", golden_answers=("norwegian krone",))
LETTERED = Question(id="q", question="?", golden_answers=("B",), choices=("euro", "krone"))


@pytest.mark.parametrize(
    ("name", "question", "answer", "score"),
    [
        ("auto", FREE, "Norwegian Krone.", 1.0),
        ("auto", FREE, "krone", 0.0),
        ("auto", LETTERED, "krone", 1.0),
        ("exact-match", LETTERED, "krone", 0.0),
        ("exact-match", LETTERED, "(b)", 1.0),
        ("f1", FREE, "krone", pytest.approx(2 / 3)),
        ("substring", FREE, "the norwegian krone, I think", 1.0),
        ("multiple-choice", LETTERED, "B: krone", 1.0),
        ("f1", FREE, None, 0.0),
    ],
)
def test_an_answer_reward_is_found_by_its_name(name: str, question, answer, score: float):
    assert ANSWERS[name](answer, question) == score


BACTERIA = ("S. aureus", "E. coli", "H. pylori", "C. difficile")


@pytest.mark.parametrize(("answer", "letter"), zip(BACTERIA, "ABCD", strict=True))
def test_a_choice_whose_text_begins_like_a_letter_is_chosen_by_its_text(answer: str, letter: str):
    assert multiple_choice(answer, [letter], BACTERIA) == 1.0
    assert multiple_choice(f"{letter}. {answer}", [letter], BACTERIA) == 1.0
