"""What a Hugging Face model folder must not bring along: weights as pickle, code of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, cast

TRUST_KEY: Final = "policy.trust_remote_code"
_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAY_NAME_CODE: Final = ("config.json", "tokenizer_config.json")


def danger_in(folder: Path, *, trusts_code: bool) -> str | None:
    """Why the model in `folder` is refused, as one sentence behind its name; None if it is not.

    Weights have to be safetensors, as a pickle runs what its maker put into it when it is read.
    Code of the model's own is let in by `trusts_code`.
    """
    pickled = [file.name for pattern in _PICKLED for file in folder.glob(pattern)]
    if pickled and not any(folder.glob("*.safetensors")):
        return (
            f"holds its weights as pickle ({sorted(pickled)[0]}), which may run code when it is "
            "read; save it as safetensors: save_pretrained(FOLDER) of transformers does"
        )
    code = None if trusts_code else next(filter(None, map(_code_of, _files(folder))), None)
    if code is not None:
        return (
            f"wants to run Python code of its own ({code}); set {TRUST_KEY} = true if you trust "
            "who made it with all that you may do, or take a model that transformers knows"
        )
    return None


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in _MAY_NAME_CODE]


def _code_of(file: Path) -> str | None:
    """`config.json: auto_map` where the file names classes that lie beside it."""
    try:
        facts: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # who reads it for what it holds says so
    names = cast("dict[str, Any]", facts).get("auto_map") if isinstance(facts, dict) else None
    return f"auto_map in {file.name}" if names else None
