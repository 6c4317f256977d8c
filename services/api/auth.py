"""Bearer tokens of the API: one to read, one that may also control.

They come from LEEWAY_API_READ_TOKEN and LEEWAY_API_CONTROL_TOKEN; else from `api-tokens.json` in
the run directory (mode 0600), which is written by the first process that needs it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

import msgspec

from leeway.replay.errors import ConfigurationError

READ_VARIABLE: Final = "LEEWAY_API_READ_TOKEN"
CONTROL_VARIABLE: Final = "LEEWAY_API_CONTROL_TOKEN"
FILE: Final = "api-tokens.json"
MIN_CHARACTERS: Final = 16

Scope = Literal["read", "control"]
"""control includes read."""


class Tokens(msgspec.Struct, frozen=True):
    """The two tokens of a run."""

    read: str
    control: str

    def __repr__(self) -> str:
        """Nothing of them: it may reach a log."""
        return "Tokens(...)"

    def scope_of(self, authorization: str | None) -> Scope | None:
        """What a header `Authorization: Bearer TOKEN` allows; None where it is missing or wrong.

        Both tokens are compared in full whatever comes, in constant time.
        """
        kind, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip())
        is_read = hmac.compare_digest(digest, _own_digest(self.read))
        is_control = hmac.compare_digest(digest, _own_digest(self.control))
        if kind.lower() != "bearer" or not given:
            return None
        return "control" if is_control else "read" if is_read else None


def _digest(token: str) -> bytes:
    # Of equal length whatever was sent; compare_digest tells lengths apart in less time.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


@lru_cache(8)
def _own_digest(token: str) -> bytes:
    """Of a token of ours, known ahead. What is sent is never kept."""
    return _digest(token)


def tokens_of(run: Path, environment: Mapping[str, str] = os.environ) -> tuple[Tokens, bool]:
    """The tokens of the run in directory `run`, and whether they were generated just now, in which
    case somebody has to be told. Raises ConfigurationError for a token that is too short, for one
    that serves as both, and for a file that is none.
    """
    given = [environment.get(name) for name in (READ_VARIABLE, CONTROL_VARIABLE)]
    stored, is_new = (None, False) if all(given) else _stored(run / FILE)
    read = given[0] or (stored.read if stored else "")
    control = given[1] or (stored.control if stored else "")
    for name, token in zip((READ_VARIABLE, CONTROL_VARIABLE), (read, control), strict=True):
        if len(token) < MIN_CHARACTERS or not token.isascii() or " " in token:
            raise ConfigurationError(
                f"{name} must be at least {MIN_CHARACTERS} ASCII characters without a space"
            )
    if read == control:
        raise ConfigurationError(
            f"{READ_VARIABLE} and {CONTROL_VARIABLE} are the same; give two tokens"
        )
    return Tokens(read, control), is_new


def _stored(file: Path) -> tuple[Tokens, bool]:
    if file.exists():
        return _read(file), False
    fresh = Tokens(secrets.token_urlsafe(24), secrets.token_urlsafe(24))
    try:
        _place(file, msgspec.json.encode(fresh) + b"\n")
    except FileExistsError:
        return _read(file), False
    except OSError as error:
        raise ConfigurationError(
            f"{file} cannot be written ({error.strerror}); set {READ_VARIABLE} and "
            f"{CONTROL_VARIABLE}, or api.auth = false"
        ) from None
    return fresh, True


def _place(file: Path, content: bytes) -> None:
    """A new file, whole from its first moment on. Raises FileExistsError if another was first."""
    partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
        os.link(partial, file)
    finally:
        partial.unlink()


def _read(file: Path) -> Tokens:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Tokens)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"{file} holds no tokens ({error}); remove it, and new ones are generated"
        ) from None
