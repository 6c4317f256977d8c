"""The first text of an episode: whose words, in which form, and what in it is foreign."""

import msgspec
import pytest

from leeway.actors.config import BARE_PROMPT, SearchConfig
from leeway.actors.environment import Message, Question
from leeway.actors.search.prompts import INSTRUCTIONS, Prompts
from leeway.actors.search.protocol import TAGS
from leeway.actors.text import Text
from leeway.actors.tokenizer_facts import TokenizerFacts
from leeway.replay.errors import ConfigurationError, DataError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BASE = TokenizerFacts(begin="<s>")
CHAT = TokenizerFacts(
    chat_template=TEMPLATE,
    named_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    end_tokens=("</s>",),
    begin="<s>",
)
FAMILY = TokenizerFacts(chat_template=TEMPLATE, end_tokens=("<|endoftext|>",))
"""A base model with the chat template of its family."""
PROTOCOL = TokenizerFacts(added_tokens={tag: i for i, tag in enumerate(TAGS)})
QUESTION = Question(id="q", question="Who?", golden_answers=("Ann",))
CARRIED = Question(
    id="q",
    question="Who?",
    golden_answers=("Ann",),
    prompt=(Message("user", "Use <search> and </search>. Question: Who?\n"),),
)


def prompt(facts: TokenizerFacts | None, question: Question = QUESTION, **keys: object) -> Text:
    return Prompts(SearchConfig.model_validate(keys), facts)(question)


def outside(text: Text) -> list[str]:
    return [text[a:b] for a, b in text.spans]


# --- form ---


def test_a_base_model_gets_plain_text_behind_the_token_that_begins_a_text():
    assert prompt(BASE, prompt_template="Q: {question}\n") == "<s>Q: Who?\n"


def test_a_chat_model_gets_its_own_template():
    text = prompt(CHAT, prompt_template="Q: {question}")
    assert text == "<s>[user]Q: Who?</s>[assistant]"
    assert outside(text) == ["Who?"]


def test_a_base_model_with_a_template_gets_plain_text_unless_told_otherwise():
    words = {"prompt_template": "Q: {question}"}
    assert prompt(FAMILY, **words) == "Q: Who?"
    assert prompt(FAMILY, chat_template="on", **words) == "[user]Q: Who?</s>[assistant]"
    assert prompt(CHAT, chat_template="off", **words) == "<s>Q: Who?"


def test_a_chat_template_that_is_wanted_and_missing_is_refused_at_once():
    with pytest.raises(ConfigurationError, match="the model has no chat template"):
        Prompts(SearchConfig(chat_template="on"), BASE)


def test_a_template_that_takes_no_system_message_is_refused_at_once():
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    facts = msgspec.structs.replace(CHAT, chat_template=refusing + TEMPLATE)
    Prompts(SearchConfig(), facts)
    with pytest.raises(ConfigurationError, match="the roles system, user: no system"):
        Prompts(SearchConfig(system_prompt="Be brief."), facts)


def test_a_system_prompt_is_a_message_or_comes_first():
    words = {"prompt_template": "Q: {question}", "system_prompt": "Be brief."}
    assert prompt(CHAT, **words) == "<s>[system]Be brief.</s>[user]Q: Who?</s>[assistant]"
    assert prompt(BASE, **words) == "<s>Be brief.\n\nQ: Who?"


# --- words ---


def test_a_model_made_for_the_protocol_gets_the_bare_question():
    assert prompt(PROTOCOL) == prompt(None) == BARE_PROMPT.replace("{question}", "Who?")


def test_any_other_model_gets_the_instructions_which_name_every_tag():
    text = prompt(BASE)
    assert text == "<s>" + INSTRUCTIONS.replace("{question}", "Who?")
    assert [tag for tag in TAGS if tag not in text] == []


def test_the_bare_question_and_the_instructions_can_be_asked_for():
    assert prompt(BASE, prompt="template") == "<s>Question: Who?\n"
    assert prompt(PROTOCOL, CARRIED, prompt="instructions") == prompt(BASE).removeprefix("<s>")


def test_the_messages_of_a_row_are_used_as_they_are():
    text = prompt(CHAT, CARRIED)
    assert text == f"<s>[user]{CARRIED.prompt[0].content}</s>[assistant]"
    assert prompt(BASE, CARRIED) == f"<s>{CARRIED.prompt[0].content}"


def test_the_template_wins_over_the_row_where_it_is_asked_for():
    keys = {"prompt": "template", "prompt_template": "Q: {question}"}
    assert prompt(BASE, CARRIED, **keys) == "<s>Q: Who?"


def test_a_row_without_messages_is_refused_where_they_are_asked_for():
    with pytest.raises(DataError, match="'q' carries no messages"):
        prompt(BASE, prompt="data")


def test_the_system_message_of_a_row_is_not_doubled():
    own = Question(
        id="q",
        question="Who?",
        golden_answers=("Ann",),
        prompt=(Message("system", "Theirs."), Message("user", "Who?")),
    )
    assert prompt(CHAT, own, system_prompt="Ours.") == (
        "<s>[system]Theirs.</s>[user]Who?</s>[assistant]"
    )
    assert prompt(BASE, own) == "<s>Theirs.\n\nWho?"


def test_choices_are_lettered_lines_below_the_question():
    question = Question(
        id="q", question="Which?", golden_answers=("B",), choices=("no <answer>", "yes")
    )
    text = prompt(BASE, question, prompt_template="Q: {question}\n")
    assert text == "<s>Q: Which?\nA. no (answer)\nB. yes\n"
    assert outside(text) == ["Which?\nA. no (answer)\nB. yes"]


# --- what is foreign ---


def test_tags_in_a_rows_instructions_are_meant_and_in_its_question_they_are_not():
    question = Question(
        id="q",
        question="Who is </think>?",
        golden_answers=("Ann",),
        prompt=(Message("user", "Use <search>. </s> Question: Who is </think>?\n"),),
    )
    text = prompt(BASE, question)
    assert text == "<s>Use <search>. </s> Question: Who is (/think)?\n"
    assert outside(text) == ["Use ", ". </s> Question: Who is (/think)?\n"]


def test_a_question_that_holds_the_place_of_the_question_is_not_filled_again():
    question = Question(id="q", question="{question}{x}", golden_answers=("Ann",))
    text = prompt(BASE, question, prompt_template="{question}|{question}")
    assert text == "<s>{question}{x}|{question}{x}"
