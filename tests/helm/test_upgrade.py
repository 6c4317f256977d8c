"""An upgrade changes nothing that Kubernetes forbids to change, and two releases never touch."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.chart import CHART, CI_NAMES, Document, find, objects, pod_of, pods, render
from tests.helm.semantics import quantity, selects

CHANGEABLE_OF_A_SET = {
    *("replicas", "template", "updateStrategy", "minReadySeconds", "ordinals"),
    *("persistentVolumeClaimRetentionPolicy", "revisionHistoryLimit"),
}
"""What the API server lets an update of a StatefulSet change."""
CHANGES: dict[str, dict[str, Any]] = {
    "another tag": {"image": {"tag": "9.9.9"}},
    "labels of the user": {"commonLabels": {"team": "x", "app.kubernetes.io/component": "other"}},
    "labels of pods": {
        part: {"podLabels": {"tier": "x", "app.kubernetes.io/name": "other"}}
        for part in ("api", "learner", "redis")
    },
    "annotations": {"commonAnnotations": {"owner": "x"}},
    "another configuration": {"config": "name = 'other'"},
    "another run": {"run": {"name": "second"}},
    "more of everything": {
        "learner": {
            "replicas": 2,
            "resources": {"requests": {"cpu": "9"}, "limits": {"cpu": "9"}},
        },
        "storage": {"runs": {"accessModes": ["ReadWriteMany"]}},
        "api": {"replicas": 3},
    },
    "larger claims": {"storage": {"runs": {"size": "9Ti"}, "redis": {"size": "9Ti"}}},
    "other ports": {"api": {"service": {"port": 9090}}},
    "other security": {"podSecurityContext": {"runAsUser": 20001}},
    "policies on or off": {},
    "another sweep": {"sweep": {"enabled": True, "config": "name = 'b'", "backoffLimit": 9}},
}
STABLE = ("default", "cpu", "full", "no-kuberay", "several-nodes")


def immutable(document: Document) -> Any:
    """The part of an object that an update must leave as it is."""
    spec = document.get("spec", {})
    match document["kind"]:
        case "Deployment":
            return spec["selector"]
        case "StatefulSet":
            return {key: value for key, value in spec.items() if key not in CHANGEABLE_OF_A_SET}
        case "Job":
            return spec["template"]
        case "Service":
            return spec.get("clusterIP") == "None"
        case "PersistentVolumeClaim":
            return {key: value for key, value in spec.items() if key != "resources"}
        case "Secret":
            return document["type"]
        case _:
            return None


def forbidden(before: Sequence[Document], after: Sequence[Document]) -> list[str]:
    """Names of objects whose immutable part differs."""
    was = {(d["kind"], d["metadata"]["name"]): d for d in before}
    found = []
    for document in after:
        name = (document["kind"], document["metadata"]["name"])
        if name in was and immutable(was[name]) != immutable(document):
            found.append("/".join(name))
        if name in was and document["kind"] == "PersistentVolumeClaim":
            sizes = [d["spec"]["resources"]["requests"]["storage"] for d in (was[name], document)]
            if quantity(sizes[1]) < quantity(sizes[0]):
                found.append(f"{'/'.join(name)} shrinks")
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ci", STABLE)
def test_a_change_of_values_can_be_applied(ci: str, change: str):
    values = copy.deepcopy(CHANGES[change])
    before = objects(ci)
    if change == "more of everything":
        # The access mode of a claim is chosen when it is made.
        before = render({"storage": values["storage"]}, ci=ci)
    if change == "policies on or off":
        values = {"networkPolicy": {"enabled": ci == "no-kuberay"}}
    after = render(values, ci=ci)
    assert after != before
    assert forbidden(before, after) == []


@pytest.mark.parametrize("ci", STABLE)
def test_another_version_of_the_chart_can_be_applied(ci: str, tmp_path: Path):
    chart = tmp_path / "leeway"
    shutil.copytree(CHART, chart)
    meta = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(
        yaml.safe_dump({**meta, "version": "9.0.0+x", "appVersion": "9"})
    )
    after = render(ci=ci, chart=chart)
    assert find(after, "ServiceAccount")["metadata"]["labels"]["helm.sh/chart"] == "leeway-9.0.0_x"
    assert forbidden(objects(ci), after) == []


def test_another_version_of_the_chart_alone_restarts_nothing(tmp_path: Path):
    """Unless it brings other images: a second Ray cluster would ask for every GPU again."""
    chart = tmp_path / "leeway"
    shutil.copytree(CHART, chart)
    meta = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**meta, "version": "9.0.0"}))
    before, after = objects("full"), render(ci="full", chart=chart)
    assert before != after
    assert [pod.template for pod in pods(before) if pod.component != "test"] == [
        pod.template for pod in pods(after) if pod.component != "test"
    ]


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("Deployment", {"selector": {"matchLabels": {"a": "b"}}}),
        ("StatefulSet", {"serviceName": "other"}),
        ("StatefulSet", {"podManagementPolicy": "OrderedReady"}),
        ("StatefulSet", {"volumeClaimTemplates": []}),
        ("PersistentVolumeClaim", {"accessModes": ["ReadOnlyMany"]}),
        ("PersistentVolumeClaim", {"resources": {"requests": {"storage": "1Mi"}}}),
        ("Job", {"template": {"metadata": {}}}),
        ("Service", {"clusterIP": "None"}),
    ],
    ids=str,
)
def test_what_kubernetes_forbids_would_be_found(kind: str, spec: Mapping[str, Any]):
    before, after = objects("full"), objects("full")
    found = [d for d in after if d["kind"] == kind and d["spec"].get("clusterIP") is None]
    found[0]["spec"].update(spec)
    assert len(forbidden(before, after)) == 1


def test_selectors_hold_name_release_and_component_alone():
    values = {"commonLabels": {"team": "x"}, "api": {"podLabels": {"tier": "x"}}}
    for document in render(values, ci="default"):
        if document["kind"] in ("Deployment", "StatefulSet"):
            assert set(document["spec"]["selector"]["matchLabels"]) == {
                "app.kubernetes.io/name",
                "app.kubernetes.io/instance",
                "app.kubernetes.io/component",
            }


def test_a_label_of_a_user_never_replaces_one_that_a_selector_needs():
    values = {"commonLabels": {"app.kubernetes.io/component": "x"}}
    values["api"] = {"podLabels": {"app.kubernetes.io/instance": "x"}}
    documents = render(values)
    pod = pod_of(documents, "api")
    assert selects(find(documents, "Deployment")["spec"]["selector"], pod.labels)


# --- one after the other


def test_all_learner_pods_start_at_once_and_are_replaced_in_order():
    spec = find(objects("several-nodes"), "StatefulSet", "rel-leeway-learner")["spec"]
    assert spec["podManagementPolicy"] == "Parallel"
    assert spec["updateStrategy"] == {"type": "RollingUpdate"}


@pytest.mark.parametrize("ci", ["default", "several-nodes"])
def test_a_new_configuration_restarts_every_pod_that_reads_it(ci: str):
    before, after = objects(ci), render({"config": "name = 'other'"}, ci=ci)
    for component in ("api", "learner", "ray-head", "policy", "actors"):
        notes = [pod_of(d, component).template["metadata"]["annotations"] for d in (before, after)]
        assert notes[0]["checksum/config"] != notes[1]["checksum/config"]
    assert pod_of(before, "redis").template == pod_of(after, "redis").template


PASSWORDS = {"redis": {"password": "a" * 20}, "api": {"tokens": {"read": "b" * 20}}}


def test_another_given_password_restarts_the_pods_that_read_it():
    def sums(values: Mapping[str, Any]) -> dict[str, str | None]:
        documents = render(values)
        parts = ("api", "learner", "redis", "ray-head", "policy", "actors")
        found = {p: pod_of(documents, p).template["metadata"]["annotations"] for p in parts}
        return {part: notes.get("checksum/secret") for part, notes in found.items()}

    none, one = sums({}), sums(PASSWORDS)
    other = sums({**PASSWORDS, "redis": {"password": "c" * 20}})
    token = sums({**PASSWORDS, "api": {"tokens": {"read": "c" * 20}}})
    assert set(none.values()) == {None}
    assert all(one[part] != other[part] for part in one)
    assert [part for part in one if one[part] != token[part]] == ["api"]


def test_each_sweep_writes_into_a_folder_of_its_own():
    sweep = {"enabled": True, "config": "name = 'a'"}
    folders = [
        pod_of(render({"sweep": sweep, **change}), "sweep").main["args"][-1]
        for change in ({}, {"sweep": {**sweep, "config": "name = 'b'"}}, {"config": ""}, {})
    ]
    assert folders[0] == folders[3] and len(set(folders)) == 3
    assert all(f.startswith("/var/lib/leeway/runs/sweeps/search-rel-leeway-") for f in folders)
    args = ["sweep", "x.toml", "--out", "/tmp/out"]
    assert pod_of(render({"sweep": {**sweep, "args": args}}), "sweep").main["args"] == args


def test_runs_that_only_ray_mounts_have_a_claim_too():
    runs = {"storage": {"runs": {"accessModes": ["ReadWriteMany"]}}, "learner": {"enabled": False}}
    documents = render({**runs, "serve": {"mountRuns": True}})
    assert find(documents, "PersistentVolumeClaim", "rel-leeway-runs")


def test_another_sweep_is_another_job():
    sweep = {"enabled": True, "config": "name = 'a'"}
    names = [
        find(render({"sweep": {**sweep, **change}}), "Job")["metadata"]["name"]
        for change in ({}, {"config": "name = 'b'"}, {"args": ["sweep"]}, {})
    ]
    assert names[0] == names[3] and len(set(names)) == 3


# --- two releases in one namespace


@pytest.mark.parametrize("ci", [name for name in CI_NAMES if name != "outside"])
@pytest.mark.parametrize("other", ["other", "rel-2", "rel-leeway", "leeway"])
def test_two_releases_share_no_object_and_select_no_pod_of_each_other(ci: str, other: str):
    ours, theirs = objects(ci), render(ci=ci, release=other)
    names = [{(d["kind"], d["metadata"]["name"]) for d in r} for r in (ours, theirs)]
    if other != "rel-leeway":  # its full name is that of rel: Helm itself refuses the second
        assert names[0] & names[1] == set()
    for here, there in ((ours, theirs), (theirs, ours)):
        for selector in _selectors(here):
            assert [p.where for p in pods(there) if selects(selector, p.labels)] == []


def _selectors(documents: Sequence[Document]) -> list[dict[str, Any]]:
    """Of workloads, services, budgets, monitors and network policies, their peers included."""
    found = []
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            found.append(spec["selector"])
        if document["kind"] == "Service":
            found.append({"matchLabels": spec["selector"]})
        if document["kind"] == "NetworkPolicy":
            found.append(spec["podSelector"])
            rules = [*spec.get("ingress", []), *spec.get("egress", [])]
            peers = [peer for r in rules for peer in [*r.get("from", []), *r.get("to", [])]]
            found += [p["podSelector"] for p in peers if set(p) == {"podSelector"}]
    return found


def test_two_long_names_that_begin_alike_stay_apart():
    long = "a-release-whose-name-is-as-long-as-helm-lets-it-be"
    names = [
        find(render(release=release), "Deployment")["metadata"]["name"]
        for release in (f"{long}-x", f"{long}-y")
    ]
    assert names[0] != names[1] and all(len(name) <= 38 for name in names)


def test_runs_of_one_release_name_in_two_namespaces_have_names_of_their_own():
    """They may share an outside Redis."""
    names = [
        pod_of(render(namespace=space), "api").main["args"][3] for space in ("one", "two", "a" * 63)
    ]
    assert names[0] == "/var/lib/leeway/runs/one-rel-leeway"
    assert names[1] == "/var/lib/leeway/runs/two-rel-leeway"
    assert len(names[2].rpartition("/")[2]) == 63
