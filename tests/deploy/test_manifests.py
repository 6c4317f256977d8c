"""The manifests without Helm: checked as the chart's are, and against the code that they start."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from requirements import generate
from tests.helm import schemas, semantics
from tests.helm.chart import Document, find, pods
from tests.helm.conftest import crd_folder  # noqa: F401  (a fixture)
from tests.helm.tools import SCHEMAS

from .local_processes import BIN

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kuberay"
GIVEN = {"Secret/leeway-redis", "Secret/leeway-api"}
"""Made by the user, as docs/kubernetes.md says: passwords stand in no file."""

sys.path.append(str(SCHEMAS))


@pytest.fixture
def documents() -> list[Document]:
    files = sorted(FOLDER.glob("*.yaml"))
    return [d for file in files for d in yaml.safe_load_all(file.read_text()) if d]


@pytest.mark.parametrize("version", schemas.VERSIONS)
def test_the_schemas_admit_every_object(documents, crd_folder: Path, version: str):  # noqa: F811
    pytest.importorskip("kubernetes_validate", reason="`make helm-test` fetches it")
    custom = schemas.custom_schemas(crd_folder)
    assert [fault for d in documents for fault in schemas.faults(d, version, custom)] == []


def test_the_objects_agree_with_each_other(documents: list[Document]):
    found = [f for f in semantics.faults(documents) if not any(g in f for g in GIVEN)]
    assert found == []


def test_a_planted_mistake_is_found(documents: list[Document], crd_folder: Path):  # noqa: F811
    ray = find(documents, "RayService")
    ray["spec"]["rayClusterConfig"]["workerGroupSpec"] = []
    assert schemas.faults(ray, schemas.VERSIONS[-1], schemas.custom_schemas(crd_folder))
    find(documents, "Deployment")["spec"]["template"]["metadata"]["labels"].clear()
    assert semantics.faults(documents)


def test_every_container_runs_a_command_that_exists(documents: list[Document]):
    ours = {"api", "learner"}
    for pod in pods(documents):
        if pod.component in ours:
            args: list[str] = pod.main["args"]
            done = subprocess.run(
                [BIN / "leeway", args[0], "--help"], capture_output=True, text=True
            )
            assert done.returncode == 0
            assert [a for a in args if a.startswith("--") and a not in done.stdout] == []


def test_the_configuration_is_valid(documents: list[Document], tmp_path: Path):
    file = tmp_path / "config.toml"
    file.write_text(find(documents, "ConfigMap", "leeway-config")["data"]["config.toml"])
    done = subprocess.run(
        [BIN / "leeway", "config", "validate", file], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def applications() -> dict[str, dict[str, Any]]:
    """Of each file that holds a Serve configuration."""
    [ray] = yaml.safe_load_all((FOLDER / "rayservice.yaml").read_text())
    serve = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())
    return {"kuberay": yaml.safe_load(ray["spec"]["serveConfigV2"]), "ray": serve}


@pytest.mark.parametrize("name", ["kuberay", "ray"])
def test_ray_serve_accepts_the_applications(name: str):
    from ray.serve.schema import ServeDeploySchema

    config = ServeDeploySchema.model_validate(applications()[name])
    assert [a.name for a in config.applications] == ["policy", "retriever", "rollout", "course"]
    assert {a.route_prefix for a in config.applications} == {None}


@pytest.mark.parametrize("name", ["kuberay", "ray"])
def test_every_import_path_builds_an_application_with_those_deployments(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import leeway.services.serve_application as built

    monkeypatch.setenv("LEEWAY_REDIS_URL", "redis://127.0.0.1:6379/0")
    file = tmp_path / "config.toml"
    file.write_text('name = "x"\n[policy]\nbackend = "torch"\n')
    for application in applications()[name]["applications"]:
        module, _, function = application["import_path"].partition(":")
        assert module == built.__name__
        args = {**application["args"], "config": str(file)}
        bound = getattr(built, function)(args)
        deployment = bound._bound_deployment.name
        overridden = [d["name"] for d in application.get("deployments", [])]
        assert overridden in ([], [deployment])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "needs args: config (a TOML file) and run_dir"),
        (
            {"config": "x.toml", "rundir": "y"},
            "args of a leeway application are config and run_dir",
        ),
        ({"config": "x.toml", "run_dir": "y"}, "x.toml does not exist"),
    ],
)
def test_bad_arguments_of_an_application_are_refused_in_a_sentence(args: dict, words: str):
    import leeway.services.serve_application as built
    from leeway.replay.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match=re.escape(words)):
        built.policy(args)


def test_the_versions_are_those_of_the_project(documents: list[Document]):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    ours = {pod.main["image"].rpartition(":")[2] for pod in pods(documents)
            if "leeway-" in pod.main["image"]}  # fmt: skip
    assert ours == {project}
    pins = dict(generate.read_pins((ROOT / "requirements" / "cpu.txt").read_text()))
    ray = find(documents, "RayService")["spec"]["rayClusterConfig"]["rayVersion"]
    assert ray == str(pins["ray"])
