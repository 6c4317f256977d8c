"""Text to token ids and back, the same way everywhere an episode is played.

Reads `tokenizer.json` through the `tokenizers` library where there is one, so that a rollout worker
does not import transformers (seconds, and hundreds of megabytes) for two functions.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from leeway.actors.text import Text
from leeway.actors.tokenizer_facts import TokenizerFacts, read_facts
from leeway.replay.errors import ConfigurationError

EOS = "<|endoftext|>"
"""End-of-sequence token of the byte tokenizer."""


class Tokens:
    """A tokenizer: `encode` adds nothing to the text, `decode` leaves nothing out of it."""

    def __init__(self, tokenizer: Tokenizer, facts: TokenizerFacts, eos_id: int | None) -> None:
        self._tokenizer = tokenizer
        self.facts = facts
        """Chat template and control tokens."""
        self.eos_id = eos_id
        """Id of the end-of-sequence token. None: only stop strings and limits end a generation."""
        self.vocab_size = tokenizer.get_vocab_size()
        """Added tokens included."""
        self._control_in_own = lru_cache(1024)(self._control_in)

    @classmethod
    def load(cls, folder: str | Path) -> Tokens:
        """The tokenizer of a Hugging Face model folder; ConfigurationError if it has none."""
        folder = Path(folder)
        tokenizer = _read_tokenizer(folder)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        facts = read_facts(folder, tokenizer)
        eos = facts.named_tokens.get("eos_token")
        eos_id = tokenizer.token_to_id(eos) if eos is not None else None
        if eos is not None and eos_id is None:
            raise ConfigurationError(
                f"{folder}: the end-of-sequence token {eos!r} is not in tokenizer.json"
            )
        return cls(tokenizer, facts, eos_id)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; nothing is added before or after.

        No id of `facts.control_ids` comes out of what a Text marks as foreign: where its characters
        would make one, they are changed until they do not (`</s>` becomes `(/s>`). A plain str is
        the environment's own, and a control token in it means itself.
        """
        # The only entry that leaves out where each token stands in the text, a fifth of the time.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids = encoding.ids
        if isinstance(text, Text) and text.spans and not self.facts.control_ids.isdisjoint(ids):
            return self._encode_defused(text, ids)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens included; broken characters become U+FFFD."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _control_in(self, own: str) -> tuple[int, ...]:
        ids = self._tokenizer.encode(own, add_special_tokens=False).ids
        return tuple(i for i in ids if i in self.facts.control_ids)

    def _encode_defused(self, text: Text, ids: list[int]) -> list[int]:
        """`ids` again where the control ids among them are those of the environment's own pieces,
        one for one; otherwise those of the text with its foreign control tokens broken.
        """
        control = self.facts.control_ids
        own = [
            i
            for piece, outside in text.pieces()
            if not outside
            for i in self._control_in_own(piece)
        ]
        if [i for i in ids if i in control] == own:
            return ids
        while True:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            places = [k for k, i in enumerate(encoding.ids) if i in control]
            spans = [span for k in places if (span := encoding.token_to_chars(k)) is not None]
            changed = text.defused(spans)
            if changed == text:
                return encoding.ids
            text = changed


def _read_tokenizer(folder: Path) -> Tokenizer:
    """From tokenizer.json; else as transformers makes it of the model's own vocabulary files."""
    if (folder / "tokenizer.json").is_file():
        try:
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigurationError(
                f"{folder / 'tokenizer.json'} is no tokenizer ({error}); copy the model again"
            ) from None
    if not (folder / "tokenizer_config.json").is_file():
        raise ConfigurationError(
            f"{folder} holds no tokenizer: expected tokenizer.json or tokenizer_config.json in it"
        )
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigurationError(f"the tokenizer of {folder} cannot be loaded: {reason}") from None
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        raise ConfigurationError(
            f"{folder}: {type(loaded).__name__} has no tokenizer.json, and transformers cannot make"
            " one; convert the tokenizer to that format"
        )
    return tokenizer


def write_byte_tokenizer(folder: Path, tags: tuple[str, ...] = ()) -> None:
    """Write a tokenizer of the 256 bytes, `tags` and EOS into `folder`: one token per byte or tag.

    It reads any text back unchanged and needs no download; the scripted policy plays with it.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (*tags, EOS)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}),
        encoding="utf-8",
    )
