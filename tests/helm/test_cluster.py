"""The same chart on a cluster that somebody has: `pytest -m cluster` with TEST_KUBECONFIG.

It makes a namespace of its own with the Pod Security Standard `restricted` enforced, and removes
it. The cluster needs KubeRay and the Prometheus operator; the images need not be there, since
nothing waits for pods.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Iterator

import pytest
import yaml

from tests.helm.chart import CHART, CI_NAMES, HELMS, template
from tests.helm.tools import FOLDER

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        "TEST_KUBECONFIG" not in os.environ, reason="TEST_KUBECONFIG names no cluster"
    ),
    pytest.mark.timeout(600),
]
COMMAND_S = 300


def run(program: str, *arguments: str, text: str | None = None) -> str:
    """helm3, helm4 or kubectl on the cluster; fails with what it said."""
    ended = subprocess.run(
        [FOLDER / program, "--kubeconfig", os.environ["TEST_KUBECONFIG"], *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture
def namespace() -> Iterator[str]:
    """A new one that admits only restricted pods."""
    name = f"leeway-test-{uuid.uuid4().hex[:8]}"
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    run("kubectl", "create", "--filename=-", text=yaml.safe_dump(space))
    try:
        yield name
    finally:
        run("kubectl", "delete", "namespace", name, "--wait=false")


@pytest.mark.parametrize("ci", CI_NAMES)
@pytest.mark.parametrize("program", HELMS)
def test_the_api_server_takes_every_render(ci: str, program: str, namespace: str):
    manifest = template(ci=ci, program=program, namespace=namespace)
    run("kubectl", "apply", "--dry-run=server", "--filename=-", text=manifest)


@pytest.mark.parametrize("program", HELMS)
def test_install_upgrade_rollback_uninstall(program: str, namespace: str):
    def secret() -> dict[str, str]:
        said = run("kubectl", "-n", namespace, "get", "secret", "rel-leeway", "--output=json")
        return json.loads(said)["data"]

    def replicas() -> int:
        said = run("kubectl", "-n", namespace, "get", "deployment", "rel-leeway-api", "-ojson")
        return json.loads(said)["spec"]["replicas"]

    cpu = ("--namespace", namespace, "--values", str(CHART / "ci" / "cpu-values.yaml"))
    run(program, "install", "rel", str(CHART), *cpu)
    passwords = secret()
    run(program, "upgrade", "rel", str(CHART), *cpu, "--set", "api.replicas=2,image.tag=9.9.9")
    assert (secret(), replicas()) == (passwords, 2)
    run(program, "rollback", "rel", "1", "--namespace", namespace)
    assert (secret(), replicas()) == (passwords, 1)
    run(program, "install", "second", str(CHART), *cpu)
    run(program, "uninstall", "rel", "--namespace", namespace)
    left = json.loads(
        run(
            *("kubectl", "-n", namespace, "get", "all,secret,networkpolicy,rayservice"),
            *("--selector=app.kubernetes.io/instance=rel", "--output=json"),
        )
    )
    names = {item["kind"] for item in left["items"] if "deletionTimestamp" not in item["metadata"]}
    assert names <= {"Pod", "ReplicaSet"}, "owned objects may take a moment"
    run("kubectl", "-n", namespace, "get", "deployment", "second-leeway-api")


def test_no_pod_is_kept_out_by_pod_security(namespace: str):
    """`warn` prints a line for each pod that the standard forbids."""
    manifest = template(ci="cpu", namespace=namespace)
    ended = subprocess.run(
        [
            *(FOLDER / "kubectl", "--kubeconfig", os.environ["TEST_KUBECONFIG"]),
            *("apply", "--dry-run=server", "--filename=-"),
        ],
        input=manifest,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert "would violate PodSecurity" not in ended.stderr
