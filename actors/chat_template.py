"""A model's chat template, rendered once for the first prompt of an episode.

The template only ever sees a placeholder where a message holds text from outside, so that it can
neither read that text nor change it; the text is put in afterwards, still marked as foreign.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import msgspec
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from leeway.actors.text import Text, compose, foreign
from leeway.actors.tokenizer_facts import TokenizerFacts
from leeway.replay.errors import ConfigurationError

_HELD: Final = re.compile("\ue000([0-9]+)\ue001")
"""Where held text goes back in: two characters of Unicode's private use around a number."""
_REPLY: Final = "\ue000reply\ue001"


class ChatMessage(msgspec.Struct, frozen=True):
    """One message to render."""

    role: str
    content: Text


class ChatTemplate:
    """Renders conversations as transformers' `apply_chat_template` does."""

    def __init__(self, facts: TokenizerFacts) -> None:
        """Raises ConfigurationError where the model has no chat template, or no valid one."""
        if facts.chat_template is None:
            raise ConfigurationError(
                'search.chat_template = "on", but the model has no chat template'
                " (chat_template.jinja, or chat_template in tokenizer_config.json); use auto or off"
            )
        self._facts = facts
        try:
            self._template = _environment().from_string(facts.chat_template)
        except TemplateError as error:
            raise ConfigurationError(
                f"the model's chat template cannot be read: {error}; correct it, or set"
                ' search.chat_template = "off"'
            ) from None

    def render(self, messages: Sequence[ChatMessage]) -> Text:
        """The conversation and the beginning of the reply. Raises ConfigurationError for messages
        that the template refuses or leaves out.
        """
        held: list[tuple[str, bool]] = []
        plain = [{"role": m.role, "content": _hold(m.content, held)} for m in messages]
        rendered = self._render(plain, add_generation_prompt=True)
        parts = _HELD.split(rendered)
        if {int(number) for number in parts[1::2]} != set(range(len(held))):
            raise ConfigurationError(
                f"the model's chat template leaves out part of a message with role"
                f" {' or '.join(sorted({repr(m.role) for m in messages}))}; set"
                ' search.chat_template = "off", or unset search.system_prompt'
            )
        return compose(*(_kept(held[int(part)]) if i % 2 else part for i, part in enumerate(parts)))

    def ends_with_end_token(self) -> bool:
        """Whether a reply in the template is followed by a token that ends a generation.

        Chat models end their replies so. A base model whose tokenizer merely carries the template
        of its family ends texts with another token (Qwen2.5: `<|endoftext|>`, the template
        `<|im_end|>`).
        """
        conversation = [
            {"role": "user", "content": "a question"},
            {"role": "assistant", "content": _REPLY},
        ]
        rendered = self._render(conversation, add_generation_prompt=False)
        behind = rendered.rpartition(_REPLY)[2]
        return any(token in behind for token in self._facts.end_tokens)

    def opens_thought(self) -> bool:
        """Whether the beginning of the reply ends with `<think>`, as reasoning models' may."""
        rendered = self._render([{"role": "user", "content": "a"}], add_generation_prompt=True)
        return rendered.rstrip().endswith("<think>")

    def _render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._facts.named_tokens,
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigurationError(
                f"the model's chat template refuses messages with the roles {roles}: {error}; send"
                ' others, or set search.chat_template = "off"'
            ) from None


def _kept(piece: tuple[str, bool]) -> Text | str:
    text, is_outside = piece
    return foreign(text) if is_outside else text


def _hold(content: Text, held: list[tuple[str, bool]]) -> str:
    """The content with each piece put aside: foreign ones, that a template cannot read them, and
    our own, so that it is seen when it leaves one out. White space at its ends stays: a template
    that trims a message trims this one as well.
    """
    parts: list[str] = []
    for piece, outside in content.pieces():
        core = piece.strip()
        if not core:
            parts.append(_HELD.sub("", piece))
            continue
        before, after = piece[: piece.index(core)], piece[piece.index(core) + len(core) :]
        parts.append(f"{before}\ue000{len(held)}\ue001{after}")
        held.append((core, outside))
    return "".join(parts)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks trained replies; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, **options: Any) -> str:
    """Without jinja2's HTML escapes, which would change what the model reads."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
