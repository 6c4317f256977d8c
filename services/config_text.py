"""A configuration as people read it: keys, expectations, complaints, TOML and the reference page.

The functions take the model class or an instance; config.py holds the models themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

from leeway.replay.config import FrozenModel
from leeway.services.redaction import redacted

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

    from leeway.services.config import RunConfig

BUNDLED: Final = "bundled"
"""Value of a path key that stands for the model, corpus or questions inside the package."""

QUESTION_FILE: Final = (
    'a JSON-lines file of {"id", "question", "golden_answers"}, or a parquet file'
)

PATH_KEYS: Final = {
    "model": "a Hugging Face model folder (one that holds config.json)",
    "search.corpus": 'a JSON-lines file of {"id", "contents"}',
    "data.train": QUESTION_FILE,
    "data.held_out": QUESTION_FILE,
}
"""Keys that name a file or folder of the user, with what it has to be."""

FREE_TABLES: Final = ("environment.options",)
"""Tables whose keys are not ours to know."""


def known_keys() -> dict[str, FieldInfo]:
    """Every key a configuration may hold, dotted, in order, with its pydantic field."""
    from leeway.services.config import RunConfig  # config.py needs this file to report faults

    keys: dict[str, FieldInfo] = {}
    for name, field in RunConfig.model_fields.items():
        table = _table_of(field)
        if table is None:
            keys[name] = field
        else:
            keys |= {f"{name}.{leaf}": info for leaf, info in table.model_fields.items()}
    return keys


def _table_of(field: FieldInfo) -> type[FrozenModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, FrozenModel) else None


def _item_of(field: FieldInfo) -> type[FrozenModel] | None:
    """The model of one table where the key holds a list of tables."""
    if get_origin(field.annotation) is not tuple:
        return None
    item = get_args(field.annotation)[0]
    return item if isinstance(item, type) and issubclass(item, FrozenModel) else None


def _alternatives(field: FieldInfo) -> tuple[Any, ...]:
    """The arms of a union or the values of a Literal; otherwise the annotation alone."""
    if get_origin(field.annotation) in (tuple, dict):
        return (field.annotation,)
    args = getattr(field.annotation, "__args__", None)
    return tuple(args) if args else (field.annotation,)


def accepts_none(field: FieldInfo) -> bool:
    """Whether the word none means that the key is not set: not where it is a value itself."""
    arms = _alternatives(field)
    return type(None) in arms and not any("none" in get_args(arm) for arm in arms)


def is_text(field: FieldInfo) -> bool:
    return any(arm is str or isinstance(arm, str) for arm in _alternatives(field))


def expectation(field: FieldInfo) -> str:
    """What a value must be: `a whole number of at least 1`, `one of "vllm", "torch"`."""
    item = _item_of(field)
    if item is not None:
        return f"a list of tables with {', '.join(item.model_fields)}"
    if get_origin(field.annotation) is tuple:
        words = get_args(get_args(field.annotation)[0])
        return "a list of any of " + ", ".join(f'"{word}"' for word in words)
    if get_origin(field.annotation) is dict:
        return "a table with any keys"
    arms: list[Any] = []
    for arm in _alternatives(field):
        if arm is not type(None):
            arms += get_args(arm) if get_origin(arm) is Literal else [arm]
    if all(isinstance(arm, str) for arm in arms):
        return "one of " + ", ".join(f'"{arm}"' for arm in arms)
    from pydantic import ByteSize

    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a string",
        ByteSize: 'bytes, as a number or "4GiB"',
    }
    kind = " or ".join(names.get(arm, str(arm)) for arm in arms)
    words = {"ge": "of at least", "gt": "greater than", "le": "at most", "lt": "less than"}
    bounds = [
        f"{word} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, word in words.items()
        if getattr(rule, name, None) is not None
    ]
    pattern = next((p for rule in field.metadata if (p := getattr(rule, "pattern", None))), None)
    if pattern:
        return f"{kind} that matches {pattern}"
    return " ".join([kind, " and ".join(bounds)]).strip()


def flatten(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value); a free table and a list of tables are values."""
    for name, value in data.items():
        if isinstance(value, dict) and f"{prefix}{name}" not in FREE_TABLES:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def value_at(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def with_values(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """A copy with dotted keys replaced. Not checked: the caller made the values."""
    for key, value in values.items():
        table, _, leaf = key.rpartition(".")
        part = value_at(config, table) if table else config
        changed = part.model_copy(update={leaf: value})
        config = config.model_copy(update={table: changed}) if table else changed
    return config


def validation_sentence(error: ErrorDetails) -> tuple[str, str]:
    """The sentence for pydantic's first complaint, and the key it is about."""
    listed = _list_of_tables(error["loc"])
    if listed is not None:
        return _item_sentence(error, *listed)
    # An item of a list of words is told about under the list's key.
    key = ".".join(part for part in error["loc"] if isinstance(part, str))
    if error["type"] == "extra_forbidden":
        return unknown_key(key), key
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"]) if "ctx" in error else error["msg"]
        # A part's own check names its keys without the table, which it does not know.
        return message if f"{key}." in message else f"[{key}] {message}", key
    field = known_keys().get(key)
    shown = _show_with_kind(error["input"])
    if field is None:
        first = next(known for known in known_keys() if known.startswith(f"{key}."))
        return f"{key} is {shown}; it must be a table, with keys such as {first}", key
    return f"{key} is {shown}; it must be {expectation(field)}", key


def _list_of_tables(loc: tuple[int | str, ...]) -> tuple[str, int, type[FrozenModel]] | None:
    """The key of the list of tables that a complaint is about, the place in it, and its model."""
    place = next((i for i, part in enumerate(loc) if isinstance(part, int)), None)
    if place is None:
        return None
    key = ".".join(str(part) for part in loc[:place])
    field = known_keys().get(key)
    item = _item_of(field) if field is not None else None
    return None if item is None else (key, int(loc[place]), item)


def _item_sentence(
    error: ErrorDetails, key: str, place: int, item: type[FrozenModel]
) -> tuple[str, str]:
    """A complaint about table number `place`, from 0, of the list of tables `key`."""
    leaf, where = str(error["loc"][-1]), f"{key}[{place}]"
    keys = ", ".join(item.model_fields)
    if error["type"] == "extra_forbidden":
        return f"{where}.{leaf} is not a key; a table of {key} holds {keys}", key
    if error["type"] == "missing":
        return f"{where} has no {leaf}; a table of {key} holds {keys}", key
    shown = _show_with_kind(error["input"])
    field = item.model_fields.get(leaf)
    if field is None:
        return f"{where} is {shown}; it must be a table with {keys}", key
    return f"{where}.{leaf} is {shown}; it must be {expectation(field)}", key


def show(value: Any) -> str:
    """A value as TOML would write it, cut to 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _show_with_kind(value: Any) -> str:
    kind = {str: "a string", dict: "a table", list: "a list"}.get(type(value))
    return f"{show(value)}, {kind}" if kind else show(value)


def unknown_key(key: str) -> str:
    """`learner.num_step is not a key; did you mean learner.num_steps?`"""
    known = list(known_keys())
    tables = sorted({name.partition(".")[0] for name in known if "." in name})
    if key in tables:
        example = next(name for name in known if name.startswith(f"{key}."))
        return f"{key} is a table; name a key in it, such as {example}"
    nearest = _nearest_key(key, known, tables)
    if nearest:
        return f"{key} is not a key; did you mean {nearest}?"
    table = key.rpartition(".")[0]
    if table in tables:
        inside = ", ".join(name.split(".")[1] for name in known if name.startswith(f"{table}."))
        return f"{key} is not a key; [{table}] holds {inside}"
    top = ", ".join(name for name in known if "." not in name)
    return f"{key} is not a key; at the top there are {top} and the tables {', '.join(tables)}"


def _nearest_key(key: str, known: Sequence[str], tables: Sequence[str]) -> str | None:
    same_leaf = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    if len(same_leaf) == 1:
        return same_leaf[0]
    table = key.rpartition(".")[0]
    siblings = [name for name in known if name.rpartition(".")[0] == table]
    for candidates in (siblings, known, [] if "." in key else tables):
        close = get_close_matches(key, candidates, n=1, cutoff=0.75)
        if close:
            return close[0]
    return None


def masked(config: RunConfig) -> RunConfig:
    """The configuration without secrets, for showing and for the run directory."""
    if config.replay.url is None:
        return config
    return with_values(config, {"replay.url": redacted(config.replay.url)})


def dump(config: RunConfig) -> str:
    """The configuration as TOML, every key written out, secrets masked; `load` reads it back."""
    values = masked(config).model_dump()
    lines = [_toml_line(k, v) for k, v in values.items() if not isinstance(v, dict)]
    for table, keys in values.items():
        if isinstance(keys, dict):
            lines += ["", f"[{table}]", *(_toml_line(name, value) for name, value in keys.items())]
    return "\n".join(lines) + "\n"


def _toml_line(name: str, value: Any) -> str:
    if value is None:
        return f"# {name} is not set"
    return f"{name} = {_toml_value(value)}"


def _toml_value(value: Any) -> str:
    """On one line; what is None in a table is left out of it."""
    if isinstance(value, dict):
        pairs = [(k, v) for k, v in value.items() if v is not None]
        inside = ", ".join(f"{_toml_value(k)} = {_toml_value(v)}" for k, v in pairs)
        return "{" + inside + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def describe() -> str:
    """Reference of every key as markdown, from the fields' own docstrings."""
    from leeway.services.config import RunConfig

    sections = [_table_section("", "Top of the file", RunConfig)]
    for name, field in RunConfig.model_fields.items():
        table = _table_of(field)
        if table is not None:
            sections.append(_table_section(name, f"`[{name}]`", table))
            for leaf, inner in table.model_fields.items():
                item = _item_of(inner)
                if item is not None:
                    key = f"{name}.{leaf}"
                    sections.append(_table_section(key, f"`[[{key}]]`", item))
    return "# Configuration\n\n" + "\n".join(sections)


def _table_section(table: str, title: str, model: type[FrozenModel]) -> str:
    about = (model.__doc__ or "").strip().splitlines()[0]
    about = re.sub(r"\s*Keys (of|at) (a|the) .*$", "", about)
    rows = [
        f"| `{name}` | {_cell(expectation(field))} | {_default_cell(field)} "
        f"| {_cell(' '.join((field.description or '').split()))} |"
        for name, field in model.model_fields.items()
        if _table_of(field) is None
    ]
    head = ["| key | value | default | meaning |", "|---|---|---|---|"]
    return "\n".join([f"## {title}", "", about, "", *head, *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default_cell(field: FieldInfo) -> str:
    if field.is_required():
        return "none: it must be given"
    default = field.get_default(call_default_factory=True)
    return "not set" if default is None else f"`{json.dumps(default, ensure_ascii=False)}`"
