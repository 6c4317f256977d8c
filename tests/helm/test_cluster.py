"""The chart on a real API server: rendered, installed, upgraded, rolled back, uninstalled.

Two are meant: the one of api_server.py, which `make helm-test` builds and starts, and a cluster
that somebody has: `pytest -m cluster` with TEST_KUBECONFIG. Each test makes a namespace of its own
with the Pod Security Standard `restricted` enforced, and removes it. The cluster needs KubeRay and
the Prometheus operator; the images need not be there, since nothing waits for pods.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm import api_server, schemas
from tests.helm.chart import CHART, CI_NAMES, CUSTOM_KINDS, HELMS, parsed, pods
from tests.helm.conftest import leave
from tests.helm.tools import FOLDER

pytestmark = pytest.mark.timeout(600)
COMMAND_S = 300
DEFINITIONS = (
    "rayservices.ray.io",
    "servicemonitors.monitoring.coreos.com",
    "prometheusrules.monitoring.coreos.com",
)
"""CustomResourceDefinitions of what the chart makes."""
RELEASED = "app.kubernetes.io/instance=rel"


@dataclass
class Cluster:
    """An API server, and the chart as it takes it."""

    config: Path
    chart: Path
    folder: Path
    refusal: str = ""
    """What Helm said before there were CustomResourceDefinitions; empty if they were always."""

    def run(self, program: str, *arguments: str, text: str | None = None) -> str:
        """helm3, helm4 or kubectl; fails with what it said."""
        ended = self.tried(program, *arguments, text=text)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def tried(
        self, program: str, *arguments: str, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [FOLDER / program, "--kubeconfig", str(self.config), *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
        )

    def get(self, namespace: str, *what: str) -> dict[str, Any]:
        return json.loads(self.run("kubectl", "-n", namespace, "get", *what, "--output=json"))


@pytest.fixture(scope="session")
def built_server(
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """One server for all tests. It has the definitions of KubeRay and the Prometheus operator, or
    ours where those are missing."""
    if not (api_server.SERVER.is_file() and api_server.ETCD.is_file()):
        reason = api_server.why_not()
        if reason is not None:
            pytest.skip(f"no API server: {reason}")
        leave(pytestconfig, "no API server: `make helm-test` builds it")
    folder = tmp_path_factory.mktemp("cluster")
    with api_server.running(folder) as config:
        chart = api_server.older_chart(folder)
        cluster = Cluster(config, chart, folder)
        cluster.refusal = cluster.tried("helm4", "install", "rel", str(chart)).stderr
        theirs = list(schemas.OPERATORS.glob("*.yaml"))
        definitions = schemas.OPERATORS if theirs else schemas.OWN
        for definition in api_server.older_definitions(definitions):
            if definition["metadata"]["name"] in DEFINITIONS:
                cluster.run("kubectl", "create", "--filename=-", text=yaml.safe_dump(definition))
        until_served(cluster)
        yield cluster


def until_served(cluster: Cluster) -> None:
    """A definition is served a moment after it was taken."""
    deadline = time.monotonic() + COMMAND_S
    while (said := cluster.tried("kubectl", "get", ",".join(DEFINITIONS))).returncode:
        assert time.monotonic() < deadline, said.stderr
        time.sleep(0.5)


@pytest.fixture(params=[pytest.param("built"), pytest.param("given", marks=pytest.mark.cluster)])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Cluster:
    if request.param == "built":
        return request.getfixturevalue("built_server")
    if "TEST_KUBECONFIG" not in os.environ:
        pytest.skip("TEST_KUBECONFIG names no cluster")
    return Cluster(Path(os.environ["TEST_KUBECONFIG"]), CHART, tmp_path)


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A new one that admits only restricted pods."""
    name = f"leeway-test-{uuid.uuid4().hex[:8]}"
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    cluster.run("kubectl", "create", "--filename=-", text=yaml.safe_dump(space))
    try:
        yield name
    finally:
        cluster.run("kubectl", "delete", "namespace", name, "--wait=false")


def values_of(ci: str) -> tuple[str, ...]:
    return ("--values", str(CHART / "ci" / f"{ci}-values.yaml"))


def render(cluster: Cluster, ci: str, program: str, namespace: str) -> str:
    kinds = (f"--api-versions={kind}" for kind in CUSTOM_KINDS)
    chart = str(cluster.chart)
    return cluster.run(
        program, "template", "rel", chart, "--namespace", namespace, *kinds, *values_of(ci)
    )


@pytest.mark.parametrize("ci", CI_NAMES)
@pytest.mark.parametrize("program", HELMS)
def test_the_api_server_takes_every_render(cluster: Cluster, ci: str, program: str, namespace: str):
    manifest = render(cluster, ci, program, namespace)
    cluster.run("kubectl", "apply", "--dry-run=server", "--filename=-", text=manifest)


@pytest.mark.parametrize("ci", CI_NAMES)
@pytest.mark.parametrize("program", HELMS)
def test_every_example_installs_upgrades_rolls_back_and_leaves_what_it_says(
    cluster: Cluster, ci: str, program: str, namespace: str
):
    chart, options = str(cluster.chart), ("--namespace", namespace, *values_of(ci))
    cluster.run(program, "install", "rel", chart, *options)
    before = images(cluster, namespace)
    secrets = secret_data(cluster, namespace)
    changed = "image.tag=9.9.9,commonLabels.team=other,learner.rendezvousTimeoutSeconds=901"
    cluster.run(program, "upgrade", "rel", chart, *options, "--set", changed)
    assert images(cluster, namespace) != before
    assert secret_data(cluster, namespace) == secrets
    cluster.run(program, "rollback", "rel", "1", "--namespace", namespace)
    assert images(cluster, namespace) == before
    assert secret_data(cluster, namespace) == secrets
    kept = claims_to_keep(parsed(cluster.run(program, "get", "manifest", "rel", "-n", namespace)))
    cluster.run(program, "uninstall", "rel", "--namespace", namespace)
    assert left(cluster, namespace) == kept


def images(cluster: Cluster, namespace: str) -> dict[str, list[str]]:
    """Of every pod that the objects make."""
    found = cluster.get(namespace, "deployment,statefulset,job,rayservice")
    return {
        pod.where: [container["image"] for container in pod.containers]
        for pod in pods(found["items"])
    }


def secret_data(cluster: Cluster, namespace: str) -> dict[str, dict[str, str]]:
    found = cluster.get(namespace, "secret", f"--selector={RELEASED}")
    return {item["metadata"]["name"]: item["data"] for item in found["items"]}


def claims_to_keep(documents: list[dict[str, Any]]) -> set[str]:
    return {
        f"PersistentVolumeClaim/{document['metadata']['name']}"
        for document in documents
        if document["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }


def left(cluster: Cluster, namespace: str) -> set[str]:
    """What still is of the release; owned objects may take a moment where controllers run."""
    kinds = "deployment,statefulset,service,job,configmap,secret,serviceaccount,pvc"
    more = "networkpolicy,ingress,poddisruptionbudget,horizontalpodautoscaler,rayservice"
    monitors = "servicemonitor,prometheusrule"
    found = cluster.get(namespace, f"{kinds},{more},{monitors}", f"--selector={RELEASED}")
    return {
        f"{item['kind']}/{item['metadata']['name']}"
        for item in found["items"]
        if "deletionTimestamp" not in item["metadata"]
    }


@pytest.mark.parametrize("program", HELMS)
def test_two_releases_of_one_namespace_do_not_touch(cluster: Cluster, program: str, namespace: str):
    chart, options = str(cluster.chart), ("--namespace", namespace, *values_of("cpu"))
    cluster.run(program, "install", "rel", chart, *options)
    cluster.run(program, "install", "second", chart, *options)
    secrets = cluster.get(namespace, "secret", "second-leeway")["data"]
    cluster.run(program, "upgrade", "rel", chart, *options, "--set", "api.replicas=2")
    assert cluster.get(namespace, "deployment", "second-leeway-api")["spec"]["replicas"] == 1
    cluster.run(program, "uninstall", "rel", "--namespace", namespace)
    assert cluster.get(namespace, "secret", "second-leeway")["data"] == secrets
    cluster.run("kubectl", "-n", namespace, "get", "rayservice", "second-leeway")


@pytest.mark.parametrize("program", HELMS)
def test_a_password_of_the_values_replaces_the_generated_one_and_restarts_who_reads_it(
    cluster: Cluster, program: str, namespace: str
):
    def templates() -> dict[str, str]:
        found = cluster.get(namespace, "deployment,statefulset")["items"]
        return {
            item["metadata"]["name"]: json.dumps(item["spec"]["template"], sort_keys=True)
            for item in found
        }

    chart, options = str(cluster.chart), ("--namespace", namespace, *values_of("cpu"))
    cluster.run(program, "install", "rel", chart, *options)
    before = templates()
    cluster.run(program, "upgrade", "rel", chart, *options)
    assert templates() == before, "an upgrade that changes nothing restarts nothing"
    cluster.run(program, "upgrade", "rel", chart, *options, "--set", "redis.password=given")
    assert secret_data(cluster, namespace)["rel-leeway"]["redis-password"] == "Z2l2ZW4="
    assert {name for name, text in templates().items() if text != before[name]} == {
        "rel-leeway-api",
        "rel-leeway-learner",
        "rel-leeway-redis",
    }


@pytest.mark.parametrize("program", HELMS)
def test_an_upgrade_that_would_change_a_selector_is_refused(
    cluster: Cluster, program: str, namespace: str
):
    """The server itself says so: a chart that put more into a selector could never be upgraded."""
    chart, options = str(cluster.chart), ("--namespace", namespace, *values_of("cpu"))
    names = ("--set", "fullnameOverride=rel-leeway")
    cluster.run(program, "install", "rel", chart, *options, *names)
    ended = cluster.tried(
        program, "upgrade", "rel", chart, *options, *names, "--set", "nameOverride=other"
    )
    assert ended.returncode != 0
    assert "field is immutable" in ended.stderr


def test_without_kuberay_the_chart_refuses_in_words(cluster: Cluster):
    if not cluster.refusal:
        pytest.skip("this cluster had KubeRay before the test")
    assert "this cluster has no RayService (ray.io/v1)" in cluster.refusal
    assert "install the KubeRay operator first, or set serve.enabled=false" in cluster.refusal


@pytest.mark.cluster
def test_no_pod_is_kept_out_by_pod_security(cluster: Cluster, namespace: str):
    """`warn` prints a line for each pod that the standard forbids."""
    if cluster.chart != CHART:
        pytest.skip("the server that is built here is older than Pod Security")
    manifest = render(cluster, "cpu", "helm4", namespace)
    ended = cluster.tried("kubectl", "apply", "--dry-run=server", "--filename=-", text=manifest)
    assert ended.returncode == 0, ended.stderr
    assert "would violate PodSecurity" not in ended.stderr
