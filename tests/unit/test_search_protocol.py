"""What a turn's text asks for: malformed, doubled, nested and misplaced actions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.actors.search.protocol import (
    TAGS,
    Parsed,
    defuse,
    last_answer,
    parse,
    render_observation,
    thought,
)

INVALID = Parsed("invalid", "")


@pytest.mark.parametrize(
    ("generated", "parsed"),
    [
        ("<search>a</search>", Parsed("search", "a")),
        ("<answer> a\nb </answer>", Parsed("answer", "a\nb")),
        # the rest of the token that closed the action, or an engine that did not stop
        ("<search>a</search>.", Parsed("search", "a")),
        ("<answer>a</answer> and that is it", Parsed("answer", "a")),
        # two actions: the last
        ("<search>a</search><answer>b</answer>", Parsed("answer", "b")),
        ("<answer>b</answer><search>a</search>", Parsed("search", "a")),
        ("<answer>a</answer><answer></answer>", INVALID),
        # not closed, closed by another tag, never opened, empty
        ("<search>a", INVALID),
        ("<search>a</answer>", INVALID),
        ("a</search>", INVALID),
        ("<search> </search>", INVALID),
        ("hello", INVALID),
        ("", INVALID),
        ("<Search>a</Search>", INVALID),
        # nested: the inner one if it is whole
        ("<search>a <search>b</search>", Parsed("search", "b")),
        ("<search>a <answer>b</answer>", Parsed("answer", "b")),
        ("<search>a <answer>b</search>", INVALID),
        ("<answer><think>so</think>b</answer>", INVALID),
        ("<search>a<information>b</search>", INVALID),
        # within a thought: it ended the turn
        ("<think>so <search>a</search>", Parsed("search", "a")),
        ("<think>so <search>a</search></think><search>b</search>", Parsed("search", "b")),
        # results that the model made up
        ("<information>Doc 1: x</information><answer>a</answer>", INVALID),
        ("<search>a</search><information>x", INVALID),
        ("</information><answer>a</answer>", INVALID),
    ],
)
def test_a_turn_asks_for_its_last_whole_action(generated: str, parsed: Parsed):
    assert parse(generated) == parsed


@pytest.mark.parametrize(
    ("generated", "text"),
    [
        ("so</think><search>a</search>", "so"),
        ("so</think><think>on</think><search>a</search>", "soon"),
        ("<think>a</think>b</think>", "a"),
    ],
)
def test_a_thought_that_the_prompt_opened_is_one_too(generated: str, text: str):
    assert thought(generated) == text


def test_no_passage_is_an_empty_frame():
    assert render_observation([]) == "\n<information>\n</information>\n"


def test_what_a_document_says_is_foreign_and_its_frame_is_not():
    text = render_observation([("T", "a </s>"), ("", "b")])
    assert text == '\n<information>\nDoc 1: "T" a </s>\nDoc 2: "" b\n</information>\n'
    assert [text[a:b] for a, b in text.spans] == ["T", "a </s>", "b"]


hostile = st.lists(
    st.sampled_from([*TAGS, "<", ">", "/", "answer", "search", "</Answer >"]) | st.text(max_size=3),
    max_size=10,
).map("".join)


@given(hostile, hostile)
def test_nothing_in_a_document_parses_as_an_action_or_ends_the_frame(title: str, text: str):
    shown = render_observation([(title, text)])
    assert parse(shown).action == "invalid"
    assert last_answer([shown]) is None
    assert shown.count("</information>") == shown.count("<information>") == 1


@given(hostile)
def test_defusing_leaves_no_tag_and_changes_brackets_alone(text: str):
    calm = defuse(text)
    assert not any(tag in calm for tag in TAGS)
    assert len(calm) == len(text)
    assert all(
        a == b or (a, b) in {("<", "("), (">", ")")} for a, b in zip(text, calm, strict=True)
    )
