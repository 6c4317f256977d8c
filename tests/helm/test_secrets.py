"""Passwords are generated once, kept over upgrades, and never lie outside a Secret."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from leeway.replay.redis_acl import user_line
from tests.helm import fake_cluster
from tests.helm.chart import (
    HELMS,
    NAMESPACE,
    RELEASE,
    Document,
    Refused,
    find,
    objects,
    parsed,
    pod_of,
    pods,
    render,
)

KEYS = {"redis-password", "api-read-token", "api-control-token"}
OUTSIDE = {"enabled": False, "url": "redis://:secret@redis.example.org:6379/0"}
NO_RAY_REDIS = {"gcsFaultTolerance": {"enabled": False}}


def install(config: Path, program: str, *arguments: str) -> list[Document]:
    """What `helm install` would send to the cluster that `config` leads to."""
    return parsed(fake_cluster.install(config, program, *arguments)["manifest"])


def held(documents: list[Document]) -> Document:
    """The Secret as the cluster holds it afterwards: Helm notes whose it is."""
    secret = copy.deepcopy(find(documents, "Secret"))
    owner = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
    secret["metadata"]["annotations"] = owner
    return secret


def secret_of(documents: list[Document]) -> dict[str, str]:
    """Its values, decoded."""
    data = find(documents, "Secret")["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


@pytest.mark.parametrize("program", HELMS)
def test_an_install_generates_three_different_passwords(program: str, tmp_path: Path):
    with fake_cluster.running(tmp_path) as config:
        made = secret_of(install(config, program))
    assert set(made) == KEYS and len(set(made.values())) == 3
    assert all(len(value) == 40 and value.isalnum() for value in made.values())


@pytest.mark.parametrize("program", HELMS)
def test_an_upgrade_keeps_them(program: str, tmp_path: Path):
    with fake_cluster.running(tmp_path) as config:
        first = held(install(config, program))
    with fake_cluster.running(tmp_path, first) as config:
        second = find(install(config, program, "--set", "api.replicas=3"), "Secret")
    assert second["data"] == first["data"]


@pytest.mark.parametrize("program", HELMS)
def test_an_upgrade_generates_only_what_is_missing(program: str, tmp_path: Path):
    with fake_cluster.running(tmp_path) as config:
        first = held(install(config, program))
    older = copy.deepcopy(first)
    del older["data"]["api-control-token"]
    with fake_cluster.running(tmp_path, older) as config:
        second = find(install(config, program), "Secret")
    assert set(second["data"]) == KEYS
    assert second["data"]["redis-password"] == first["data"]["redis-password"]
    assert second["data"]["api-control-token"] != first["data"]["api-control-token"]


@pytest.mark.parametrize("program", HELMS)
def test_the_cluster_itself_says_whether_it_has_kuberay(program: str, tmp_path: Path):
    with (
        fake_cluster.running(tmp_path, has_kuberay=False) as config,
        pytest.raises(Refused, match="install the KubeRay operator first"),
    ):
        install(config, program)


def test_a_password_that_is_given_is_taken_even_if_it_is_a_number():
    values = {"redis": {"password": "1234567890"}, "api": {"tokens": {"read": "1" * 16}}}
    data = find(render(values), "Secret")["data"]
    assert data["redis-password"] == "1234567890"
    assert data["api-read-token"] == "1" * 16


def test_with_secrets_from_outside_none_is_made():
    assert [d for d in objects("outside") if d["kind"] == "Secret"] == []


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"redis": {"existingSecret": "mine"}}, {"api-read-token", "api-control-token"}),
        ({"api": {"tokens": {"existingSecret": "mine"}}}, {"redis-password"}),
        (
            {"redis": OUTSIDE, "serve": NO_RAY_REDIS},
            {"redis-url", "api-read-token", "api-control-token"},
        ),
    ],
    ids=str,
)
def test_only_what_is_not_given_is_made(values: dict[str, Any], keys: set[str]):
    assert set(find(render(values), "Secret")["data"]) == keys


def variable(documents: list[Document], component: str, name: str) -> dict[str, Any]:
    (found,) = [v for v in pod_of(documents, component).main["env"] if v["name"] == name]
    return found


@pytest.mark.parametrize("component", ["api", "learner", "ray-head", "policy", "actors"])
def test_every_process_takes_the_url_of_redis_from_the_secret(component: str):
    own = objects("default")
    url = variable(own, component, "LEEWAY_REDIS_URL")["value"]
    assert url == "redis://leeway:$(LEEWAY_REDIS_PASSWORD)@rel-leeway-redis:6379/0"
    source = variable(own, component, "LEEWAY_REDIS_PASSWORD")["valueFrom"]["secretKeyRef"]
    assert source == {"name": "rel-leeway", "key": "redis-password"}
    outside = variable(objects("outside"), component, "LEEWAY_REDIS_URL")
    assert outside["valueFrom"]["secretKeyRef"] == {"name": "search-redis", "key": "url"}


@pytest.mark.parametrize(
    ("ci", "secret", "keys"),
    [
        ("default", "rel-leeway", ("api-read-token", "api-control-token")),
        ("outside", "search-tokens", ("read", "control")),
    ],
)
def test_the_api_takes_its_tokens_from_the_secret(ci: str, secret: str, keys: tuple[str, str]):
    for name, key in zip(("READ", "CONTROL"), keys, strict=True):
        source = variable(objects(ci), "api", f"LEEWAY_API_{name}_TOKEN")["valueFrom"]
        assert source["secretKeyRef"] == {"name": secret, "key": key}


def test_a_password_is_in_the_secret_and_nowhere_else():
    values = {
        "redis": {"password": "correcthorsebattery"},
        "api": {"tokens": {"read": "read-read-read-read", "control": "ctrl-ctrl-ctrl-ctrl"}},
    }
    others = [document for document in render(values) if document["kind"] != "Secret"]
    text = json.dumps(others)
    assert [w for w in ("correcthorse", "read-read", "ctrl-ctrl") if w in text] == []
    url = {"redis": OUTSIDE, "serve": NO_RAY_REDIS}
    others = [document for document in render(url) if document["kind"] != "Secret"]
    assert "secret@" not in json.dumps(others)


def test_redis_gets_the_hash_of_its_password_by_a_file_in_memory():
    pod = pod_of(objects("default"), "redis")
    (volume,) = [v for v in pod.spec["volumes"] if v["name"] == "users"]
    assert volume["emptyDir"]["medium"] == "Memory"
    files = find(objects("default"), "ConfigMap", "rel-leeway-redis")["data"]
    users = files["users.conf"].splitlines()
    assert users[0] == "user default off"
    assert [line.split()[1:4] for line in users[1:]] == [
        ["leeway", "on", "#HASH"],
        ["ray", "on", "#HASH"],
    ]
    assert users[1] == user_line("#" + "0" * 64).replace("0" * 64, "HASH")
    assert files["redis.conf"].splitlines()[-1] == "include /run/redis/users.conf"


def test_ray_comes_to_redis_as_a_user_of_its_own():
    def options(ci: str) -> dict[str, Any]:
        spec = find(objects(ci), "RayService")["spec"]["rayClusterConfig"]
        return spec["gcsFaultToleranceOptions"]

    assert options("default")["redisUsername"] == {"value": "ray"}
    assert options("outside")["redisUsername"] == {"value": "ray"}
    outside = {"gcsFaultTolerance": {"redisAddress": "redis.example.org:6379"}}
    rendered = render({"redis": OUTSIDE, "serve": outside})
    cluster = find(rendered, "RayService")["spec"]["rayClusterConfig"]
    assert set(cluster["gcsFaultToleranceOptions"]) == {"redisAddress"}


def test_no_pod_but_the_autoscaling_head_gets_a_token_of_kubernetes():
    for ci, expected in (("default", set()), ("several-nodes", {"ray-head"})):
        found = {p.component for p in pods(objects(ci)) if p.spec["automountServiceAccountToken"]}
        assert found == expected
