"""Shell scripts, and the shell that the manifests hold, as shellcheck reads them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CI_NAMES, objects, pods
from tests.helm.tools import FOLDER
from tests.tools.debian import program

ROOT = Path(__file__).parents[2]
FILES = (ROOT / ".ci" / "run", ROOT / "deploy" / "docker" / "check.sh")
RUN_S = 60


def findings(script: str) -> list[str]:
    """One line for each, such as `-:2:6: warning: ... [SC2086]`."""
    ended = subprocess.run(
        [program("shellcheck", "shellcheck"), "--format=gcc", "-"],
        input=script,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert ended.returncode in (0, 1), ended.stderr
    return ended.stdout.splitlines()


def shells_of(container: dict) -> Iterator[str]:
    """What `sh -c` gets, of command, arguments and probes."""
    probes = ("livenessProbe", "readinessProbe", "startupProbe")
    lines = [[*(container.get("command") or []), *(container.get("args") or [])]]
    lines += [container.get(probe, {}).get("exec", {}).get("command") or [] for probe in probes]
    for line in lines:
        if line[:2] == ["sh", "-c"]:
            yield line[2]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_script_has_a_finding(file: Path):
    assert findings(file.read_text()) == []


@pytest.mark.skipif(not (FOLDER / "helm4").is_file(), reason="no Helm: `make helm-test` fetches it")
def test_no_shell_of_the_chart_has_a_finding():
    found = {
        script
        for ci in CI_NAMES
        for pod in pods(objects(ci))
        for container in pod.containers
        for script in shells_of(container)
    }
    assert len(found) >= 3, "Redis starts by one, and two probes are"
    assert [line for script in found for line in findings(f"#!/bin/sh\n{script}\n")] == []


def test_no_shell_of_the_manifests_and_of_compose_has_a_finding():
    documents = [
        document
        for file in (ROOT / "deploy" / "kuberay").glob("*.yaml")
        for document in yaml.safe_load_all(file.read_text())
    ]
    found = [s for pod in pods(documents) for c in pod.containers for s in shells_of(c)]
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    for service in services.values():
        found += [s.replace("$$", "$") for s in shells_of({"command": service["command"]})]
    assert len(found) >= 4
    assert [line for script in found for line in findings(f"#!/bin/sh\n{script}\n")] == []


def test_a_planted_mistake_is_found():
    (line,) = findings("#!/bin/sh\nrm $1\n")
    assert "[SC2086]" in line
