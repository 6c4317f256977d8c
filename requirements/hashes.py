"""The files that pins may install, by SHA-256, so that pip refuses any other.

uv asks PyPI which files a version has. Kept are those that Linux on x86-64 would install under one
of PYTHONS: its wheels, and the source where a Python has no wheel.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename
from packaging.version import Version

PYTHONS: Final = ("3.11", "3.12")
PLATFORMS: Final = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)),
    *("manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "linux_x86_64"),
]
"""Of wheels for glibc; the images and their tests have no other."""
UV_S: Final = 600

Pins = Mapping[str, Version]
"""By canonical name."""


def hashed(pins: Pins) -> str:
    """One entry for each pin, in the order of names, as pip reads them:

        six==1.17.0 \\
            --hash=sha256:4721f391ed90541fddacab5acf947aa0d3dc7d27b2e1e8eda2be8970586c3274
    """
    listed = "".join(f"{name}=={pins[name]}\n" for name in pins)
    options = ("--no-deps", "--universal", f"--python-version={PYTHONS[0]}")
    packages = _uv(listed, "pylock.toml", *options, "--format=pylock.toml")
    found = {package["name"]: hashes(package) for package in tomllib.loads(packages)["packages"]}
    missing = [name for name in pins if not found.get(name)]
    if missing:
        sys.exit(
            f"PyPI has no file for Linux on x86-64 of {', '.join(missing)}: pin another version"
        )
    return "".join(_entry(f"{name}=={pins[name]}", found[name]) for name in sorted(pins))


def closure(roots: Iterable[str], preferred: Pins) -> dict[str, Version]:
    """`roots` and all that they require, on Linux with CUDA: at the preferred version where their
    requirements allow it, else at the newest. What any of PYTHONS requires is in it, at one version
    for all of them."""
    asked, kept, found = list(roots), dict(preferred), dict[str, Version]()
    for python in PYTHONS:
        found |= _closure(asked, kept, python)
        kept |= found
    wanted = {python: _closure(asked, found, python) for python in PYTHONS}
    apart = {
        name for pins in wanted.values() for name, version in pins.items() if version != found[name]
    }
    if apart:
        sys.exit(f"no version of {', '.join(sorted(apart))} suits Python {' and '.join(PYTHONS)}")
    return found


def _closure(roots: Sequence[str], preferred: Pins, python: str) -> dict[str, Version]:
    wanted = "".join(f"{name}=={preferred[name]}\n" for name in preferred)
    options = ("--python-platform=x86_64-manylinux_2_31", f"--python-version={python}")
    lines = _uv("\n".join(roots), "out.txt", *options, kept=wanted).splitlines()
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {name.partition("[")[0]: Version(version.partition(" ")[0]) for name, version in pairs}


def hashes(package: Mapping[str, Any]) -> list[str]:
    """SHA-256 of the files of one entry of a pylock.toml, sorted."""
    files: list[dict[str, Any]] = []
    is_covered = True
    for python in PYTHONS:
        tags = _tags(python)
        wheels = [w for w in package.get("wheels", []) if tags & parse_wheel_filename(_name(w))[3]]
        files += wheels
        is_covered = is_covered and bool(wheels)
    if not is_covered and "sdist" in package:
        files.append(package["sdist"])
    return sorted({file["hashes"]["sha256"] for file in files})


def _name(file: Mapping[str, Any]) -> str:
    return file.get("name") or unquote(Path(urlsplit(file["url"]).path).name)


def _tags(python: str) -> frozenset[Tag]:
    major, minor = (int(part) for part in python.split("."))
    own = cpython_tags((major, minor), platforms=PLATFORMS)
    shared = compatible_tags((major, minor), f"cp{major}{minor}", PLATFORMS)
    return frozenset([*own, *shared])


def _entry(pin: str, digests: Sequence[str]) -> str:
    return " \\\n    ".join([pin, *(f"--hash=sha256:{digest}" for digest in digests)]) + "\n"


def _uv(requirements: str, file: str, *options: str, kept: str = "") -> str:
    """What `uv pip compile` writes to a file of that name; `kept` are pins that it keeps to if it
    can."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / file
        if kept:
            written.write_text(kept, encoding="utf-8")
        command = [
            *(sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-header"),
            *("--no-annotate", "--output-file", str(written), *options),
        ]
        ended = subprocess.run(
            command, input=requirements, text=True, capture_output=True, timeout=UV_S
        )
        if ended.returncode:
            sys.exit(f"uv found no files for these pins: {ended.stderr.strip()}")
        return written.read_text(encoding="utf-8")
