"""The Lua scripts, put together from the parts in lua/.

    arg  |  base  |  if is_due then  what tidy names, tidy  end  |  what the body names, body

A script is read cold each time it runs, between payloads that push it out of the caches, and costs
what it touches. So it carries only the functions that it names, the rare work stands in a block
that is stepped over, and what is written for readers becomes what is cheap: `key.slots` a
concatenation, `S.num_slots` and `c.policy` places of an array.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Final

LUA_FOLDER: Final = Path(__file__).parent / "lua"
"""Where scripts lie. By path: importlib.resources cannot open a namespace package of an editable
install."""

STATE_FIELDS: Final = (
    *("layout", "now", "ahead", "learner_version", "ramp_version", "sequence", "virtual"),
    *("evicted_at", "num_bytes", "largest", "num_slots", "num_stored", "num_leases", "inserts"),
    *("samples", "num_admitted", "num_added", "num_drawn", "num_trained", "num_slots_expired"),
    *("num_leases_expired", "play_ms", "train_ms", "added_hour", "admitted", "most_needed"),
    *("num_seen", "num_doublings", "was_cut", "is_tried", "first_left", "outstanding"),
    "added_at",
    *("room_signal", "data_signal", "paused", "has_ceilings", "playing", "ready", "leased"),
    *("next_expiry", "schema", "config"),
)
"""Places of `S`: 33 numbers, then what else there is."""

LIMIT_FIELDS: Final = (
    *("max_staleness", "groups_per_step", "max_groups", "max_draws", "max_returns", "seed"),
    *("samples_per_insert", "min_size", "min_diff", "max_diff"),
    *("slot_timeout_ms", "lease_timeout_ms", "max_bytes", "is_adaptive"),
    *("policy", "draw_by", "evict_by"),
)
"""Places of `c`: 14 numbers, then three texts."""

_SHARED: Final = ("rule", "select", "library")
_DEFINITION: Final = re.compile(r"local (?:function )?([\w, ]+)")
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_PLACES: Final = re.compile(r"\b([Sc])\.(\w+)")


def lua_text(name: str) -> str:
    """The text of lua/`name`.lua."""
    return (LUA_FOLDER / f"{name}.lua").read_text(encoding="utf-8")


@functools.cache
def script_source(name: str, fields: tuple[str, ...] | None, is_of_buffer: bool = False) -> str:
    """lua/`name`.lua with `key` and `arg` defined.

    ("slots", "ready") begins with: local key = {slots = KEYS[1], ready = KEYS[2]}
    None is for a prefix in KEYS[1]: key.slots is the prefix and "slots". `is_of_buffer`: behind
    what every script of the buffer starts with.
    """
    body = _of_buffer(name) if is_of_buffer else lua_text(name)
    if fields is None:
        keys = "local PREFIX = KEYS[1]"
        body = re.sub(r"\bkey\.(\w+)", r"(PREFIX .. '\1')", body)
    else:
        named = ", ".join(f"{field} = KEYS[{i}]" for i, field in enumerate(fields, start=1))
        keys = f"local key = {{{named}}}"
    return f"{keys}\nlocal arg = cmsgpack.unpack(ARGV[1])\n{body}"


def _of_buffer(name: str) -> str:
    tidy, body = lua_text("tidy"), lua_text(name)
    rare = f"if is_due then\n{named_by(tidy)}\n{tidy}\nend"
    return _PLACES.sub(_place, "\n".join((lua_text("base"), rare, named_by(body), body)))


def named_by(body: str) -> str:
    """Of the shared definitions those that `body` names, and those that these name."""
    names = set(_NAME.findall(_code(body)))
    kept: list[str] = []
    for block in reversed([block for part in _SHARED for block in _blocks(lua_text(part))]):
        definition = _DEFINITION.match(block)
        assert definition is not None, block
        if names.intersection(definition[1].replace(" ", "").split(",")):
            names.update(_NAME.findall(block))
            kept.append(block)
    return "\n".join(reversed(kept))


def _blocks(text: str) -> list[str]:
    """Top-level statements: each begins in the first column, where nothing else of it stands but
    the `end` or bracket that closes it."""
    blocks: list[str] = []
    for line in _code(text).splitlines():
        if re.match(r"local\b", line):
            blocks.append(line)
        elif line.strip():
            blocks[-1] += f"\n{line}"
    return blocks


def _code(text: str) -> str:
    """Without comments; no text of the scripts holds two dashes."""
    return re.sub(r"[ ]*--.*", "", text)


def _place(match: re.Match[str]) -> str:
    table, field = match.groups()
    return f"{table}[{(STATE_FIELDS if table == 'S' else LIMIT_FIELDS).index(field) + 1}]"
