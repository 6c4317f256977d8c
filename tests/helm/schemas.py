"""Strict checks of objects against schemas: a field that no schema knows is a fault.

Kinds of Kubernetes are checked by the schemas that kubernetes-validate ships, those of a
CustomResourceDefinition by its own, closed first: the API server drops what they do not name. The
pods inside a RayService are checked by Kubernetes' schemas besides. A kind without a schema is a
fault, too.

Two sets of definitions can be had: OWN, which hold no more than what the chart uses, and those of
the operators, which are not ours to copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.helm.chart import pods
from tests.helm.tools import ROOT

Schema = dict[str, Any]

OWN = Path(__file__).parent / "definitions"
OPERATORS = Path(os.environ.get("CRD_DIR", ROOT.parent / "shared" / "crds"))
"""With the definitions of KubeRay and the Prometheus operator; it may be missing."""
VERSIONS = ("1.27.0", "1.32.0", "1.37.0")
"""Of Kubernetes: the oldest that Chart.yaml admits, one in wide use, the newest."""
VERBATIM = (
    *("type", "format", "enum", "pattern", "required", "multipleOf", "uniqueItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
)
MAX_TEXT = 200


def faults(
    document: Mapping[str, Any], version: str, custom: Mapping[tuple[str, str], Any]
) -> list[str]:
    """Sentences of what is wrong with one object under a version of Kubernetes."""
    name = f"{document.get('kind')}/{document.get('metadata', {}).get('name')}"
    validator = custom.get((document.get("apiVersion", ""), document.get("kind", "")))
    if validator is None:
        return [f"{name} {fault}" for fault in _core_faults(document, version)]
    found = [f"{name} {_at(e)}: {e.message[:MAX_TEXT]}" for e in validator.iter_errors(document)]
    if found or document["kind"] != "RayService":
        return found
    return [
        f"{where} {fault}"
        for where, template in _pod_templates(document)
        for fault in _core_faults(template, version)
    ]


def _pod_templates(ray: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, a PodTemplate) for all that is Kubernetes' own in a RayService."""
    made = {pod.where: pod.template for pod in pods([dict(ray)])}
    cluster = ray["spec"]["rayClusterConfig"]
    scaler = cluster.get("autoscalerOptions", {})
    same = {k: scaler[k] for k in ("resources", "securityContext", "volumeMounts") if k in scaler}
    redis = cluster.get("gcsFaultToleranceOptions", {})
    given = [{"name": k, **redis[k]} for k in ("redisUsername", "redisPassword") if k in redis]
    container = {"name": "autoscaler", "image": "ray", "env": given, **same}
    made["RayService autoscaler and Redis"] = {"spec": {"containers": [container]}}
    for where, template in made.items():
        shown = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "ray"}}
        yield where, {**shown, "template": template}


def _core_faults(document: Mapping[str, Any], version: str) -> list[str]:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message[:MAX_TEXT]}"]
    except kubernetes_validate.SchemaNotFoundError:
        return [f"has no schema: apiVersion {document.get('apiVersion')}, Kubernetes {version}"]
    return []


def _at(error: jsonschema.ValidationError) -> str:
    return ".".join(map(str, error.absolute_path))


@cache
def custom_schemas(folder: Path) -> dict[tuple[str, str], jsonschema.Draft202012Validator]:
    """By apiVersion and kind, every served version of the definitions in `folder`."""
    found = {}
    for file in sorted(folder.glob("*.yaml")):
        for definition in yaml.load_all(file.read_text(encoding="utf-8"), yaml.CSafeLoader):
            spec = definition["spec"]
            for version in spec["versions"]:
                if version["served"]:
                    key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                    found[key] = _validator(version["schema"]["openAPIV3Schema"])
    return found


def _validator(schema: Schema) -> jsonschema.Draft202012Validator:
    """Of a whole object: its metadata is Kubernetes' own and left open."""
    closed = closed_schema(schema)
    closed["properties"] |= {
        "metadata": {"type": "object", "required": ["name"]},
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
    }
    return jsonschema.Draft202012Validator(closed)


def closed_schema(schema: Schema, *, is_part: bool = False) -> Schema:
    """JSON schema of a structural schema of Kubernetes, closed where it lists properties.

    `is_part`: inside allOf, anyOf, oneOf and not, which add conditions to a schema that is closed
    already and never name all properties.
    """
    result: Schema = {key: schema[key] for key in VERBATIM if key in schema}
    for key in ("allOf", "anyOf", "oneOf"):
        if key in schema:
            result[key] = [closed_schema(part, is_part=True) for part in schema[key]]
    if "not" in schema:
        result["not"] = closed_schema(schema["not"], is_part=True)
    if "items" in schema:
        result["items"] = closed_schema(schema["items"], is_part=is_part)
    if "properties" in schema:
        inner = schema["properties"].items()
        result["properties"] = {k: closed_schema(v, is_part=is_part) for k, v in inner}
        if not is_part and not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    more = schema.get("additionalProperties")
    if more is not None:
        result["additionalProperties"] = closed_schema(more) if isinstance(more, dict) else more
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable") and "type" in result:
        result["type"] = [result["type"], "null"]
    return result
