"""The objects are those of golden/, which a person has read."""

from __future__ import annotations

import pytest

from tests.helm import golden

CASES = [(ci, component) for ci in golden.KEPT for component in golden.kept(ci)]


@pytest.mark.parametrize("ci", golden.KEPT)
def test_the_components_are_the_kept_ones(ci: str):
    assert set(golden.by_component(ci)) == set(golden.kept(ci)) != set()


@pytest.mark.parametrize(("ci", "component"), CASES)
def test_the_objects_are_the_kept_ones(ci: str, component: str):
    assert golden.by_component(ci)[component] == golden.kept(ci)[component], (
        "read the difference, then write them again: python -m tests.helm.golden"
    )
