"""Every value is described, typed, and read by some template."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from leeway.services.config import load
from leeway.services.config_text import known_keys
from tests.helm.chart import (
    CHART,
    CI,
    CI_NAMES,
    CUSTOM_KINDS,
    Refused,
    find,
    objects,
    pod_of,
    template,
)
from tests.helm.tools import ROOT

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
SOURCE = (CHART / "values.yaml").read_text()
VALUES = yaml.safe_load(SOURCE)
NUM_RENDERS_AT_ONCE = 2

_spec = importlib.util.spec_from_file_location("generate", ROOT / "helm" / "generate.py")
assert _spec is not None and _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of values that hold no others."""
    if isinstance(tree, dict) and tree:
        for name, inner in tree.items():
            yield from leaves(inner, (*path, name))
    else:
        yield path


def at(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


LEAVES = list(leaves(VALUES))
IDS = [".".join(path) for path in LEAVES]


# --- described


def test_every_value_is_described():
    described = {value.path for value in generate.values(SOURCE)}
    bare = [name for name in IDS if not any(_covers(entry, name) for entry in described)]
    assert bare == []


def _covers(entry: str, name: str) -> bool:
    return name == entry or name.startswith(f"{entry}.")


def test_the_readme_and_the_copied_files_are_what_the_generator_writes():
    stale = [str(p) for p, t in generate.wanted().items() if not p.is_file() or p.read_text() != t]
    assert stale == [], "write them again: python helm/generate.py"


def test_every_value_and_key_that_the_readme_names_exists():
    prose = (CHART / "README.md").read_text().partition("\n## Values")[0]
    spans = {span.partition("=")[0] for span in re.findall(r"`([^`\n]+)`", prose)}
    named = {span for span in spans if re.fullmatch(r"[a-z]\w*(\.\w+)+", span)}
    values = {".".join(path) for path, _ in walk(VALUES)} | set(IDS)
    files = {span for span in named if re.search(r"\.(yaml|md)$", span)}
    assert len(named) > 10
    assert named - files - values - set(known_keys()) == set()


# --- typed


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema inside a schema."""
    if isinstance(schema, dict):
        yield schema
        for inner in schema.values():
            yield from nodes(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from nodes(inner)


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """The definition that a schema refers to."""
    name = schema.get("$ref", "").removeprefix("#/definitions/")
    return SCHEMA["definitions"][name] if name else schema


def schema_of(path: tuple[str, ...]) -> dict[str, Any]:
    """The schema of a value; of one inside a free object, the schema of that."""
    schema = SCHEMA
    for name in path:
        schema = resolved(schema)
        if name not in schema.get("properties", {}):
            more = schema.get("additionalProperties", {})
            schema = more if isinstance(more, dict) else {}
            continue
        schema = schema["properties"][name]
    return resolved(schema)


def test_every_object_of_the_schema_that_lists_keys_refuses_others():
    is_open = [
        node
        for node in nodes(SCHEMA)
        if "properties" in node
        and isinstance(node["properties"], dict)
        and "object" in node.get("type", "")
        and node.get("additionalProperties") is not False
        and node is not SCHEMA["definitions"]["named"]["items"]
    ]
    assert is_open == []


def test_the_schema_knows_every_value_and_no_other():
    known = {
        (*path, name)
        for path, inner in walk(VALUES)
        for name in resolved(schema_of(path)).get("properties", {})
        if "podLabels" in inner or path in ((), ("api",), ("serve",), ("storage",))
    }
    there = {(*path, name) for path, inner in walk(VALUES) for name in inner}
    assert known - there == {("global",)}
    jsonschema.validate(VALUES, SCHEMA)


def walk(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[Any, dict[str, Any]]]:
    yield path, tree
    for name, inner in tree.items():
        if isinstance(inner, dict):
            yield from walk(inner, (*path, name))


def test_a_typo_beside_any_value_is_refused():
    """At every place of the tree, an object with a key more than it has."""
    accepted = []
    for path, _ in walk(VALUES):
        if not resolved(schema_of(path)).get("properties"):
            continue
        planted = copy.deepcopy(VALUES)
        at(planted, path)["typpo"] = 1
        if jsonschema.Draft7Validator(SCHEMA).is_valid(planted):
            accepted.append(".".join(path))
    assert accepted == []


# --- read by some template

FLIPPED = {
    "strings": {"flipped": "x"},
    "free": {"flipped": "x"},
    "objects": [{"flipped": "x"}],
    "named": [{"name": "flipped"}],
    "quantity": "6Gi",
    "accessModes": ["ReadWriteMany", "ReadOnlyMany"],
    "duration": "7s",
    "podSecurityContext": {"supplementalGroups": [7]},
    "securityContext": {"procMount": "Default"},
    "port": 4711,
}
"""Another value, by the definition of the schema that types it."""
FLIPPED_BY_PATH: dict[str, Any] = {
    "api.ingress.hosts": [{"host": "x", "paths": [{"path": "/x", "pathType": "Exact"}]}],
    "api.tokens.read": "flipped-flipped-flipped",
    "api.tokens.control": "flipped-flipped-flipped",
    "api.service.nodePort": 30081,
    "networkPolicy.redisPorts": [6380],
    "networkPolicy.objectStorePorts": [9000],
    "networkPolicy.kuberayFrom": [{"podSelector": {}}],
    "redis.url": "redis://other:6379/0",
    "serve.gcsFaultTolerance.redisAddress": "other:6379",
    "serve.rayVersion": "3.0.0",
    "serve.policy.actorOptions.num_gpus": 0,
    "sweep.args": ["sweep"],
    "sweep.ttlSecondsAfterFinished": 7,
    "redis.maxMemory": "7gb",
}
FULL = yaml.safe_load((CHART / "ci" / "full-values.yaml").read_text())
OUTSIDE = {
    "redis": {"enabled": False, "url": "redis://redis:6379/0"},
    "serve": {"gcsFaultTolerance": {"redisAddress": "redis:6379", "existingSecret": "redis"}},
}
NAMED = {
    "redis": {"enabled": False, "existingSecret": "redis"},
    "serve": {"gcsFaultTolerance": {"enabled": False}},
}
FETCHING = {"storage": {"data": {"enabled": True, "source": {"remote": ":s3:x"}}}}
SHARED = {"storage": {"runs": {"accessModes": ["ReadWriteMany"]}, "models": {"enabled": True}}}
CONTEXTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (FULL, CUSTOM_KINDS),
    ({}, CUSTOM_KINDS),
    (OUTSIDE, CUSTOM_KINDS),
    (NAMED, CUSTOM_KINDS),
    (FETCHING, CUSTOM_KINDS),
    (SHARED, CUSTOM_KINDS),
    ({}, ()),
]
"""Values in which a value may show, and what the cluster offers: an outside Redis has no password,
an Ingress no backend before it is turned on."""


def flip(path: tuple[str, ...], values: dict[str, Any]) -> Any:
    """Another valid value than the one in `values`, or than the default."""
    name = ".".join(path)
    if name in FLIPPED_BY_PATH:
        return FLIPPED_BY_PATH[name]
    value, schema = at(VALUES, path), schema_of(path)
    with suppress(KeyError):
        value = at(values, path)
    if isinstance(value, bool):
        return not value
    for definition, other in FLIPPED.items():
        if schema is SCHEMA["definitions"][definition]:
            return other
    if "enum" in schema:
        return sorted({*schema["enum"]} - {value})[-1]
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return _other_text(schema)
    return ["flipped"] if isinstance(value, list) else {"flipped": "x"}


def _other_text(schema: dict[str, Any]) -> str:
    candidates = ("flipped", f"sha256:{'a' * 64}", "3")
    valid = [text for text in candidates if jsonschema.Draft7Validator(schema).is_valid(text)]
    assert valid, f"name another value for {schema} in FLIPPED_BY_PATH"
    return valid[0]


def with_value(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(values)
    inner = changed
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
    inner[path[-1]] = value
    return changed


def outcome(values: dict[str, Any], kinds: tuple[str, ...]) -> tuple[bool, str]:
    """Whether it renders, and what, without the passwords that each render makes anew."""
    try:
        return True, re.sub(r'"[A-Za-z0-9+/=]{56}"', "(generated)", template(values, kinds=kinds))
    except Refused as refused:
        return False, str(refused)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", sorted({path[0] for path in LEAVES}))
def test_every_value_is_read_by_some_template(part: str):
    """Flip it, and the render changes."""
    before = [outcome(values, kinds) for values, kinds in CONTEXTS]

    def changes(path: tuple[str, ...]) -> bool:
        for (values, kinds), was in zip(CONTEXTS, before, strict=True):
            now = outcome(with_value(values, path, flip(path, values)), kinds)
            assert "don't meet the specifications" not in now[1], (path, now[1])
            if now[0] and now != was:
                return True
        return False

    with ThreadPoolExecutor(NUM_RENDERS_AT_ONCE) as pool:
        paths = [path for path in LEAVES if path[0] == part]
        unread = [p for p, read in zip(paths, pool.map(changes, paths), strict=True) if not read]
    assert unread == []


# --- the configuration that it carries


@pytest.mark.parametrize("ci", [name for name in CI_NAMES if name != "outside"])
def test_leeway_reads_the_configuration(ci: str, tmp_path: Path):
    """The file that pods get, read as pods read it."""
    file = tmp_path / "config.toml"
    documents = objects(ci)
    file.write_text(find(documents, "ConfigMap", "rel-leeway-config")["data"]["config.toml"])
    config = load(file, has_files=False)
    assert config.replay.url is None
    mounts = [m["mountPath"] for m in pod_of(documents, "learner").main["volumeMounts"]]
    for path in (config.model, config.search.corpus):
        if str(path).startswith("/var"):
            assert any(str(path).startswith(mount) for mount in mounts), path


def test_leeway_reads_the_sweep(tmp_path: Path):
    """Two objectives at three lags with two seeds are 12 arms."""
    from leeway.services.experiments.sweep_arms import grid_arms
    from leeway.services.experiments.sweep_file import load_sweep

    file = tmp_path / "sweep.toml"
    documents = objects("full")
    file.write_text(find(documents, "ConfigMap", "rel-leeway-sweep")["data"]["sweep.toml"])
    assert len(grid_arms(load_sweep(file))) == 12


def test_there_is_an_example_for_each_way_to_run():
    names = {file.name.removesuffix("-values.yaml") for file in CI}
    assert names == {"cpu", "default", "full", "no-kuberay", "outside", "several-nodes"}
