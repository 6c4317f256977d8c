"""What `make sbom` writes: every package of an image's list with its version and hash."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from requirements import generate

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "build" / "sbom-tool" / "bin" / "cyclonedx-py"
LISTS = sorted((ROOT / "requirements" / "images").glob("*.txt"))


@pytest.mark.skipif(not TOOL.is_file(), reason="no cyclonedx-py: `make sbom` fetches it")
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
