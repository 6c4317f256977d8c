"""The lists of images with GPUs hold what any supported Python requires."""

from __future__ import annotations

import pytest
from packaging.version import Version

from requirements import hashes

PINS = {"numpy": Version("2.0"), "tomli": Version("2.1"), "pywin32": Version("1.0")}
OLDER, NEWER = hashes.PYTHONS


def answer_by_python(monkeypatch: pytest.MonkeyPatch, answers: dict[str, str]) -> list[str]:
    """uv answers so for each Python; returned is what it is told to keep to, call by call."""
    kept: list[str] = []

    def answer(requirements: str, file: str, *options: str, kept_to: str = "") -> str:
        kept.append(kept_to)
        (python,) = [o.partition("=")[2] for o in options if o.startswith("--python-version=")]
        return answers[python]

    monkeypatch.setattr(hashes, "_uv", lambda *given, kept="": answer(*given, kept_to=kept))
    return kept


def test_what_one_python_alone_requires_is_in_the_list(monkeypatch: pytest.MonkeyPatch):
    """tomli is needed below Python 3.11.7, say, and typing-extensions from 3.12 on."""
    answers = {
        OLDER: "numpy==2.0\ntomli==2.1\n",
        NEWER: "numpy==2.0\ntyping-extensions==4.1 ; python_version >= '3.12'\n",
    }
    kept = answer_by_python(monkeypatch, answers)
    assert hashes.closure(["numpy"], PINS) == {
        "numpy": Version("2.0"),
        "tomli": Version("2.1"),
        "typing-extensions": Version("4.1"),
    }
    assert "tomli==2.1" in kept[1], "the second Python keeps to what the first has found"


def test_a_package_that_no_version_suits_both_is_named(monkeypatch: pytest.MonkeyPatch):
    answer_by_python(monkeypatch, {OLDER: "numpy==2.0\n", NEWER: "numpy==2.2\n"})
    with pytest.raises(SystemExit, match=rf"no version of numpy suits Python {OLDER} and {NEWER}"):
        hashes.closure(["numpy"], PINS)
