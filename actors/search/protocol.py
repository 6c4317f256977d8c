"""The text protocol of a search episode, written down once: tags, rendering, parsing.

    Question: What is the currency of the country whose capital is Oslo?
    <think>find the country first</think><search>capital Oslo</search>
    <information>
    Doc 1: "Norway" Norway - Capital: name: Oslo; ...
    </information>
    <think>now the currency</think><search>Norway currency</search>
    ...
    <think>found it</think><answer>krone</answer>

Only text the policy generated is ever parsed; questions and passages have their tags defused before
they are rendered, so nothing in a document can act.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

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

_TAG = re.compile(r"<(/?(?:think|search|information|answer)\s*)>", re.IGNORECASE)
_ACTION = re.compile(r"<(search|answer)>((?:(?!<search>|<answer>).)*?)</\1>", re.DOTALL)
_THOUGHT = re.compile(r"<think>(.*?)(?=</think>|<search>|<answer>|\Z)", re.DOTALL)


class Parsed(msgspec.Struct, frozen=True):
    """What one turn's generated text asks for."""

    action: Action
    content: str
    """The query or the answer, stripped; empty for an invalid action."""


def defuse(text: str) -> str:
    """Text from outside with tags made harmless: `<answer>` becomes `(answer)`, and `<|im_end|>`,
    which a tokenizer would read as control, `(|im_end|>`.
    """
    return _TAG.sub(r"(\1)", text).replace("<|", "(|")


def parse(generated: str) -> Parsed:
    """The turn's action: its last complete, non-empty search or answer; else invalid.

    "<search>a</search>" -> search "a".  "<answer></answer>" -> invalid.  "hello" -> invalid.
    """
    actions = _ACTION.findall(generated)
    if not actions or not actions[-1][1].strip():
        return Parsed("invalid", "")
    kind, content = actions[-1]
    return Parsed("search" if kind == "search" else "answer", content.strip())


def last_answer(generated_turns: list[str]) -> str | None:
    """The last `<answer>` in the model's own turns, None if there is none."""
    for generated in reversed(generated_turns):
        for kind, content in reversed(_ACTION.findall(generated)):
            if kind == "answer":
                return content.strip()
    return None


def thought(generated: str) -> str:
    """What stands in `<think>`; without a closing tag, up to the action or the end.

    "<think>so</think><search>a</search>" -> "so".  "<think>so on and" -> "so on and".
    """
    return "".join(_THOUGHT.findall(generated))


def render_observation(passages: list[tuple[str, str]]) -> str:
    """`passages` are (title, text) in rank order."""
    lines = [
        f'Doc {i}: "{defuse(title)}" {defuse(text)}'
        for i, (title, text) in enumerate(passages, start=1)
    ]
    return "\n<information>\n" + "\n".join(lines) + OBSERVATION_END


def split_contents(contents: str) -> tuple[str, str]:
    """`"Title"\\ntext` of a corpus line as (title, text); the title is empty without its line."""
    first, newline, rest = contents.partition("\n")
    if not newline:
        return "", contents
    return first.strip().strip('"'), rest.strip()
