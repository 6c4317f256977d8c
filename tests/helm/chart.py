"""The chart, rendered by a Helm of choice into parsed objects."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.helm.tools import FOLDER, ROOT

Document = dict[str, Any]

CHART = ROOT / "helm" / "leeway"
HELMS = ("helm4", "helm3")
CI = sorted((CHART / "ci").glob("*-values.yaml"))
CI_NAMES = [file.name.removesuffix("-values.yaml") for file in CI]
RELEASE, NAMESPACE = "rel", "search"
CUSTOM_KINDS = (
    "ray.io/v1/RayService",
    "monitoring.coreos.com/v1/ServiceMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
)
"""What a cluster with KubeRay and the Prometheus operator offers."""
HELM_S = 300


class Refused(Exception):
    """Helm did not render; the message is what it said."""


def helm(*arguments: str, program: str = "helm4", text: str | None = None) -> str:
    """Run Helm, with `text` as its input; returns what it printed. Raises Refused."""
    # Nobody's own settings and no cluster, unless the arguments name one.
    environment = {"HOME": str(FOLDER / "home"), "KUBECONFIG": "", "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(
        [FOLDER / program, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=HELM_S,
        env=environment,
    )
    if ended.returncode:
        raise Refused(ended.stderr.strip())
    return ended.stdout


def template(
    values: Mapping[str, Any] | None = None,
    *,
    ci: str | None = None,
    program: str = "helm4",
    release: str = RELEASE,
    namespace: str = NAMESPACE,
    kinds: Sequence[str] = CUSTOM_KINDS,
    chart: Path = CHART,
) -> str:
    """What `helm template` prints for `ci/CI-values.yaml` and `values` over it. Raises Refused."""
    arguments = ["template", release, str(chart), "--namespace", namespace]
    arguments += [f"--api-versions={kind}" for kind in kinds]
    if ci is not None:
        arguments += ["--values", str(CHART / "ci" / f"{ci}-values.yaml")]
    text = None
    if values is not None:
        arguments += ["--values", "-"]
        text = yaml.safe_dump(dict(values))
    return helm(*arguments, program=program, text=text)


def render(values: Mapping[str, Any] | None = None, **options: Any) -> list[Document]:
    """The objects of `template`. A generated password reads `(generated)`. Raises Refused."""
    return [_masked(document) for document in parsed(template(values, **options))]


def parsed(manifest: str) -> list[Document]:
    """The objects of a manifest. Raises on a key that appears twice."""
    return [document for document in yaml.load_all(manifest, _StrictLoader) if document]


class _StrictLoader(yaml.CSafeLoader):
    """YAML in which a key that appears twice is an error; PyYAML alone takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"twice: {twice}", node.start_mark)
        return super().construct_mapping(node, deep)


_StrictLoader.add_constructor(
    yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG,
    lambda loader, node: loader.construct_mapping(node, deep=True),
)


def _masked(document: Document) -> Document:
    if document["kind"] == "Secret":
        document["data"] = {key: _masked_value(value) for key, value in document["data"].items()}
    return document


def _masked_value(value: str) -> str:
    plain = base64.b64decode(value).decode()
    return "(generated)" if len(plain) == 40 and plain.isalnum() else plain


@cache
def rendered(ci: str, program: str = "helm4") -> str:
    """YAML of `render(ci=...)`, once; `objects` parses it anew for each test."""
    return yaml.safe_dump_all(render(ci=ci, program=program))


def objects(ci: str, program: str = "helm4") -> list[Document]:
    """A copy of its own, which a test may change."""
    return list(yaml.load_all(rendered(ci, program), yaml.CSafeLoader))


def find(documents: Sequence[Document], kind: str, name: str | None = None) -> Document:
    """The one object of a kind, or of a kind and name."""
    found = [d for d in documents if d["kind"] == kind and name in (None, d["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind} {name or ''}"
    return found[0]


@dataclass(frozen=True)
class PodTemplate:
    """A pod as some object makes it."""

    owner: Document
    where: str
    """Such as Deployment/rel-leeway-api, with the group for those of a RayService."""
    template: Document

    @property
    def labels(self) -> dict[str, str]:
        return self.template.get("metadata", {}).get("labels") or {}

    @property
    def spec(self) -> dict[str, Any]:
        return self.template.get("spec") or {}

    @property
    def component(self) -> str:
        return self.labels.get("app.kubernetes.io/component", "")

    @property
    def main(self) -> dict[str, Any]:
        return self.spec["containers"][0]

    @property
    def containers(self) -> list[dict[str, Any]]:
        """Init containers included."""
        return [*(self.spec.get("initContainers") or []), *(self.spec.get("containers") or [])]


def pods(documents: Sequence[Document]) -> list[PodTemplate]:
    """Every pod that the objects make, those of a RayService included."""
    return [pod for document in documents for pod in _pods_of(document)]


def _pods_of(document: Document) -> Iterator[PodTemplate]:
    spec = document.get("spec") or {}
    where = f"{document['kind']}/{document['metadata'].get('name')}"
    match document["kind"]:
        case "Pod":
            yield PodTemplate(document, where, document)
        case "Deployment" | "StatefulSet" | "DaemonSet" | "Job":
            yield PodTemplate(document, where, spec.get("template") or {})
        case "RayService":
            cluster = spec["rayClusterConfig"]
            yield PodTemplate(document, f"{where} head", cluster["headGroupSpec"]["template"])
            for group in cluster.get("workerGroupSpecs") or []:
                yield PodTemplate(document, f"{where} {group['groupName']}", group["template"])
        case _:
            pass


def pod_of(documents: Sequence[Document], component: str) -> PodTemplate:
    """The one pod of a component."""
    found = [pod for pod in pods(documents) if pod.component == component]
    assert len(found) == 1, f"{len(found)} pods of {component}"
    return found[0]
