"""checkov finds nothing but what is excepted here, each with its reason.

It does not look inside a RayService, so its pod templates are shown to it as Pods. Offline it knows
no severities: every finding counts, whatever it is.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import CI_NAMES, Document, objects, pod_of, pods

EXCEPTED = {
    "CKV_K8S_43": "a release is pulled by its version; `image.digest` is there for who pins more",
    "CKV_K8S_15": "tags are fixed versions, so IfNotPresent pulls the same; `image.pullPolicy`",
    "CKV_K8S_35": "the tokens and the URL of Redis are variables: that is how `leeway` reads them",
}
"""Check -> why the chart does not follow it."""
EXCEPTED_FOR = {
    ("CKV_K8S_38", "ray-head"): "Ray's autoscaler, a container of the head, changes the RayCluster",
    ("CKV_K8S_8", "test"): "it ends in seconds",
    ("CKV_K8S_9", "test"): "nobody sends it requests",
}
"""(check, component) -> why this one component does not."""
EXCEPTED_IN = {
    ("CKV2_K8S_6", "no-kuberay"): "this example turns the network policies off; NOTES.txt says so",
}
"""(check, file of ci/) -> why this example does not."""
CHECKOV_S = 300


def shown(documents: Sequence[Document]) -> list[Document]:
    """The objects, and the pods of a RayService as Pods."""
    ray = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": pod.component,
                "namespace": pod.owner["metadata"]["namespace"],
                **(pod.template.get("metadata") or {}),
            },
            "spec": pod.spec,
        }
        for pod in pods(documents)
        if pod.owner["kind"] == "RayService"
    ]
    return [*documents, *ray]


def findings(checkov: Path, documents: Sequence[Document], folder: Path) -> list[tuple[str, str]]:
    """(check, component) of everything that checkov finds and that is not excepted."""
    listed = shown(documents)
    (folder / "release.yaml").write_text(yaml.safe_dump_all(listed))
    ended = subprocess.run(
        [
            *(checkov, "--framework=kubernetes", "--output=json", "--quiet", "--skip-download"),
            *("--file", "release.yaml"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=CHECKOV_S,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "LOG_LEVEL": "ERROR"},
    )
    report = json.loads(ended.stdout)
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["passed"] > 0
    found = [(f["check_id"], _component(f, listed)) for f in report["results"]["failed_checks"]]
    return sorted({f for f in found if f[0] not in EXCEPTED and f not in EXCEPTED_FOR})


def _component(finding: dict[str, Any], documents: Sequence[Document]) -> str:
    """Of the object that `Kind.namespace.name` means; that text itself if there is none."""
    kind, _, rest = finding["resource"].partition(".")
    name = rest.partition(".")[2].partition(" ")[0]
    for document in documents:
        if (document["kind"], document["metadata"]["name"]) == (kind, name):
            return document["metadata"].get("labels", {}).get("app.kubernetes.io/component", name)
    return finding["resource"]


@pytest.mark.timeout(CHECKOV_S)
@pytest.mark.parametrize("ci", CI_NAMES)
def test_checkov_finds_nothing_that_is_not_excepted(ci: str, checkov: Path, tmp_path: Path):
    found = findings(checkov, objects(ci), tmp_path)
    assert [finding for finding in found if (finding[0], ci) not in EXCEPTED_IN] == []


@pytest.mark.timeout(CHECKOV_S)
def test_checkov_finds_what_is_planted(checkov: Path, tmp_path: Path):
    documents = objects("default")
    pod_of(documents, "api").main["securityContext"]["privileged"] = True
    pod_of(documents, "policy").main["securityContext"]["capabilities"] = {"add": ["SYS_ADMIN"]}
    pod_of(documents, "learner").main["image"] = "leeway-learner:latest"
    del pod_of(documents, "redis").main["resources"]["limits"]
    found = findings(checkov, documents, tmp_path)
    assert {
        ("CKV_K8S_16", "api"),  # privileged
        ("CKV_K8S_39", "policy"),  # CAP_SYS_ADMIN, inside a RayService
        ("CKV_K8S_14", "learner"),  # latest
        ("CKV_K8S_13", "redis"),  # no limit of memory
    } <= set(found)


@pytest.mark.timeout(CHECKOV_S)
def test_every_exception_is_still_needed(
    checkov: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    needed = dict(EXCEPTED), dict(EXCEPTED_FOR)
    monkeypatch.setattr(f"{__name__}.EXCEPTED", {})
    monkeypatch.setattr(f"{__name__}.EXCEPTED_FOR", {})
    found = {
        f for ci in ("full", "several-nodes") for f in findings(checkov, objects(ci), tmp_path)
    }
    assert set(needed[0]) <= {check for check, _ in found}
    assert set(needed[1]) <= found
    for check, ci in EXCEPTED_IN:
        assert check in {check for check, _ in findings(checkov, objects(ci), tmp_path)}
