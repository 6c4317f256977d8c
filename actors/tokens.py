"""Text to token ids and back, the same way everywhere an episode is played.

Reads `tokenizer.json` through the `tokenizers` library where there is one, so that a rollout worker
does not import transformers (seconds, and hundreds of megabytes) for two functions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from leeway.replay.errors import ConfigurationError

EOS = "<|endoftext|>"
"""End-of-sequence token of the byte tokenizer."""


class _Codec(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


class Tokens:
    """A tokenizer: `encode` adds nothing to the text, `decode` leaves nothing out of it."""

    def __init__(self, codec: _Codec, *, eos_id: int | None, vocab_size: int) -> None:
        self._codec = codec
        self.eos_id = eos_id
        """Id of the end-of-sequence token. None: only stop strings and limits end a generation."""
        self.vocab_size = vocab_size
        """Added tokens included."""

    @classmethod
    def load(cls, folder: str | Path) -> Tokens:
        """The tokenizer of a Hugging Face model folder; ConfigurationError if it has none."""
        folder = Path(folder)
        if (folder / "tokenizer.json").is_file():
            return _load_fast(folder)
        if (folder / "tokenizer_config.json").is_file():
            return _load_transformers(folder)
        raise ConfigurationError(
            f"{folder} holds no tokenizer: expected tokenizer.json or tokenizer_config.json in it"
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; nothing is added before or after."""
        return self._codec.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens included; broken characters become U+FFFD."""
        return self._codec.decode(ids)


class _FastCodec:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class _TransformersTokenizer(Protocol):
    eos_token_id: int | None

    def __len__(self) -> int: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(
        self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...


class _TransformersCodec:
    def __init__(self, tokenizer: _TransformersTokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def _load_fast(folder: Path) -> Tokens:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    eos = _eos_token(folder)
    eos_id = tokenizer.token_to_id(eos) if eos is not None else None
    if eos is not None and eos_id is None:
        raise ConfigurationError(
            f"{folder}: the end-of-sequence token {eos!r} is not in tokenizer.json"
        )
    return Tokens(_FastCodec(tokenizer), eos_id=eos_id, vocab_size=tokenizer.get_vocab_size())


def _load_transformers(folder: Path) -> Tokens:
    from transformers import AutoTokenizer

    tokenizer = cast(
        _TransformersTokenizer, AutoTokenizer.from_pretrained(folder, local_files_only=True)
    )
    return Tokens(
        _TransformersCodec(tokenizer), eos_id=tokenizer.eos_token_id, vocab_size=len(tokenizer)
    )


def _eos_token(folder: Path) -> str | None:
    """`eos_token` of the folder's tokenizer settings: a string, or a table with its content."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if not path.is_file():
            continue
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
        if isinstance(eos, dict):
            eos = eos.get("content")
        if isinstance(eos, str):
            return eos
    return None


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
