"""Our definitions of RayService, ServiceMonitor and PrometheusRule say no more than the operators'.

So what fits ours fits theirs, and the chart is checked where theirs cannot be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm import schemas
from tests.helm.chart import CUSTOM_KINDS, find, objects
from tests.helm.schemas import OPERATORS, OWN, Schema

OPEN = "x-kubernetes-preserve-unknown-fields"


def differences(own: Schema, theirs: Schema, where: str = "") -> Iterator[str]:
    """What `own` admits although `theirs` does not, as far as field names, types, choices and
    required fields go."""
    if own.get("type") != theirs.get("type"):
        yield f"{where} is {theirs.get('type')}, not {own.get('type')}"
    if "enum" in theirs and not set(own.get("enum", [None])) <= set(theirs["enum"]):
        yield f"{where} is one of {theirs['enum']}"
    if not own.get(OPEN):
        for name in set(theirs.get("required", ())) - set(own.get("required", ())):
            yield f"{where}.{name} is required"
    for name, field in own.get("properties", {}).items():
        inner = theirs.get("properties", {}).get(name)
        if inner is None:
            yield f"{where}.{name} is not there"
        else:
            yield from differences(field, inner, f"{where}.{name}")
    for name in ("items", "additionalProperties"):
        if name in own:
            yield from differences(own[name], theirs.get(name, {}), f"{where}[]")


def definitions(folder: Path) -> dict[tuple[str, str], Schema]:
    """By group and version, and kind."""
    return {
        (f"{spec['group']}/{version['name']}", spec["names"]["kind"]): version["schema"][
            "openAPIV3Schema"
        ]
        for file in sorted(folder.glob("*.yaml"))
        for document in yaml.load_all(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
        for spec in [document["spec"]]
        for version in spec["versions"]
    }


def test_ours_define_every_custom_kind_of_the_chart():
    assert {f"{group}/{kind}" for group, kind in definitions(OWN)} == set(CUSTOM_KINDS)


@pytest.mark.parametrize("kind", sorted(definitions(OWN)), ids=lambda kind: kind[1])
def test_what_fits_ours_fits_the_operators(kind: tuple[str, str]):
    theirs = definitions(OPERATORS)
    if not theirs:
        pytest.skip(f"{OPERATORS} holds no CustomResourceDefinitions: set CRD_DIR")
    assert list(differences(definitions(OWN)[kind], theirs[kind])) == []


OBJECT = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "mode": {"type": "string", "enum": ["a", "b"]},
        "list": {"type": "array", "items": {"type": "object", "properties": {}}},
    },
}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (OBJECT, []),
        ({"type": "object", "required": ["name"]}, []),
        ({"type": "object"}, [".name is required"]),
        ({**OBJECT, "type": "array"}, [" is object, not array"]),
        (
            {**OBJECT, "properties": {"nam": {"type": "string"}}},
            [".nam is not there"],
        ),
        (
            {**OBJECT, "properties": {"name": {"type": "integer"}}},
            [".name is string, not integer"],
        ),
        (
            {**OBJECT, "properties": {"mode": {"type": "string", "enum": ["a", "c"]}}},
            [".mode is one of ['a', 'b']"],
        ),
        (
            {**OBJECT, "properties": {"mode": {"type": "string"}}},
            [".mode is one of ['a', 'b']"],
        ),
        (
            {
                **OBJECT,
                "properties": {
                    "list": {
                        "type": "array",
                        "items": {"type": "object", "properties": {"x": {"type": "string"}}},
                    }
                },
            },
            [".list[].x is not there"],
        ),
    ],
    ids=str,
)
def test_a_difference_is_found(own: dict[str, Any], expected: list[str]):
    assert list(differences(own, OBJECT)) == expected


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("headGroupSpec", "template", "spec", "contaners"), []),
        (("autoscalerOptions", "resources", "limit"), {}),
        (("autoscalerOptions", "securityContext", "runAsRoot"), False),
        (("autoscalerOptions", "volumeMounts"), [{"name": "tmp"}]),
        (("gcsFaultToleranceOptions", "redisPassword"), {"valueFrom": {"secretRef": {}}}),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("version", schemas.VERSIONS)
def test_what_ours_leave_open_is_checked_by_kubernetes_own(
    path: tuple[str, ...], value: Any, version: str
):
    ray = find(objects("full"), "RayService")
    custom = schemas.custom_schemas(OWN)
    assert schemas.faults(ray, version, custom) == []
    node = ray["spec"]["rayClusterConfig"]
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    assert schemas.faults(ray, version, custom)
