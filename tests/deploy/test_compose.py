"""deploy/compose.yaml: valid, as tight as the chart, and its services train together, each killed
once. Containers are processes here; `composed.py` says how."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import httpx
import psutil
import pytest
import yaml
from pydantic import ValidationError

from leeway.services.layout import RunDirectory
from tests.helm.tools import SCHEMAS

from .composed import (
    DEPLOY,
    PODMAN_COMPOSE,
    Composed,
    Refused,
    configuration,
    without_extensions,
)
from .local_processes import BIN, Place, Process, steps_of

ROOT = DEPLOY.parent
FILES = ("compose.yaml", "compose.gpu.yaml")
PASSWORD = {"REDIS_PASSWORD": "correct-horse-battery"}
needs_podman_compose = pytest.mark.skipif(
    not PODMAN_COMPOSE.is_file(), reason="no podman-compose: `make helm-test` fetches it"
)


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / name).read_text())


# --- what the files say


def validate(document: dict[str, Any]) -> None:
    """Against the Compose Specification; a key that it does not know is an error."""
    sys.path.append(str(SCHEMAS))
    try:
        found = pytest.importorskip("compose_spec", reason="`make helm-test` fetches it")
    finally:
        sys.path.remove(str(SCHEMAS))
    found.ComposeSpecification.model_validate(without_extensions(document), extra="forbid")


@pytest.mark.parametrize("name", FILES)
def test_the_specification_admits_every_key(name: str):
    validate(read(name))


@needs_podman_compose
def test_the_specification_admits_what_both_files_make_together():
    merged = configuration(PASSWORD, FILES)
    validate(merged)
    for name, gpu in (("serve", "0"), ("learner", "1")):
        service = merged["services"][name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "device_ids": [gpu], "capabilities": ["gpu"]}
        assert service["image"].endswith("-gpu")
        assert service["build"]["args"] == ["VARIANT=gpu"]


@pytest.mark.parametrize(
    "planted", [{"comand": []}, {"command": 3}, {"healthcheck": {"tests": []}}], ids=str
)
def test_a_planted_mistake_is_found(planted: dict[str, Any]):
    document = read("compose.yaml")
    document["services"]["api"].update(planted)
    with pytest.raises(ValidationError):
        validate(document)


@needs_podman_compose
def test_without_a_password_it_says_where_to_put_one():
    with pytest.raises(Refused, match=r"put REDIS_PASSWORD into deploy/.env"):
        configuration({})


@needs_podman_compose
def test_configuration_run_and_gpus_can_be_chosen():
    chosen = {"LEEWAY_CONFIG": "/x/y.toml", "LEEWAY_RUN": "second", "LEEWAY_LEARNER_GPU": "7"}
    services = configuration({**PASSWORD, **chosen}, FILES)["services"]
    for name in ("serve", "learner", "api"):
        assert "/x/y.toml:/etc/leeway/config.toml:ro" in services[name]["volumes"]
        assert "/var/lib/leeway/runs/second" in services[name]["command"]
    (device,) = services["learner"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == ["7"]


def test_it_starts_the_commands_that_there_are():
    services = read("compose.yaml")["services"]
    assert services.keys() == {"redis", "serve", "learner", "api"}
    for name, command in (("serve", "serve"), ("learner", "learn"), ("api", "api")):
        words = services[name]["command"]
        help_ = subprocess.run([BIN / "leeway", command, "--help"], capture_output=True, text=True)
        assert words[0] == command
        assert [w for w in words if w.startswith("--") and w not in help_.stdout] == []
        assert (DEPLOY / services[name]["build"]["context"]).resolve() == ROOT
        assert (ROOT / services[name]["build"]["dockerfile"]).is_file()


def test_nothing_is_root_or_may_write_its_image():
    for name, service in read("compose.yaml")["services"].items():
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"]), name
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_the_ranks_get_ten_seconds_less_than_the_container():
    learner = read("compose.yaml")["services"]["learner"]
    assert learner["stop_grace_period"] == "180s"
    assert learner["environment"]["LEEWAY_GRACE_S"] == "170"


def test_what_gpus_add_changes_services_that_there_are():
    gpu = read("compose.gpu.yaml")["services"]
    assert gpu.keys() <= read("compose.yaml")["services"].keys()
    assert {service["build"]["args"]["VARIANT"] for service in gpu.values()} == {"gpu"}


# --- what they start


@pytest.mark.ray
@pytest.mark.timeout(1500)
@needs_podman_compose
def test_the_services_train_together_and_each_is_killed_once(place: Place):
    chosen = {"LEEWAY_CONFIG": str(place.folder / "small.toml"), "LEEWAY_RUN": "second"}
    composed = Composed(place, {**PASSWORD, **chosen})
    run = RunDirectory(composed.folder("runs") / "second")
    running: dict[str, Process] = {}

    def start(name: str) -> None:
        running[name] = composed.start(name)
        if name == "redis":  # the others depend on its health
            place.until(lambda: composed.is_healthy("redis"), 120, *running.values())

    def until_step(number: int) -> None:
        place.until(lambda: number in steps_of(run), 400, *running.values())

    for name in ("redis", "serve", "learner", "api"):
        start(name)
    until_step(1)
    assert composed.is_healthy("learner")
    for number, name in enumerate(("learner", "redis", "api", "serve"), start=2):
        running.pop(name).kill()
        start(name)
        until_step(number)

    place.until(run.summary.is_file, 600, *running.values())
    assert json.loads(run.summary.read_text())["steps"] == 6
    answer = httpx.get(f"http://127.0.0.1:{composed.port('8080')}/livez", timeout=30)
    assert answer.status_code == 200
    names = ("api", "learner", "serve", "redis")
    assert {name: composed.stop(name, running[name]) for name in names} == dict.fromkeys(names, 0)
    assert PASSWORD["REDIS_PASSWORD"] not in "".join(process.tail for process in running.values())


@pytest.mark.timeout(300)
@needs_podman_compose
def test_redis_gets_sigterm_and_keeps_its_password_out_of_the_process_list(place: Place):
    composed = Composed(place, PASSWORD)
    server = composed.start("redis")
    place.until(lambda: composed.is_healthy("redis"), 120, server)
    words = psutil.Process(server.popen.pid).cmdline()
    assert words[0].startswith("redis-server"), "the shell has become the server: signals reach it"
    assert PASSWORD["REDIS_PASSWORD"] not in " ".join(words)
    assert composed.stop("redis", server) == 0
    assert "User requested shutdown" in server.tail
