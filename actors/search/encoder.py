"""Texts to vectors: any Hugging Face encoder, pooled as its sentence-transformers files say."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from leeway.replay.errors import ConfigurationError

MAX_TOKENS: Final = 256
"""Longer texts are cut: a passage of 100 words has about 150 tokens."""
BATCH: Final = 64
"""Texts that go through the model at once."""
_EDGE_BYTES: Final = 1 << 20
_POOLINGS: Final[dict[str, str]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


class Encoder:
    """Unit vectors, so that an inner product is a cosine. Safe to call from several threads.

    E5 models want "query: " and "passage: " in front of texts; they are recognised by the name of
    their folder. Without sentence-transformers files the pooling is the mean over tokens.
    """

    def __init__(
        self,
        folder: Path,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
    ) -> None:
        """A prefix of None is chosen by the model's name."""
        if not (folder / "config.json").is_file():
            raise ConfigurationError(
                f"{folder} is not an encoder (no config.json); give a Hugging Face model folder"
            )
        self.folder = folder
        self.query_prefix = _prefix(folder, "query: ") if query_prefix is None else query_prefix
        self.passage_prefix = (
            _prefix(folder, "passage: ") if passage_prefix is None else passage_prefix
        )
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model, self._tokenizer = _load(folder, self._device)
        self._pooling = _pooling(folder)
        self._lock = threading.Lock()

    @property
    def num_dimensions(self) -> int:
        """Length of a vector."""
        return int(self._model.config.hidden_size)

    def fingerprint(self) -> str:
        """Of configuration, tokenizer and weights: sizes, and the first and last MiB of each file.

        Not of every byte, which would take half a minute for a large model at every start.
        """
        digest = hashlib.sha256()
        for path in sorted(self.folder.rglob("*")):
            if path.suffix not in (".json", ".safetensors", ".bin", ".txt", ".model"):
                continue
            size = path.stat().st_size
            digest.update(f"{path.relative_to(self.folder)} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(_EDGE_BYTES))
                file.seek(max(0, size - _EDGE_BYTES))
                digest.update(file.read(_EDGE_BYTES))
        return digest.hexdigest()

    def encode_queries(self, queries: Sequence[str]) -> NDArray[np.float32]:
        """(queries, dimensions)"""
        return self._encode([self.query_prefix + query for query in queries])

    def encode_passages(self, passages: Sequence[str]) -> NDArray[np.float32]:
        """(passages, dimensions)"""
        return self._encode([self.passage_prefix + passage for passage in passages])

    def _encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """In batches of texts that are about as long as each other: short ones are not padded."""
        vectors_NH = np.empty((len(texts), self.num_dimensions), np.float32)
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            vectors_NH[batch] = self._encode_batch([texts[number] for number in batch])
        return vectors_NH

    @torch.inference_mode()
    def _encode_batch(self, texts: list[str]) -> NDArray[np.float32]:
        with self._lock:  # a tokenizer that pads and cuts holds state
            batch = self._tokenizer(
                texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
            ).to(self._device)
        hidden_NTH = self._model(**batch).last_hidden_state.float()
        vectors_NH = pool(hidden_NTH, batch["attention_mask"], self._pooling)
        return torch.nn.functional.normalize(vectors_NH, dim=-1).cpu().numpy()


def pool(hidden_NTH: torch.Tensor, mask_NT: torch.Tensor, pooling: str) -> torch.Tensor:
    """One vector a text: the `mean` over its tokens, its first (`cls`) or its `last` one.

    Hidden states 1, 3, 9 with mask 1, 1, 0 -> mean 2, cls 1, last 3.
    """
    if pooling == "mean":
        weights_NT1 = mask_NT[:, :, None].float()
        return (hidden_NTH * weights_NT1).sum(1) / weights_NT1.sum(1).clamp(min=1)
    positions_NT = torch.arange(mask_NT.shape[1], device=mask_NT.device) * mask_NT
    at_N = positions_NT.argmax(1) if pooling == "last" else mask_NT.argmax(1)
    return hidden_NTH[torch.arange(len(at_N), device=at_N.device), at_N]


def _load(folder: Path, device: str) -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        local: dict[str, bool] = {"local_files_only": True, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(folder, **local)
        model = AutoModel.from_pretrained(folder, use_safetensors=True, **local)
    except Exception as error:  # transformers and safetensors raise whatever a folder makes them
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigurationError(f"the encoder {folder} cannot be loaded: {reason}") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device).eval(), tokenizer


def _check_modules(folder: Path) -> None:
    """A layer behind the pooling would be left out, and the vectors quietly wrong."""
    file = folder / "modules.json"
    if not file.is_file():
        return
    for module in json.loads(file.read_text(encoding="utf-8")):
        kind = str(module["type"]).rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ConfigurationError(
                f"the encoder {folder} has a module {kind}, which is not read; give one of"
                " Transformer, Pooling and Normalize alone"
            )


def _pooling(folder: Path) -> str:
    _check_modules(folder)
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return "mean"
    settings = json.loads(file.read_text(encoding="utf-8"))
    named = [
        _POOLINGS.get(str(key), str(key))
        for key, value in settings.items()
        if key.startswith("pooling_mode_") and value
    ]
    if len(named) != 1 or named[0] not in _POOLINGS.values():
        raise ConfigurationError(
            f"{file} asks for {' and '.join(named) or 'no pooling'}; "
            f"an encoder pools by one of {', '.join(_POOLINGS.values())}"
        )
    return named[0]


def _prefix(folder: Path, prefix: str) -> str:
    """`prefix` for E5 models (e5-base-v2, multilingual-e5-large), else nothing."""
    real = folder.resolve()
    names = [folder.absolute().name, real.name]
    if real.parent.name == "snapshots":  # .../models--intfloat--e5-base-v2/snapshots/f52bf8
        names.append(real.parent.parent.name)
    is_e5 = any(re.search(r"(^|[-_.])e5([-_.]|$)", name.lower()) for name in names)
    return prefix if is_e5 else ""
