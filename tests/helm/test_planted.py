"""Mistakes planted in a good release are found: each check is shown to be able to fail."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helm import schemas, semantics
from tests.helm.chart import CHART, Document, Refused, find, helm, objects, pod_of, render

Plant = Callable[[list[Document]], Any]

SCHEMA: dict[str, Plant] = {
    "a field nobody knows": lambda d: find(d, "Deployment")["spec"].update(replicass=2),
    "a field at the wrong place": lambda d: find(d, "Deployment")["spec"].update(image="x:1"),
    "a field of a container nobody knows": lambda d: pod_of(d, "api").main.update(probe={}),
    "a wrong kind": lambda d: find(d, "Deployment").update(kind="Deploymentt"),
    "a wrong apiVersion": lambda d: find(d, "Deployment").update(apiVersion="apps/v2"),
    "an apiVersion that is gone": lambda d: find(d, "Ingress").update(
        apiVersion="networking.k8s.io/v1beta1"
    ),
    "no selector at all": lambda d: find(d, "Deployment")["spec"].pop("selector"),
    "text for a number": lambda d: find(d, "Deployment")["spec"].update(replicas="two"),
    "a number for a variable": lambda d: (
        pod_of(d, "api").main["env"].append({"name": "NUMBER", "value": 1})
    ),
    "a container without a name": lambda d: pod_of(d, "api").main.pop("name"),
    "workers of Ray under a misspelt field": lambda d: ray(d).update(
        workerGroupSpec=ray(d).pop("workerGroupSpecs")
    ),
    "a field of a Ray pod nobody knows": lambda d: pod_of(d, "policy").spec.update(shm="1Gi"),
    "a group of Ray without bounds": lambda d: ray(d)["workerGroupSpecs"][0].pop("maxReplicas"),
    "a field of a monitor nobody knows": lambda d: find(d, "ServiceMonitor")["spec"].update(port=1),
    "a monitor without endpoints": lambda d: find(d, "ServiceMonitor")["spec"].pop("endpoints"),
    "a rule under a misspelt field": lambda d: find(d, "PrometheusRule")["spec"].update(group=[]),
}
"""What the schemas find: name of the mistake -> how it is made."""


def ray(documents: list[Document]) -> dict[str, Any]:
    return find(documents, "RayService")["spec"]["rayClusterConfig"]


def service(documents: list[Document]) -> dict[str, Any]:
    return find(documents, "Service", "rel-leeway-api")["spec"]


def context(documents: list[Document], component: str) -> dict[str, Any]:
    return pod_of(documents, component).main["securityContext"]


SEMANTIC: dict[str, tuple[Plant, str]] = {
    "a selector that is empty": (
        lambda d: find(d, "Deployment")["spec"].update(selector={"matchLabels": {}}),
        "no selector",
    ),
    "a selector of other pods": (
        lambda d: find(d, "Deployment")["spec"]["selector"]["matchLabels"].update(a="b"),
        "does not match the labels",
    ),
    "a selector of two workloads": (
        lambda d: find(d, "Deployment")["spec"]["selector"]["matchLabels"].pop(
            "app.kubernetes.io/component"
        ),
        "too",
    ),
    "a service without a selector": (lambda d: service(d).pop("selector"), "no selector"),
    "a service of no pod": (lambda d: service(d)["selector"].update(a="b"), "selects no pod"),
    "a service to a port that is not": (
        lambda d: service(d)["ports"][0].update(targetPort="https"),
        "has no port https",
    ),
    "an ingress to another service": (
        lambda d: find(d, "Ingress")["spec"]["rules"][0]["http"]["paths"][0]["backend"][
            "service"
        ].update(name="api"),
        "is no Service",
    ),
    "both bounds of a budget": (
        lambda d: find(d, "PodDisruptionBudget", "rel-leeway-api")["spec"].update(maxUnavailable=1),
        "takes one of",
    ),
    "a budget without a selector": (
        lambda d: find(d, "PodDisruptionBudget", "rel-leeway-api")["spec"].pop("selector"),
        "no selector",
    ),
    "a scaler of nothing": (
        lambda d: find(d, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"].update(name="x"),
        "is not of the release",
    ),
    "a scaler upside down": (
        lambda d: find(d, "HorizontalPodAutoscaler")["spec"].update(minReplicas=9),
        "minReplicas is above",
    ),
    "replicas beside a scaler": (
        lambda d: find(d, "Deployment")["spec"].update(replicas=1),
        "sets replicas",
    ),
    "a monitor of nothing": (
        lambda d: find(d, "ServiceMonitor")["spec"]["selector"]["matchLabels"].update(a="b"),
        "selects no Service",
    ),
    "a network policy of nothing": (
        lambda d: find(d, "NetworkPolicy", "rel-leeway-api")["spec"]["podSelector"][
            "matchLabels"
        ].update(a="b"),
        "selects no pod",
    ),
    "the latest tag": (
        lambda d: pod_of(d, "learner").main.update(image="leeway-learner:latest"),
        "no fixed tag",
    ),
    "no tag": (
        lambda d: pod_of(d, "policy").main.update(image="host:5000/leeway-actor"),
        "no fixed tag",
    ),
    "root": (lambda d: context(d, "learner").update(runAsUser=0), "may run as root"),
    "root in a Ray pod": (
        lambda d: pod_of(d, "policy").spec["securityContext"].pop("runAsNonRoot"),
        "may run as root",
    ),
    "a privileged container": (lambda d: context(d, "api").update(privileged=True), "privileges"),
    "a root file system to write": (
        lambda d: context(d, "redis").update(readOnlyRootFilesystem=False),
        "write its root",
    ),
    "capabilities": (lambda d: context(d, "api").pop("capabilities"), "keeps capabilities"),
    "no seccomp": (
        lambda d: pod_of(d, "api").spec["securityContext"].pop("seccompProfile"),
        "seccomp",
    ),
    "the host's processes": (lambda d: pod_of(d, "api").spec.update(hostPID=True), "hostPID"),
    "a folder of the node": (
        lambda d: pod_of(d, "api").spec["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
        "a volume of the node",
    ),
    "a mount without a volume": (
        lambda d: (
            pod_of(d, "learner").main["volumeMounts"].append({"name": "x", "mountPath": "/x"})
        ),
        "no volume x",
    ),
    "a volume that nothing mounts": (
        lambda d: pod_of(d, "learner").spec["volumes"].append({"name": "x", "emptyDir": {}}),
        "mounted nowhere",
    ),
    "a variable twice": (
        lambda d: pod_of(d, "api").main["env"].append({"name": "HOME", "value": "/"}),
        "HOME is set 2 times",
    ),
    "a variable before the one it uses": (
        lambda d: pod_of(d, "learner").main["env"].reverse(),
        "set later or never",
    ),
    "a quantity with a space": (
        lambda d: pod_of(d, "api").main["resources"]["limits"].update(memory="1 Gi"),
        "is not a quantity",
    ),
    "a request above its limit": (
        lambda d: pod_of(d, "api").main["resources"]["requests"].update(memory="64Gi"),
        "is above its limit",
    ),
    "no limit of memory": (
        lambda d: pod_of(d, "learner").main["resources"]["limits"].pop("memory"),
        "no limits.memory",
    ),
    "shared memory as large as the limit": (
        lambda d: pod_of(d, "policy").main["resources"]["limits"].update(memory="12Gi"),
        "may fill the memory limit",
    ),
    "a probe of a port that is not": (
        lambda d: pod_of(d, "api").main["livenessProbe"]["httpGet"].update(port="https"),
        "none of its own",
    ),
    "no probe": (lambda d: pod_of(d, "actors").main.pop("livenessProbe"), "no livenessProbe"),
    "a secret of another name": (
        lambda d: find(d, "Secret")["metadata"].update(name="rel-other"),
        "Secret/rel-leeway is not of the release",
    ),
    "a secret without the key": (
        lambda d: find(d, "Secret")["data"].pop("redis-password"),
        "has no key redis-password",
    ),
    "a claim that is missing": (
        lambda d: d.remove(find(d, "PersistentVolumeClaim", "rel-leeway-runs")),
        "PersistentVolumeClaim/rel-leeway-runs is not",
    ),
    "an object twice": (lambda d: d.append(find(d, "ServiceAccount")), "is there 2 times"),
    "a label that is a number": (
        lambda d: find(d, "ServiceAccount")["metadata"]["labels"].update(a=1),
        "is not valid",
    ),
    "a name with capitals": (
        lambda d: find(d, "ServiceAccount")["metadata"].update(name="Rel"),
        "lower-case",
    ),
    "a set whose service is missing": (
        lambda d: find(d, "StatefulSet", "rel-leeway-learner")["spec"].update(serviceName="x"),
        "is no Service of the release",
    ),
    "shared memory too small for the objects of Ray": (
        lambda d: pod_of(d, "policy").main["resources"]["limits"].update(memory="64Gi"),
        "less than 30 %",
    ),
    "a group of Ray out of bounds": (
        lambda d: ray(d)["workerGroupSpecs"][0].update(replicas=99),
        "out of bounds",
    ),
    "a head of Ray without a port of Serve": (
        lambda d: ray(d)["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"].pop(),
        "no port is named serve",
    ),
    "no group of Ray": (lambda d: ray(d).update(workerGroupSpecs=[]), "no group of workers"),
    "rights in the whole cluster": (
        lambda d: d.append(
            {"kind": "ClusterRole", "metadata": {"name": "x", "namespace": "search"}}
        ),
        "nothing outside its namespace",
    ),
    "another namespace": (
        lambda d: find(d, "ServiceAccount")["metadata"].update(namespace="x"),
        "2 namespaces",
    ),
}
"""What the semantic checks find, and words of the sentence they find it with."""


@pytest.mark.parametrize("mistake", SCHEMA)
@pytest.mark.parametrize("version", schemas.VERSIONS)
def test_the_schemas_find(mistake: str, version: str, crd_folder: Path):
    documents = objects("full")
    SCHEMA[mistake](documents)
    (planted,) = [d for d, was in zip(documents, objects("full"), strict=True) if d != was]
    assert schemas.faults(planted, version, schemas.custom_schemas(crd_folder))


@pytest.mark.parametrize("mistake", SEMANTIC)
def test_the_semantic_checks_find(mistake: str):
    plant, words = SEMANTIC[mistake]
    documents = objects("full")
    plant(documents)
    found = semantics.faults(documents)
    assert [fault for fault in found if words in fault], found


TEMPLATE: dict[str, tuple[str, str, str]] = {
    "a value that is not there": (
        "api/service.yaml",
        "{{ .Values.api.service.type }}",
        "{{ .Values.api.servise.type }}",
    ),
    "a template that is not there": (
        "api/service.yaml",
        'include "leeway.selectorLabels"',
        'include "leeway.selectorLabel"',
    ),
    "a wrong indentation": ("api/service.yaml", "  ports:\n", "   ports:\n"),
    "a brace that is not closed": ("api/hpa.yaml", "{{- end }}", "{{- end"),
}
"""Of a chart's text, which Helm itself must find: file below templates/, text, and its mistake."""


@pytest.mark.parametrize("mistake", TEMPLATE)
@pytest.mark.parametrize("program", ["helm3", "helm4"])
def test_lint_finds(mistake: str, program: str, tmp_path: Path):
    file, text, planted = TEMPLATE[mistake]
    chart = tmp_path / "leeway"
    shutil.copytree(CHART, chart)
    template = chart / "templates" / file
    content = template.read_text()
    assert text in content
    template.write_text(content.replace(text, planted))
    with pytest.raises(Refused):
        helm("lint", "--strict", str(chart), program=program)


@pytest.mark.parametrize("program", ["helm3", "helm4"])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"api": {"replicass": 2}}, "'replicass' not allowed"),
        ({"learner": {"extraEnvs": []}}, "'extraEnvs' not allowed"),
        ({"serve": {"policyWorkers": {"securityContext": {"runAsRoot": True}}}}, "'runAsRoot'"),
        ({"api": {"replicas": "two"}}, "/api/replicas"),
        ({"api": {"image": {"tag": "latest"}}}, "/api/image/tag"),
        ({"image": {"tag": "latest"}}, "/image/tag"),
        ({"learner": {"extraEnv": [{"value": "no name"}]}}, "/learner/extraEnv/0"),
        ({"learner": {"terminationGracePeriodSeconds": 30}}, "/learner/terminationGrace"),
        ({"redis": {"password": "with@sign"}}, "/redis/password"),
        ({"redis": {"url": "http://redis"}}, "/redis/url"),
        ({"run": {"name": "no spaces"}}, "/run/name"),
        ({"storage": {"runs": {"accessModes": ["Shared"]}}}, "/storage/runs/accessModes/0"),
        ({"api": {"tokens": {"control": "short"}}}, "/api/tokens/control"),
        ({"serve": {"upgradeStrategy": "Rolling"}}, "/serve/upgradeStrategy"),
    ],
    ids=str,
)
def test_the_schema_of_the_values_refuses(values: dict[str, Any], words: str, program: str):
    with pytest.raises(Refused, match=r"don't meet the specifications") as refused:
        render(values, program=program)
    assert words in str(refused.value)
