"""The first text of a search episode: whose words, and in which form.

    words: search.prompt           template | instructions | the row's own messages
    form:  search.chat_template    plain text | the model's chat template, once

Nothing here is ever rendered again: what follows the first prompt is appended token by token.
"""

from __future__ import annotations

import re
from typing import Final

from leeway.actors.chat_template import ChatMessage, ChatTemplate
from leeway.actors.config import BARE_PROMPT, SearchConfig
from leeway.actors.environment import Message, Question
from leeway.actors.search.protocol import TAGS, defuse
from leeway.actors.text import Text, compose, foreign
from leeway.actors.tokenizer_facts import TokenizerFacts
from leeway.replay.errors import DataError

INSTRUCTIONS: Final = """\
Answer the question below. Think inside <think> and </think> before everything you do. If you need \
to know something, write one query inside <search> and </search>: the passages that are found come \
back between <information> and </information>, and you may search again. Once you know enough, \
write the answer and nothing else inside <answer> and </answer>, as in <answer>Beijing</answer>. \
If the question lists choices, answer with the letter of the right one, as in <answer>B</answer>.
Question: {question}
"""
"""For a model that was not trained for the protocol. The reward reads what the model writes itself,
so these examples earn nothing."""

_PROBE: Final = Question(
    id="probe", question="?", golden_answers=("?",), prompt=(Message("user", "?"),)
)
"""Tried at once, so that a template that takes no system message is refused before a run starts."""
_TAG = re.compile("(" + "|".join(map(re.escape, TAGS)) + ")")


class Prompts:
    """Writes first prompts, for one configuration and one tokenizer."""

    def __init__(self, config: SearchConfig, facts: TokenizerFacts | None = None) -> None:
        """`facts` None: a tokenizer without a chat template, of a model that knows the protocol.

        Raises ConfigurationError for a chat template that is wanted and missing, that is broken, or
        that refuses such messages as it will get.
        """
        self._config = config
        self._begin = facts.begin if facts else ""
        self._template = _template(config, facts)
        self._chat = _chat(config, facts or TokenizerFacts())
        self.opens_thought = self._chat is not None and self._chat.opens_thought()
        """Whether prompts end with `<think>`, so that the first turn begins within it."""
        self(_PROBE)

    def __call__(self, question: Question) -> Text:
        """The prompt of one question. Raises DataError if it has none and should."""
        messages = self._messages(question)
        if self._chat is not None:
            return self._chat.render(messages)
        system = [compose(m.content, "\n\n") for m in messages if m.role == "system"]
        others = [m.content for m in messages if m.role != "system"]
        lines = [part for content in others for part in ("\n", content)][1:]
        return compose(self._begin, *system, *lines)

    def _messages(self, question: Question) -> list[ChatMessage]:
        prompt = self._config.prompt
        if prompt == "data" and not question.prompt:
            raise DataError(
                f'question {question.id!r} carries no messages, and search.prompt = "data" takes'
                " them from the data; use auto or template"
            )
        if question.prompt and prompt in ("auto", "data"):
            messages = [_own_messages(message, question) for message in question.prompt]
        else:
            messages = [ChatMessage("user", self._filled(question))]
        system = self._config.system_prompt
        if system and messages[0].role != "system":
            messages.insert(0, ChatMessage("system", Text(system)))
        return messages

    def _filled(self, question: Question) -> Text:
        before, *rest = self._template.split("{question}")
        asked = _asked(question)
        return compose(before, *(part for text in rest for part in (asked, text)))


def _template(config: SearchConfig, facts: TokenizerFacts | None) -> str:
    """The words for a question that brings none."""
    knows_protocol = facts is None or set(TAGS) <= set(facts.added_tokens)
    is_own = config.prompt == "template" or config.prompt_template != BARE_PROMPT
    if config.prompt != "instructions" and (is_own or knows_protocol):
        return config.prompt_template
    return INSTRUCTIONS


def _chat(config: SearchConfig, facts: TokenizerFacts) -> ChatTemplate | None:
    if config.chat_template == "off":
        return None
    if config.chat_template == "auto" and facts.chat_template is None:
        return None
    template = ChatTemplate(facts)
    return template if config.chat_template == "on" or template.ends_with_end_token() else None


def _asked(question: Question) -> Text:
    """The question, and its choices below it, one lettered line each."""
    lines = [question.question, *(f"{chr(65 + i)}. {c}" for i, c in enumerate(question.choices))]
    return foreign(defuse("\n".join(lines)))


def _own_messages(message: Message, question: Question) -> ChatMessage:
    """A message of the data as it is. The tags in its instructions are meant; in the question that
    stands in them they are not, and nothing in it is a control token.
    """
    before, asked, after = message.content.rpartition(question.question)
    if not asked:
        return ChatMessage(message.role, _instructions(message.content))
    return ChatMessage(
        message.role,
        compose(_instructions(before), foreign(defuse(asked)), _instructions(after)),
    )


def _instructions(text: str) -> Text:
    parts = _TAG.split(text)
    return compose(*(part if i % 2 else foreign(part) for i, part in enumerate(parts)))
