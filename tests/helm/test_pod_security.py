"""No pod breaks the Pod Security Standard `restricted`: a namespace that enforces it takes all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.helm.chart import CI_NAMES, HELMS, Document, find, objects, pod_of, pods, render
from tests.helm.pod_security import violations
from tests.helm.tools import ROOT


@pytest.mark.parametrize("program", HELMS)
@pytest.mark.parametrize("ci", CI_NAMES)
def test_every_pod_of_the_chart_is_restricted(ci: str, program: str):
    documents = objects(ci, program)
    assert len(pods(documents)) >= 3
    assert violations(documents) == []


def test_the_pods_that_fetch_from_an_object_store_are_restricted():
    source = {"remote": ":s3:x"}
    storage = {name: {"enabled": True, "source": source} for name in ("models", "data")}
    documents = render({"storage": storage})
    fetching = [c for pod in pods(documents) for c in pod.containers if "fetch" in c["name"]]
    assert len(fetching) == 2 * 4, "of learner, head and both groups of workers"
    assert violations(documents) == []


def test_every_pod_of_the_manifests_without_helm_is_restricted():
    files = sorted((ROOT / "deploy" / "kuberay").glob("*.yaml"))
    documents = [d for file in files for d in yaml.safe_load_all(file.read_text()) if d]
    assert len(pods(documents)) == 5
    assert violations(documents) == []


def api(documents: list[Document]) -> dict[str, Any]:
    return pod_of(documents, "api").spec


def context(documents: list[Document], component: str = "learner") -> dict[str, Any]:
    return pod_of(documents, component).main["securityContext"]


def options(documents: list[Document]) -> dict[str, Any]:
    return find(documents, "RayService")["spec"]["rayClusterConfig"]["autoscalerOptions"]


PLANTED: dict[str, Callable[[list[Document]], Any]] = {
    "hostNetwork is true": lambda d: api(d).update(hostNetwork=True),
    "hostPID is true": lambda d: api(d).update(hostPID=True),
    "is a hostPath": lambda d: api(d)["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
    "sysctl kernel.msgmax is not safe": lambda d: api(d)["securityContext"].update(
        sysctls=[{"name": "kernel.msgmax", "value": "1"}]
    ),
    "AppArmor is unconfined": lambda d: (
        pod_of(d, "api")
        .template["metadata"]
        .update(annotations={"container.apparmor.security.beta.kubernetes.io/api": "unconfined"})
    ),
    "appArmorProfile of the pod is Unconfined": lambda d: api(d)["securityContext"].update(
        appArmorProfile={"type": "Unconfined"}
    ),
    "seLinuxOptions of the container": lambda d: context(d).update(
        seLinuxOptions={"type": "spc_t"}
    ),
    "hostProcess of the pod": lambda d: api(d)["securityContext"].update(
        windowsOptions={"hostProcess": True}
    ),
    "it is privileged": lambda d: context(d).update(privileged=True),
    "allowPrivilegeEscalation is not false": lambda d: context(d, "policy").pop(
        "allowPrivilegeEscalation"
    ),
    "runAsNonRoot is not true": lambda d: (
        pod_of(d, "redis").spec["securityContext"].pop("runAsNonRoot")
    ),
    "container learner: runAsUser is 0": lambda d: context(d).update(runAsUser=0),
    "procMount is Unmasked": lambda d: context(d).update(procMount="Unmasked"),
    "there is no seccompProfile": lambda d: (
        pod_of(d, "actors").spec["securityContext"].update(seccompProfile={"type": "Unconfined"})
    ),
    "does not drop ALL": lambda d: context(d, "ray-head").update(capabilities={"drop": ["CHOWN"]}),
    "adds SYS_ADMIN": lambda d: context(d)["capabilities"].update(add=["SYS_ADMIN"]),
    "hostPort 8080": lambda d: pod_of(d, "api").main["ports"][0].update(hostPort=8080),
    "httpGet of a probe or hook names a host": lambda d: (
        pod_of(d, "api").main["livenessProbe"]["httpGet"].update(host="example.org")
    ),
    "container fetch-models: it does not drop ALL": lambda d: (
        pod_of(d, "sweep").spec["initContainers"][0].pop("securityContext")
    ),
    "container autoscaler: allowPrivilegeEscalation": lambda d: options(d).pop("securityContext"),
}
"""Words of what is found -> how the mistake is made in the largest example."""


@pytest.mark.parametrize("words", PLANTED)
def test_a_planted_mistake_is_found(words: str):
    documents = objects("full")
    PLANTED[words](documents)
    assert [said for said in violations(documents) if words in said]
