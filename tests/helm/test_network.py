"""Who may talk to whom: the network policies, evaluated as Kubernetes evaluates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.helm.chart import NAMESPACE, Document, objects, pod_of, render
from tests.helm.semantics import selects

Labels = Mapping[str, str]

NCCL = 45678
"""Any high port: NCCL, gloo and Ray choose theirs."""
OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}
STRANGER = {"app": "stranger"}
INGRESS = {"app": "nginx"}
SPACES = {
    "search": {"kubernetes.io/metadata.name": "search"},
    "operators": {"kubernetes.io/metadata.name": "operators"},
    "ingress-nginx": {"kubernetes.io/metadata.name": "ingress-nginx"},
}


def is_peer(peer: Mapping[str, Any], labels: Labels, space: str, home: str) -> bool:
    """Whether a NetworkPolicy peer in namespace `home` names a pod. An ipBlock names none."""
    if "ipBlock" in peer:
        return False
    spaces = peer.get("namespaceSelector")
    is_there = space == home if spaces is None else selects(spaces, SPACES[space])
    return is_there and selects(peer.get("podSelector"), labels)


def is_open(ports: Sequence[Mapping[str, Any]] | None, port: int) -> bool:
    return not ports or any(entry.get("port") in (None, port) for entry in ports)


def allows(
    documents: Sequence[Document], direction: str, own: Labels, peer: Labels, space: str, port: int
) -> bool:
    """Whether a pod's policies let a connection in or out."""
    key, side = ("ingress", "from") if direction == "Ingress" else ("egress", "to")
    policies = [
        document["spec"]
        for document in documents
        if document["kind"] == "NetworkPolicy"
        and selects(document["spec"]["podSelector"], own)
        and direction in document["spec"]["policyTypes"]
    ]
    if not policies:
        return True
    rules = [entry for policy in policies for entry in policy.get(key) or []]
    return any(
        is_open(entry.get("ports"), port)
        and (not entry.get(side) or any(is_peer(p, peer, space, NAMESPACE) for p in entry[side]))
        for entry in rules
    )


def connects(documents: Sequence[Document], source: str, target: str, port: int) -> bool:
    """Between two components of the release: out of one and into the other."""
    one, other = (pod_of(documents, name).labels for name in (source, target))
    return allows(documents, "Egress", one, other, NAMESPACE, port) and allows(
        documents, "Ingress", other, one, NAMESPACE, port
    )


ENGINE_SIDE = ("ray-head", "policy", "actors")
COMPONENTS = ("api", "learner", "redis", "test", *ENGINE_SIDE)
NEEDED = {
    *((source, "redis", 6379) for source in ("api", "learner", *ENGINE_SIDE)),
    *((a, b, NCCL) for a in ("learner", *ENGINE_SIDE) for b in ("learner", *ENGINE_SIDE)),
    *((a, b, 29400) for a in ("learner", *ENGINE_SIDE) for b in ("learner", *ENGINE_SIDE)),
    *((a, b, 8265) for a in ("learner", *ENGINE_SIDE) for b in ("learner", *ENGINE_SIDE)),
    *((a, b, 6379) for a in ("learner", *ENGINE_SIDE) for b in ("learner", *ENGINE_SIDE)),
    *((a, b, 8080) for a in ("learner", *ENGINE_SIDE) for b in ("learner", *ENGINE_SIDE)),
    ("test", "api", 8080),
}
PORTS = (6379, 8080, 8265, 29400, NCCL)


@pytest.mark.parametrize("source", COMPONENTS)
@pytest.mark.parametrize("target", COMPONENTS)
def test_what_a_run_needs_is_open_and_nothing_else(source: str, target: str):
    documents = objects("default")
    found = {port for port in PORTS if connects(documents, source, target, port)}
    assert found == {port for a, b, port in NEEDED if (a, b) == (source, target)}


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("port", PORTS)
def test_a_stranger_and_another_release_reach_nothing(component: str, port: int):
    documents = objects("default")
    own = pod_of(documents, component).labels
    others = pod_of(render(release="other"), "learner").labels
    for peer in (STRANGER, others):
        assert not allows(documents, "Ingress", own, peer, NAMESPACE, port)


@pytest.mark.parametrize("component", COMPONENTS)
def test_pods_look_up_names_and_reach_nothing_outside(component: str):
    documents = objects("default")
    own = pod_of(documents, component).labels
    assert allows(documents, "Egress", own, {"k8s-app": "kube-dns"}, "operators", 53)
    for port in (80, 443, 6443):
        assert not allows(documents, "Egress", own, STRANGER, "operators", port)


def test_the_operator_reaches_the_dashboard_of_the_head_alone():
    documents = objects("default")
    for component in COMPONENTS:
        labels = pod_of(documents, component).labels
        ports = {p for p in PORTS if allows(documents, "Ingress", labels, OPERATOR, "operators", p)}
        assert ports == ({8265} if component == "ray-head" else set())


def test_the_ingress_controller_that_is_named_reaches_the_api_alone():
    documents = objects("full")
    for component in COMPONENTS:
        labels = pod_of(documents, component).labels
        found = [
            p for p in PORTS if allows(documents, "Ingress", labels, INGRESS, "ingress-nginx", p)
        ]
        assert found == ([8080] if component == "api" else [])


@pytest.mark.parametrize(("ci", "is_allowed"), [("default", False), ("several-nodes", True)])
def test_the_head_alone_reaches_kubernetes_and_only_to_scale(ci: str, is_allowed: bool):
    documents = objects(ci)
    for component in ("ray-head", "api", "redis"):
        labels = pod_of(documents, component).labels
        found = allows(documents, "Egress", labels, STRANGER, "operators", 6443)
        assert found == (is_allowed and component == "ray-head")
        token = pod_of(documents, component).spec["automountServiceAccountToken"]
        assert token == (is_allowed and component == "ray-head")


def test_an_outside_redis_is_reached_on_its_ports():
    values = {
        "redis": {"enabled": False, "url": "redis://redis:6380"},
        "serve": {"gcsFaultTolerance": {"enabled": False}},
        "networkPolicy": {"redisPorts": [6380]},
    }
    documents = render(values)
    for component in ("api", "learner", "policy"):
        labels = pod_of(documents, component).labels
        assert allows(documents, "Egress", labels, STRANGER, "operators", 6380)
        assert not allows(documents, "Egress", labels, STRANGER, "operators", 6379)


def test_an_object_store_is_reached_only_by_pods_that_fetch():
    documents = objects("several-nodes")
    reach = {
        component
        for component in COMPONENTS
        if allows(
            documents, "Egress", pod_of(documents, component).labels, STRANGER, "operators", 443
        )
    }
    assert reach == {"learner", "ray-head", "policy", "actors"}
