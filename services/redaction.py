"""Text without secrets, for what leaves the owner of a run: bundles, status, sentences of errors.

Two rules, both applied. What has the form of a secret goes wherever it stands: the password of a
URL, a bearer token, a value behind a name such as api_key. And secrets that are known go in every
form in which they may have been written. This file imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, quote_plus, unquote

MASK: Final = "***"
"""What stands where a secret stood."""

MIN_SECRET_CHARACTERS: Final = 6
"""A known secret that is shorter is left to the rules of form: it would mask half of every text."""

PRIVATE_FILES: Final = ("redis_url", "api-tokens.json", "redis/redis.conf")
"""Files of a run directory, mode 0600, that hold secrets of the run. Nothing else there does."""

_SECRET_NAME: Final = re.compile(
    r"(?:.*[_.-])?(?:token|(?:api|auth|bearer|refresh)token|(?:ssh)?pass|pwd|secrets?"
    r"|credentials?|authorization|cookie|auth|auth[_-]config|webhook(?:[_-]url)?"
    r"|(?:api|access|private|secret|signing)keys?)"
    # PGPASSWORD; and what stands in front of these is a name: OPENAI_KEY, GITHUB_PAT.
    r"|.*pass(?:word|wd|phrase)|.+[_.-](?:keys?|pat)",
    re.IGNORECASE,
)
_OPEN_KEY: Final = re.compile(
    r"(?:.*[_.-])?(?:cache|foreign|group|hash|partition|primary|public|sort)[_-]keys?",
    re.IGNORECASE,
)
"""A key of data, or the half of a pair that everybody may see."""
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""Within a name such as accessToken."""
_HEADERS_NAME: Final = re.compile(r".*_HEADERS", re.IGNORECASE)
"""As OTEL_EXPORTER_OTLP_HEADERS, whose value is Authorization=Bearer..."""
_OF_A_MODEL: Final = re.compile(
    r"(?:.*[_.-])?(?:bos|cls|end|eos|first|last|mask|next|pad|per|sep|start|stop|unk)[_-]token",
    re.IGNORECASE,
)
"""A token of text, as stop_token, is no secret."""

# All of them take time that grows with the length of the text only: logs hold whatever comes.
_URL_LOGIN: Final = re.compile(r"(?<=://)([^/@:\s\"]{0,200}):[^\s\"]{0,500}@")
_URL_TOKEN: Final = re.compile(r"(?<=://)[^/@:\s\"]{20,500}@")
"""As in https://TOKEN@host; a shorter name in front of an @ is a user's."""
_BEARER: Final = re.compile(r"\b(bearer|basic)(\s{1,4}|%20)[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)
_ASSIGNMENT: Final = re.compile(
    r"""(?<![A-Za-z0-9_.-])([A-Za-z0-9_.-]++)\\?["']?\s{0,4}[=:]\s{0,4}"""
)
_ASSIGNED: Final = re.compile(
    r"""(\\["'])(?:(?!\1)[^\n]){0,4000}\1"""  # within a quoted text
    r"""|(")(?:\\.|[^"\\\n])*+"|(')(?:\\.|[^'\\\n])*+'"""
    r"""|["'][^\n]*+"""  # cut off before its end
    r"""|[^\s"',;&})\]]+"""
)
_NO_SECRET: Final = frozenset({"true", "false", "none", "null", "on", "off"})
"""A switch, as in api.auth = false."""
_OPTION: Final = re.compile(r"(?<![\w-])--([A-Za-z][A-Za-z0-9-]{1,60})(\s{1,4})(?!-)\S+")
_KNOWN_FORM: Final = re.compile(
    r"(?<![A-Za-z0-9_-])(?:sk-[\w-]{16,}|hf_\w{16,}|gh[oprsu]_\w{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,})"
)
"""Keys and tokens that say by their beginning whose they are."""
_REDIS_PASSWORD: Final = re.compile(r"\b(requirepass|masterauth)(\s{1,4})\S+")
_REDIS_USER: Final = re.compile(r"(?m)(^[ \t]*user[ \t]+\S+.*?\s[>#])\S+")
_PEM: Final = re.compile(
    r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----).*?(-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
NOT_SHOWN: Final = "(set, not shown)"
_SHOWN: Final = re.compile(
    r"(?:CONDA|CUDA|GLOO|KMP|LC|LD|LEEWAY|MALLOC|MKL|NCCL|NVIDIA|OMP|PET|PYTHON|PYTORCH|RAY|SLURM"
    r"|TORCH|TRITON|VLLM)(?:_\w*)?|PYTHON\w+|HF_HOME|HF_HUB_\w+|TRANSFORMERS_\w+|HOME|HOSTNAME"
    r"|LANG|PATH|PWD|SHELL|TERM|TMPDIR|TZ|USER|VIRTUAL_ENV|\w*RANK|\w*WORLD_SIZE|MASTER_\w+"
    r"|\w*NUM_THREADS|TOKENIZERS_PARALLELISM"
)
"""Variables whose values explain how a run behaves."""
_LONGEST_NAME: Final = 100
"""Characters of a name that are looked at, from its end."""


def is_secret_name(name: str) -> bool:
    """Whether a setting or variable of this name holds a secret.

    WANDB_API_KEY, redis.password, LEEWAY_API_READ_TOKEN -> True; stop_token, num_tokens -> False
    """
    name = _HUMP.sub("_", name[-_LONGEST_NAME:])
    if _OF_A_MODEL.fullmatch(name) or _OPEN_KEY.fullmatch(name):
        return False
    return bool(_SECRET_NAME.fullmatch(name) or _HEADERS_NAME.fullmatch(name))


def redacted(text: str, secrets: Collection[str] = ()) -> str:
    """`text` without what has the form of a secret, and without the known `secrets`.

    redis://user:pw@host:6379/0 -> redis://user:***@host:6379/0, also inside a sentence
    Authorization: Bearer abcdefgh -> Authorization: *** ***;  api_key = "x" -> api_key = "***"
    --password abc -> --password ***
    """
    for secret in _forms(secrets):
        text = text.replace(secret, MASK)
    text = _PEM.sub(rf"\1{MASK}\2", text)
    text = _URL_LOGIN.sub(rf"\1:{MASK}@", text)
    text = _URL_TOKEN.sub(f"{MASK}@", text)
    text = _REDIS_PASSWORD.sub(rf"\1\2{MASK}", text)
    text = _REDIS_USER.sub(rf"\1{MASK}", text)
    text = _BEARER.sub(rf"\1\2{MASK}", text)
    text = _KNOWN_FORM.sub(MASK, text)
    text = _OPTION.sub(_without_option, text)
    return _without_assigned(text)


def _without_option(found: re.Match[str]) -> str:
    return f"--{found[1]}{found[2]}{MASK}" if is_secret_name(found[1]) else found[0]


def _without_assigned(text: str) -> str:
    """api_key="x" -> api_key="***"; what is assigned to another name is looked into in its turn."""
    kept: list[str] = []
    done = 0
    for name in _ASSIGNMENT.finditer(text):
        if name.start() < done or not is_secret_name(name[1]):
            continue
        value = _ASSIGNED.match(text, name.end())
        if value is not None and value[0].lower() not in _NO_SECRET:
            quotes = value[1] or value[2] or value[3] or ""
            kept += [text[done : name.end()], quotes, MASK, quotes]
            done = value.end()
    return "".join(kept) + text[done:]


def redacted_values(value: Any, secrets: Collection[str] = ()) -> Any:
    """Maps and lists, as of a configuration or a JSON file, with every secret in them masked.

    {"api_key": "x", "url": "redis://:pw@h"} -> {"api_key": "***", "url": "redis://:***@h"}
    """
    if isinstance(value, Mapping):
        pairs = ((str(name), each) for name, each in value.items())
        return {
            name: MASK if _is_set(each) and is_secret_name(name) else redacted_values(each, secrets)
            for name, each in pairs
        }
    if isinstance(value, list | tuple):
        return [redacted_values(each, secrets) for each in value]
    return redacted(value, secrets) if isinstance(value, str) else value


def redacted_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for showing: NCCL_DEBUG as it is, WANDB_API_KEY as ***, and of what has
    nothing to do with a run the name alone, since a secret may have any name."""
    values = redacted_values(environment, known_secrets(None, environment))
    return {
        name: value if value in ("", MASK) or _SHOWN.fullmatch(name) else NOT_SHOWN
        for name, value in values.items()
    }


def known_secrets(run: Path | None, environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Every secret that this process can know of: of its environment, and of the private files of
    the run directory `run`. Files that are missing or may not be read add none.
    """
    found: set[str] = set()
    for name, value in environment.items():
        found.update(_passwords(value))
        if is_secret_name(name):
            found.update({value} if not _HEADERS_NAME.fullmatch(name) else _header_values(value))
    for name in PRIVATE_FILES if run is not None else ():
        found.update(_secrets_in(Path(run or "") / name))
    return frozenset(secret for secret in found if len(secret) >= MIN_SECRET_CHARACTERS)


def _secrets_in(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    yield from _passwords(text)
    if path.suffix == ".json":
        try:
            yield from (str(value) for value in json.loads(text).values())
        except (ValueError, AttributeError):
            return
    for line in text.splitlines():
        words = line.split()
        if words[:1] in (["requirepass"], ["masterauth"]) and len(words) > 1:
            yield words[1].strip('"')
        if words[:1] == ["user"]:
            yield from (word[1:] for word in words if word[0] in "><#")


def _passwords(text: str) -> Iterator[str]:
    """Of URLs in `text`: redis://user:pw@host -> pw, as written and unquoted."""
    for match in re.finditer(r"://[^/@:\s\"']*:([^\s\"'/?#]*)@", text):
        yield from (match[1], unquote(match[1]))
    for match in re.finditer(r"[?&]\w*password=([^&\s\"']+)", text):
        yield from (match[1], unquote(match[1]))


def _header_values(text: str) -> Iterator[str]:
    """`authorization=Bearer%20abc,x-team=7` -> Bearer%20abc, abc, 7"""
    for pair in text.split(","):
        value = pair.partition("=")[2].strip()
        yield from (value, unquote(value), *unquote(value).split())


def _forms(secrets: Collection[str]) -> list[str]:
    """The secrets as they stand in text, URLs, JSON and Python, longest first: one may hold
    another."""
    forms = {
        form
        for secret in secrets
        if len(secret) >= MIN_SECRET_CHARACTERS
        for form in (
            secret,
            quote(secret, safe=""),
            quote_plus(secret),
            repr(secret)[1:-1],
            json.dumps(secret)[1:-1],
            json.dumps(secret, ensure_ascii=False)[1:-1],
        )
    }
    return sorted(forms, key=len, reverse=True)


def _is_set(value: object) -> bool:
    """Whether there is something to hide: a switch, a number or a table tells no secret."""
    return isinstance(value, str) and value != ""
