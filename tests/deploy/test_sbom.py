"""What an image contains: Python packages, by `make sbom`, and Debian's, by check.sh."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from requirements import debian, generate

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "build" / "sbom-tool" / "bin" / "cyclonedx-py"
LISTS = sorted((ROOT / "requirements" / "images").glob("*.txt"))


needs_tool = pytest.mark.skipif(
    not TOOL.is_file(), reason="no cyclonedx-py: `make sbom` fetches it"
)
VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
sys.exit(str(JsonStrictValidator(SchemaVersion.V1_6).validate_str(sys.stdin.read()) or ""))
"""
STATUS = """\
Package: tini
Status: install ok installed
Architecture: amd64
Version: 0.19.0-1+b3
Description: tiny but valid init
 Version: 9 is no field, for it is indented.

Package: libnuma1
Status: deinstall ok config-files
Architecture: amd64
Version: 2.0.16-1

Package: zlib1g
Status: install ok installed
Architecture: amd64
Version: 1:1.2.13.dfsg-1
"""


@needs_tool
@pytest.mark.parametrize("file", LISTS, ids=lambda file: file.stem)
def test_it_names_every_package_of_the_image(file: Path, tmp_path: Path):
    out = tmp_path / "image.json"
    project = ("--pyproject", "pyproject.toml", "--output-format", "JSON")
    subprocess.run(
        [TOOL, "requirements", file, *project, "--output-file", out],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=100,
    )
    written = json.loads(out.read_text())
    assert written["bomFormat"] == "CycloneDX"
    assert written["metadata"]["component"]["name"] == "leeway-rl"
    found = {canonicalize_name(c["name"]): c["version"] for c in written["components"]}
    pins = dict(generate.read_pins(file.read_text()))
    assert found == {name: str(version) for name, version in pins.items()}
    assert all(c["externalReferences"][0]["hashes"] for c in written["components"])


def test_make_writes_one_for_every_list():
    recipe = (ROOT / "Makefile").read_text()
    assert "for list in requirements/images/*.txt" in recipe
    assert "$$(basename $$list .txt).cdx.json" in recipe
    assert len(LISTS) == 5


def test_what_is_installed_of_debian_is_listed_and_what_was_removed_is_not():
    written = debian.bill("leeway-api", STATUS)
    assert written["metadata"]["component"]["name"] == "leeway-api"
    assert [(c["name"], c["version"], c["purl"]) for c in written["components"]] == [
        ("tini", "0.19.0-1+b3", "pkg:deb/debian/tini@0.19.0-1%2Bb3?arch=amd64"),
        ("zlib1g", "1:1.2.13.dfsg-1", "pkg:deb/debian/zlib1g@1%3A1.2.13.dfsg-1?arch=amd64"),
    ]


def validated(document: str) -> str:
    """What CycloneDX's own schema has against it."""
    python = TOOL.with_name("python")
    ended = subprocess.run(
        [python, "-c", VALIDATE], input=document, capture_output=True, text=True, timeout=100
    )
    return ended.stderr.strip()


@needs_tool
def test_it_fits_the_schema_of_cyclonedx():
    written = debian.bill("leeway-api", STATUS)
    assert validated(json.dumps(written)) == ""
    del written["components"][0]["name"]
    assert "name" in validated(json.dumps(written))


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], STATUS, "name the image"),
        (["leeway-api"], "", "leeway-api has no package of Debian installed"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(arguments: list[str], status: str, words: str):
    ended = subprocess.run(
        [sys.executable, "-m", "requirements.debian", *arguments],
        cwd=ROOT,
        input=status,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert words in ended.stderr


def test_the_images_are_asked_for_their_packages():
    script = (ROOT / "deploy" / "docker" / "check.sh").read_text()
    assert re.search(r"--entrypoint cat .*?/var/lib/dpkg/status", script, re.DOTALL)
    assert "requirements.debian" in script
