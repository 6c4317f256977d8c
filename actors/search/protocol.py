"""The text protocol of a search episode, written down once: tags, rendering, parsing.

    Question: What is the currency of the country whose capital is Oslo?
    <think>find the country first</think><search>capital Oslo</search>
    <information>
    Doc 1: "Norway" Norway - Capital: name: Oslo; ...
    </information>
    <think>now the currency</think><search>Norway currency</search>
    ...
    <think>found it</think><answer>krone</answer>

Only text the policy generated is ever parsed. Questions and passages have their tags defused before
they are rendered, so that no document ends its own `<information>`, and are marked as foreign, so
that none becomes a control token.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from leeway.actors.text import Text, compose, foreign
from leeway.replay.schema import Action

TAGS: Final = (
    "<think>",
    "</think>",
    "<search>",
    "</search>",
    "<information>",
    "</information>",
    "<answer>",
    "</answer>",
)
STOP: Final = ("</search>", "</answer>")
OBSERVATION_END: Final = "\n</information>\n"
CORRECTION: Final = (
    "\n<information>\nThat was no action. Write <search>query</search> or <answer>answer</answer>."
    f"{OBSERVATION_END}"
)

_INFORMATION = re.compile(r"</?information>")
_TAG = re.compile(r"<(/?(?:think|search|information|answer)\s*)>", re.IGNORECASE)
_ANY_TAG = r"</?(?:think|search|information|answer)>"
_ACTION = re.compile(rf"<(search|answer)>((?:(?!{_ANY_TAG}).)*)</\1>", re.DOTALL)
_THOUGHT = re.compile(r"<think>(.*?)(?=</think>|<search>|<answer>|\Z)", re.DOTALL)
_OPENED_THOUGHT = re.compile(r"((?:(?!<think>).)*?)</think>", re.DOTALL)
_ONE_THOUGHT = rf"(?:(?!{_ANY_TAG}).)*"
_WELL_FORMED = re.compile(
    rf"\s*<think>{_ONE_THOUGHT}</think>\s*<(?:search|answer)>((?:(?!{_ANY_TAG}).)*)"
    r"</(?:search|answer)>",
    re.DOTALL,
)


class Parsed(msgspec.Struct, frozen=True):
    """What one turn's generated text asks for."""

    action: Action
    content: str
    """The query or the answer, stripped; empty for an invalid action."""


def defuse(text: str) -> str:
    """Text from outside with the protocol's tags made harmless: `<answer>` becomes `(answer)`.

    Control tokens, which are the tokenizer's matter, `Tokens.encode` breaks (text.py).
    """
    return _TAG.sub(r"(\1)", text)


def parse(generated: str) -> Parsed:
    """The turn's action: its last complete search or answer; invalid if that is empty, or if there
    is none, or if the turn holds an `<information>` tag, which only the environment writes.

    "<search>a</search>" -> search "a".  "<answer></answer>" -> invalid.  "hello" -> invalid.
    "<search>a <answer>b</answer>" -> answer "b": the search was never closed. An action ends
    generation, so one within an open `<think>` was the last thing the model could write and counts.
    """
    actions = _ACTION.findall(generated)
    if not actions or not actions[-1][1].strip() or _INFORMATION.search(generated):
        return Parsed("invalid", "")
    kind, content = actions[-1]
    return Parsed("search" if kind == "search" else "answer", content.strip())


def last_answer(generated_turns: list[str]) -> str | None:
    """The last answer in the model's own turns, None if there is none. A turn that was malformed
    answers nothing, whatever stands in it.
    """
    for generated in reversed(generated_turns):
        parsed = parse(generated)
        if parsed.action == "answer":
            return parsed.content
    return None


def thought(generated: str) -> str:
    """What stands in `<think>`; without a closing tag, up to the action or the end. Some chat
    templates open the first thought themselves, so text before a lone `</think>` is one too.

    "<think>so</think><search>a</search>" -> "so".  "<think>so on and" -> "so on and".
    "so</think><search>a</search>" -> "so".
    """
    opened = _OPENED_THOUGHT.match(generated)
    first = opened[1] if opened else ""
    return first + "".join(_THOUGHT.findall(generated))


def is_well_formed(generated: str, *, thought_is_open: bool = False) -> bool:
    """Whether a turn is one closed thought and one action that is not empty, and nothing else; what
    follows the action's closing tag is the rest of a token. `thought_is_open`: the prompt ended
    with `<think>`.
    """
    found = _WELL_FORMED.match(f"<think>{generated}" if thought_is_open else generated)
    return bool(found and found[1].strip() and parse(generated).action != "invalid")


def render_observation(passages: list[tuple[str, str]]) -> Text:
    """`passages` are (title, text) in rank order; their characters are marked as foreign."""
    parts: list[str] = ["\n<information>"]
    for i, (title, text) in enumerate(passages, start=1):
        parts += (f'\nDoc {i}: "', foreign(defuse(title)), '" ', foreign(defuse(text)))
    return compose(*parts, OBSERVATION_END)


def split_contents(contents: str) -> tuple[str, str]:
    """`"Title"\\ntext` of a corpus line as (title, text); the title is empty without its line."""
    first, newline, rest = contents.partition("\n")
    if not newline:
        return "", contents
    title = first.strip()
    if len(title) > 1 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title, rest.strip()
