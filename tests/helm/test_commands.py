"""What the chart starts is what the code has: commands, applications, variables, paths."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import typer.main
import yaml

from leeway.replay.errors import ConfigurationError
from leeway.services import cli
from leeway.services.config import REDIS_URL, RunConfig
from leeway.services.heartbeat import FILE
from leeway.services.layout import RunDirectory
from leeway.services.processes.learn import GRACE, GRACE_S, grace_s, learn
from tests.helm import fake_cluster
from tests.helm.chart import (
    CHART,
    CI_NAMES,
    CUSTOM_KINDS,
    PodTemplate,
    find,
    objects,
    pod_of,
    pods,
    render,
)
from tests.helm.tools import ROOT

WITH_SERVE = [name for name in CI_NAMES if name != "no-kuberay"]


def commands(ci: str) -> list[tuple[PodTemplate, list[str]]]:
    """Of every pod whose image starts `leeway`, its arguments."""
    ours = [
        pod for pod in pods(objects(ci)) if pod.component in ("api", "learner", "sweep", "test")
    ]
    assert all("command" not in pod.main for pod in ours), "the image's entry point is `leeway`"
    return [(pod, pod.main["args"]) for pod in ours]


@pytest.mark.parametrize("ci", CI_NAMES)
def test_every_command_parses(ci: str):
    for pod, words in commands(ci):
        command: Any = typer.main.get_command(cli.app)
        rest = list(words)
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        assert command.name == words[0], pod.where
        command.make_context(command.name, rest)


@pytest.mark.parametrize("ci", CI_NAMES)
def test_every_path_that_a_command_names_is_mounted(ci: str):
    for pod, words in commands(ci):
        mounts = [PurePosixPath(m["mountPath"]) for m in pod.main["volumeMounts"]]
        for path in (PurePosixPath(word) for word in words if word.startswith("/")):
            assert any(path.is_relative_to(mount) for mount in mounts), (pod.where, path)


def serve_config(ci: str) -> dict[str, Any]:
    return yaml.safe_load(find(objects(ci), "RayService")["spec"]["serveConfigV2"])


@pytest.mark.parametrize("ci", WITH_SERVE)
def test_ray_takes_the_serve_configuration(ci: str):
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(serve_config(ci))


@pytest.mark.parametrize("ci", WITH_SERVE)
def test_every_application_is_a_builder_that_takes_its_args(ci: str):
    for application in serve_config(ci)["applications"]:
        module, _, name = application["import_path"].partition(":")
        builder = getattr(importlib.import_module(module), name)
        assert len(inspect.signature(builder).parameters) == 1
        assert set(application["args"]) == importlib.import_module(module).ARGUMENTS


def test_the_deployments_whose_options_it_sets_exist():
    from leeway.actors import serve_replicas

    named = {
        deployment["name"]
        for application in serve_config("default")["applications"]
        for deployment in application.get("deployments", [])
    }
    assert named == {"PolicyServer", "RetrieverServer", "RolloutServer"}
    assert {getattr(serve_replicas, name).name for name in named} == named


def test_the_applications_are_those_of_the_ray_serve_file():
    file = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())
    ours = {a["name"]: a["import_path"] for a in serve_config("default")["applications"]}
    assert ours == {a["name"]: a["import_path"] for a in file["applications"]}


def test_without_a_retriever_its_application_is_left_out():
    documents = render({"serve": {"retriever": {"enabled": False}}})
    config = yaml.safe_load(find(documents, "RayService")["spec"]["serveConfigV2"])
    assert [a["name"] for a in config["applications"]] == ["policy", "rollout", "course"]


@pytest.mark.parametrize("ci", WITH_SERVE)
def test_every_replica_finds_the_resource_of_its_group(ci: str):
    spec = find(objects(ci), "RayService")["spec"]
    groups = spec["rayClusterConfig"]["workerGroupSpecs"]
    offered = {g["groupName"]: g["rayStartParams"]["resources"] for g in groups}
    # KubeRay hands the text to a shell, which takes the outer quotes away.
    assert offered == {
        "policy": '"{\\"leeway_policy\\": 1000}"',
        "actors": '"{\\"leeway_actors\\": 1000}"',
    }
    for application in serve_config(ci)["applications"]:
        for deployment in application.get("deployments", []):
            group = "leeway_policy" if deployment["name"] == "PolicyServer" else "leeway_actors"
            assert deployment["ray_actor_options"]["resources"] == {group: 1}


def test_an_engine_asks_for_a_gpu_and_without_gpus_for_none():
    def gpus(ci: str) -> tuple[Any, Any]:
        (policy, *_) = serve_config(ci)["applications"]
        limits = pod_of(objects(ci), "policy").main["resources"]["limits"]
        options = policy["deployments"][0]["ray_actor_options"]
        return options["num_gpus"], limits.get("nvidia.com/gpu")

    assert gpus("default") == (1, "1")
    assert gpus("cpu") == (0, None)


def test_the_image_is_the_build_for_the_device():
    images = {ci: pod_of(objects(ci), "learner").main["image"] for ci in ("default", "cpu")}
    assert images["default"].endswith("/leeway-learner:0.1.0-gpu")
    assert images["cpu"].endswith("/leeway-learner:0.1.0")


def test_the_version_of_ray_is_the_pinned_one():
    pinned = re.search(r"^ray==(\S+)", (ROOT / "requirements" / "cpu.txt").read_text(), re.M)
    assert pinned is not None
    version = find(objects("default"), "RayService")["spec"]["rayClusterConfig"]["rayVersion"]
    assert version == pinned[1]


def test_the_version_of_the_chart_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project["version"]


def test_the_learner_has_time_for_its_checkpoint():
    """Finish a step, write it, and end: the grace of the ranks, and 10 s for torchrun."""
    pod = pod_of(render({"learner": {"terminationGracePeriodSeconds": 300}}), "learner")
    (value,) = [v["value"] for v in pod.main["env"] if v["name"] == GRACE]
    assert value == "290"
    assert pod_of(objects("default"), "learner").spec["terminationGracePeriodSeconds"] >= GRACE_S


def test_the_grace_of_the_ranks_is_that_of_the_pod(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(GRACE, raising=False)
    assert grace_s() == GRACE_S
    monkeypatch.setenv(GRACE, "290")
    assert grace_s() == 290


@pytest.mark.parametrize("given", ["soon", "-5", "0", "1.5"])
def test_a_grace_that_is_no_number_of_seconds_is_refused(
    given: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(GRACE, given)
    with pytest.raises(ConfigurationError, match="give a whole number of 1 or more"):
        grace_s()


def test_the_variables_are_those_that_the_code_reads():
    environment = {v["name"] for v in pod_of(objects("default"), "learner").main["env"]}
    assert {REDIS_URL, FILE, GRACE} <= environment


def test_the_probes_of_the_learner_read_its_heartbeat():
    main = pod_of(objects("default"), "learner").main
    (file,) = [v["value"] for v in main["env"] if v["name"] == FILE]
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        assert file in " ".join(main[probe]["exec"]["command"])
    assert main["livenessProbe"]["exec"]["command"][-1].endswith("-lt 1800")


@pytest.mark.parametrize(("age_s", "passes"), [(None, True), (1700, True), (1900, False)])
def test_liveness_fails_only_where_a_heartbeat_is_old(
    age_s: int | None, passes: bool, tmp_path: Path
):
    """A learner that has not begun has none, and is the start-up probe's."""
    file = tmp_path / "heartbeat"
    if age_s is not None:
        file.touch()
        then = file.stat().st_mtime - age_s
        os.utime(file, (then, then))
    probe = pod_of(objects("default"), "learner").main["livenessProbe"]["exec"]["command"]
    command = [word.replace("/tmp/heartbeat", str(file)) for word in probe]
    assert (subprocess.run(command, timeout=10).returncode == 0) is passes


def test_learn_removes_a_stale_heartbeat_before_it_looks_for_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "heartbeat"
    file.touch()
    monkeypatch.setenv(FILE, str(file))
    monkeypatch.delenv(REDIS_URL, raising=False)
    with pytest.raises(ConfigurationError):
        learn(RunConfig(), RunDirectory(tmp_path), tmp_path / "run.toml", stays=False)
    assert not file.exists()


def test_ranks_of_all_pods_meet_at_pod_0():
    documents = objects("several-nodes")
    values = {v["name"]: v.get("value") for v in pod_of(documents, "learner").main["env"]}
    host = "rel-leeway-learner-0.rel-leeway-learner.search.svc.cluster.local"
    assert values["PET_RDZV_ENDPOINT"] == f"{host}:29400"
    assert values["PET_NNODES"] == "2"
    service = find(documents, "Service", "rel-leeway-learner")["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True


@pytest.mark.parametrize("name", ["PET_NNODES", "PET_RDZV_ENDPOINT", "PET_RDZV_CONF"])
def test_torchrun_reads_the_variables(name: str, monkeypatch: pytest.MonkeyPatch):
    from torch.distributed import run as torchrun

    values = {v["name"]: v.get("value") for v in pod_of(objects("default"), "learner").main["env"]}
    for key in values:
        if key.startswith("PET_"):
            monkeypatch.setenv(key, values[key])
    found = torchrun.parse_args(["script.py"])
    assert getattr(found, name.removeprefix("PET_").lower()) == values[name]


def test_a_probe_that_is_null_is_left_out_and_a_handler_replaces_the_charts():
    values = {"livenessProbe": None, "readinessProbe": {"tcpSocket": {"port": "http"}}}
    main = pod_of(render({"api": values}), "api").main
    assert "livenessProbe" not in main
    assert main["readinessProbe"]["tcpSocket"] == {"port": "http"}
    assert "httpGet" not in main["readinessProbe"]


# --- NOTES.txt


def notes(ci: str, program: str, folder: Path) -> str:
    """What Helm prints after an install."""
    with fake_cluster.running(folder) as config:
        values = str(CHART / "ci" / f"{ci}-values.yaml")
        return fake_cluster.install(config, program, "--values", values)["info"]["notes"]


@pytest.mark.parametrize("program", ["helm3", "helm4"])
def test_the_notes_say_what_to_run_next(program: str, tmp_path: Path):
    said = notes("default", program, tmp_path)
    assert "kubectl --namespace search port-forward service/rel-leeway-api 8080:8080" in said
    assert "get secret rel-leeway --output jsonpath='{.data.api-read-token}'" in said
    assert "helm test rel --namespace search" in said
    assert "rel-leeway-runs and rel-leeway-redis stay when you uninstall" in said


def test_the_notes_say_what_is_off(tmp_path: Path):
    said = notes("no-kuberay", "helm4", tmp_path)
    assert "serve.enabled is false" in said and "networkPolicy.enabled is false" in said
    assert "helm test" not in said and "rayservice" not in said
    assert "get secret search-tokens" in notes("outside", "helm4", tmp_path)


def test_the_custom_kinds_of_the_tests_are_those_that_the_chart_asks_for():
    asked = re.findall(r'Has "([^"]+)"', (CHART / "templates" / "_checks.tpl").read_text())
    assert set(asked) == set(CUSTOM_KINDS)
