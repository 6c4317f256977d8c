"""Models and data from an object store: the chart's init containers, run as they are rendered, with
the rclone of Debian. A folder stands for the store."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart import pod_of, render
from tests.helm.tools import FOLDER
from tests.tools.debian import program

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (FOLDER / "helm4").is_file(), reason="no Helm: `make helm-test` fetches it"
    ),
]
RUN_S = 120


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    (folder / "nested").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "nested" / "weights.safetensors").write_bytes(b"\x01" * 300_000)
    return folder


def init_container(store: Path, name: str, component: str = "learner") -> dict[str, Any]:
    """The one that fills a volume from `store`."""
    source = {"remote": f":local:{store}", "existingSecret": "object-store", "args": ["--stats=0"]}
    documents = render({"storage": {name: {"enabled": True, "source": source}}})
    (found,) = pod_of(documents, component).spec["initContainers"]
    assert found["name"] == f"fetch-{name}"
    return found


def run(container: dict[str, Any], mounted: Path, tmp: Path) -> subprocess.Popen[bytes]:
    """`rclone` with its arguments; the volume and /tmp are folders here."""
    paths = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    (volume,) = [path for path in paths if path != "/tmp"]
    words = [mounted if word == volume else word for word in container["args"]]
    words = [f"--config={tmp}/rclone.conf" if str(w).startswith("--config=") else w for w in words]
    return subprocess.Popen(
        [program("rclone", "rclone"), *words],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ended(started: subprocess.Popen[bytes]) -> tuple[int, str]:
    out, _ = started.communicate(timeout=RUN_S)
    return started.returncode, out.decode()


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize("name", ["models", "data"])
def test_the_volume_holds_what_the_store_holds(store: Path, tmp_path: Path, name: str):
    volume = tmp_path / "volume"
    container = init_container(store, name)
    assert container["envFrom"] == [{"secretRef": {"name": "object-store"}}]
    code, said = ended(run(container, volume, tmp_path))
    assert code == 0, said
    assert files_of(volume) == files_of(store)


def test_pods_that_share_the_volume_may_all_fill_it_at_once(store: Path, tmp_path: Path):
    volume = tmp_path / "volume"
    components = ("learner", "ray-head", "policy", "actors")
    containers = [init_container(store, "models", component) for component in components]
    started = [run(container, volume, tmp_path) for container in containers]
    # All have to end before any result counts.
    results = [ended(one) for one in started]
    assert [code for code, _ in results] == [0] * 4, results
    assert files_of(volume) == files_of(store)


def test_a_store_that_is_not_there_keeps_the_pod_from_starting(tmp_path: Path):
    container = init_container(tmp_path / "nowhere", "models")
    code, said = ended(run(container, tmp_path / "volume", tmp_path))
    assert code != 0
    assert "not found" in said
