"""What a model folder says about its tokenizer beside the vocabulary: chat template, named tokens.

Read from the folder's JSON files, so that no process imports transformers for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import AddedToken, Tokenizer

from leeway.replay.errors import ConfigurationError

NAMED: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Tokens that a chat template may name, as `bos_token` and so on."""


class TokenizerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one tokenizer. The defaults are those of one without any special token."""

    chat_template: str | None = None
    """Jinja source. None: the model has none."""
    named_tokens: dict[str, str] = {}
    """Texts of `bos_token`, `eos_token`, ..., as far as the model has them."""
    end_tokens: tuple[str, ...] = ()
    """Texts of the tokens that end a generation: the tokenizer's and those of
    generation_config.json."""
    begin: str = ""
    """Text of the tokens that the tokenizer puts before every text, such as `<s>`."""
    added_tokens: dict[str, int] = {}
    """Every token added to the vocabulary, special ones among them, by text."""
    control_ids: frozenset[int] = frozenset()
    """Ids that text from outside must never become: special tokens, and added ones that look like
    markup (`<tool_call>`). Not the unknown token, which stands for any unknown character."""


def read_facts(folder: Path, tokenizer: Tokenizer) -> TokenizerFacts:
    """The facts of a model folder. Raises ConfigurationError for a file that is no JSON."""
    settings = _settings(folder)
    named = {f"{n}_token": t for n in NAMED if (t := _text_of(settings.get(f"{n}_token")))}
    added = tokenizer.get_added_tokens_decoder()
    return TokenizerFacts(
        chat_template=_chat_template(folder, settings),
        named_tokens=named,
        end_tokens=_end_tokens(folder, named, tokenizer),
        begin=_begin(tokenizer),
        added_tokens={token.content: i for i, token in added.items()},
        control_ids=_control_ids(named, added, tokenizer),
    )


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json."""
    return _read(folder / "special_tokens_map.json") | _read(folder / "tokenizer_config.json")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is no JSON ({error}); copy the model again") from None
    return read if isinstance(read, dict) else {}


def _text_of(token: object) -> str | None:
    """A token is written as a string, or as a table with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The file of its own wins over the settings; of several the one named `default`."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        by_name = {entry.get("name"): entry.get("template") for entry in found}
        found = by_name.get("default")
    return found if isinstance(found, str) and found.strip() else None


def _end_tokens(folder: Path, named: dict[str, str], tokenizer: Tokenizer) -> tuple[str, ...]:
    ids = _read(folder / "generation_config.json").get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    texts = [tokenizer.id_to_token(i) for i in listed if isinstance(i, int) and i >= 0]
    return tuple(dict.fromkeys(t for t in (named.get("eos_token"), *texts) if t))


def _begin(tokenizer: Tokenizer) -> str:
    """What stands before a text, not what stands behind it: `<s> a </s>` -> `<s>`."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    mask = encoding.special_tokens_mask
    return "".join(encoding.tokens[: mask.index(0)]) if 0 in mask else ""


def _control_ids(
    named: dict[str, str], added: dict[int, AddedToken], tokenizer: Tokenizer
) -> frozenset[int]:
    control = {i for i, t in added.items() if t.special or _looks_like_markup(t.content)}
    others = {text for name, text in named.items() if name != "unk_token"}
    control |= {i for text in others if (i := tokenizer.token_to_id(text)) is not None}
    unknown = named.get("unk_token")
    if unknown is not None and unknown not in others:
        control.discard(tokenizer.token_to_id(unknown))
    return frozenset(control)


def _looks_like_markup(content: str) -> bool:
    """Runs of spaces and words that somebody added are text: all but those with a sign in them."""
    return any(not (c.isalnum() or c.isspace() or c == "▁") for c in content)
